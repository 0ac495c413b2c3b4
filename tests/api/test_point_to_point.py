"""Ops of two: names, verdicts in the master's book, and sends and receives between real peers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl import Result
from pccl._collectives import TAG_MAX
from pccl.protocol.master.ledger import Ledger
from pccl.protocol.messages import OpRef
from pccl.protocol.point_to_point import PAIR_TAG_MAX, RANK_BITS, callers_tag, pair_tag, participants, ranks_of
from tests.support.cluster import Background, outcomes, refusal, results, run_of, until

ranks = st.integers(0, 2**RANK_BITS - 1)


@given(ranks, ranks, st.integers(0, PAIR_TAG_MAX))
def test_names_tell_who_and_which_way(sender: int, receiver: int, tag: int) -> None:
    if sender == receiver:
        return
    name = pair_tag(sender, receiver, tag)
    assert TAG_MAX < name < 2**64
    assert ranks_of(name) == (sender, receiver)
    assert callers_tag(name) == tag


@given(st.integers(0, TAG_MAX))
def test_other_tags_are_everybodys(tag: int) -> None:
    assert ranks_of(tag) is None
    assert callers_tag(tag) == tag
    assert participants(tag, [4, 2, 9]) == {2, 4, 9}


def test_parties_are_peers_of_the_ring() -> None:
    assert participants(pair_tag(0, 2, 7), [4, 2, 9]) == {4, 9}
    assert participants(pair_tag(0, 3, 7), [4, 2, 9]) == frozenset()
    assert participants((1 << 63) | 5, [4, 2, 9]) == frozenset()  # with itself


def test_two_commit_what_is_theirs() -> None:
    book = Ledger([4, 2, 9])
    op = OpRef(pair_tag(0, 2, 7), 0)
    assert book.done(2, [op]) == []
    assert book.done(4, [op]) == []
    assert book.done(9, [op]) == [op]
    nobodys = OpRef(pair_tag(0, 3, 7), 0)
    assert [book.done(peer, [nobodys]) for peer in (4, 2, 9)] == [[], [], []]
    assert book.entries == 0


@pytest.mark.parametrize(("survivors", "is_committed"), [([4, 9], False), ([2, 4], True), ([2, 9], False), ([2], True)])
def test_of_two_who_live_must_be_done(survivors: list[int], is_committed: bool) -> None:
    """Peer 4 has sent and is done, peer 9 was to receive and is not; peer 2 has nothing to do with it."""
    book = Ledger([4, 2, 9])
    op = OpRef(pair_tag(0, 2, 7), 0)
    book.done(4, [op])
    assert book.settle(survivors) == ([op] if is_committed else [])


# Real peers.


def test_what_is_sent_is_received() -> None:
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
        until(lambda: not any(peer.stats["ops_open"] for peer in cluster.peers), "nothing is open")


def test_what_differs_fails_both_and_nobody_else() -> None:
    with run_of(3) as cluster:
        found = outcomes(
            [lambda: cluster[0].send(np.arange(3), dst=1), lambda: cluster[1].recv(np.zeros(4, int), src=0)]
        )
        assert results(found) == [Result.INVALID_ARGUMENT] * 2
        assert all("send of 3 x INT64" in str(error) and "send of 4 x INT64" in str(error) for error in found)
        assert cluster.each(lambda peer, _: peer.barrier().world_size) == [3] * 3


def test_a_timeout_ends_both() -> None:
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
def test_a_loss_ends_what_waits(lost: int) -> None:
    """Whoever is lost: the other, the peer waited for, or a third one."""
    with run_of(4) as cluster:
        x = np.arange(10)
        thread = Background(lambda: cluster[3].recv(x, src=0))
        until(lambda: cluster[3].stats["ops_open"], "it waits")
        leaver = cluster.peers.pop(lost)
        leaver.close()
        error = thread.outcome()
        assert error.result is Result.RANK_CONNECTION_LOST
        assert cluster.each(lambda peer, _: peer.barrier().world_size) == [3] * 3
