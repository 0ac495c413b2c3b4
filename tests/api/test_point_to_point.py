"""Ops of two: names, verdicts in the master's book, and sends and receives between real peers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pccl import Communicator, Result
from pccl.protocol import topology
from tests.support.cluster import Background, Cluster, outcomes, refusal, results, run_of, until

# Real peers.


def test_send_and_recv() -> None:
    with run_of(3) as cluster:
        for count in (0, 1, 1000, 700_000):
            x = np.arange(count) * 3
            y = np.zeros_like(x)
            sent, received = outcomes(
                [lambda x=x: cluster[0].send(x, dst=2), lambda y=y: cluster[2].recv(y, src=0)]  # type: ignore[misc]
            )
            assert np.array_equal(x, y)
            assert (sent.tx_bytes, received.rx_bytes) == (x.nbytes, x.nbytes)
            assert sent.membership == cluster[0].membership
            assert received.membership == cluster[2].membership
            assert received.array is y
        until(lambda: not any(peer.stats["ops_open"] for peer in cluster.peers), "no op is open")


def test_mismatch_fails_both_ends() -> None:
    with run_of(3) as cluster:
        found = outcomes(
            [lambda: cluster[2].send(np.arange(3), dst=1), lambda: cluster[1].recv(np.zeros(4, int), src=2)]
        )
        assert results(found) == [Result.INVALID_ARGUMENT] * 2
        _, receiver, sender = cluster[0].membership.peers
        for error in found:
            assert re.search(rf"\b{sender} \([^)]*\) has send of 3 x int64", str(error))
            assert re.search(rf"\b{receiver} \([^)]*\) has recv of 4 x int64", str(error))
        assert cluster.each(lambda peer, _: peer.barrier().world_size) == [3] * 3


def test_timeout_fails_both_ends() -> None:
    with run_of(3) as cluster:
        x = np.arange(100_000)
        error = refusal(lambda: cluster[0].send(x, dst=1, timeout=0.2))
        assert error.result is Result.TIMEOUT
        assert refusal(lambda: cluster[1].recv(np.zeros_like(x), src=0)).result is Result.TIMEOUT
        y = np.zeros_like(x)
        assert (
            results(outcomes([lambda: cluster[0].send(x, dst=1), lambda: cluster[1].recv(y, src=0)]))
            == [Result.SUCCESS] * 2
        )
        assert np.array_equal(x, y)
        assert cluster.each(lambda peer, _: peer.barrier().world_size) == [3] * 3


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_loss_aborts_recv(lost: int) -> None:
    """The lost peer is the sender or a third one."""
    with run_of(4) as cluster:
        x = np.arange(10)
        thread = Background(lambda: cluster[3].recv(x, src=0))
        until(lambda: cluster[3].stats["ops_open"], "it waits")
        leaver = cluster.peers.pop(lost)
        leaver.close()
        error = thread.outcome()
        assert error.result is Result.RANK_CONNECTION_LOST
        assert cluster.each(lambda peer, _: peer.barrier().world_size) == [3] * 3


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A run of five that counts as large: only neighbors in the ring have links."""
    monkeypatch.setattr(topology, "MESH_PEERS_MAX", 2)
    with run_of(5) as cluster:
        yield cluster


def exchange(sender: Communicator, receiver: Communicator) -> list[Any]:
    x, y = np.arange(50_000), np.zeros(50_000, int)
    src, dst = (each.membership.rank for each in (sender, receiver))
    found = outcomes([lambda: sender.send(x, dst=dst), lambda: receiver.recv(y, src=src)])
    assert Result.SUCCESS not in results(found) or np.array_equal(x, y)
    return results(found)


def test_any_two_peers_of_a_large_group_exchange(large: Cluster) -> None:
    for a, b in itertools.permutations(range(5), 2):
        assert exchange(large[a], large[b]) == [Result.SUCCESS] * 2


def test_links_made_on_demand_survive_a_loss(large: Cluster) -> None:
    """After a loss the pairs connect again, in whatever ring there is."""
    assert exchange(large[0], large[2]) == [Result.SUCCESS] * 2
    thread = Background(lambda: large[2].recv(np.zeros(3), src=large[4].membership.rank))
    large.close(large[4])
    assert thread.outcome().result is Result.RANK_CONNECTION_LOST
    large.each(lambda peer, _: until(lambda: peer.world_size == 4, "the loss is known"))
    for a, b in itertools.permutations(range(4), 2):
        assert exchange(large[a], large[b]) == [Result.SUCCESS] * 2
