"""Control connections and those for heartbeats are reset, alone and together, at any byte: nobody is evicted for it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from pccl import Communicator, MasterNode, Result, SharedState
from tests.runtime.network.test_tls import master_context, peer_context
from tests.support.cluster import SUM, WAIT_S, Background, Cluster, ones, reduce_once, results, until
from tests.support.proxy import Proxy

OPENING_BYTES = 2000
"""More bytes than it takes to be told one's number."""


@contextmanager
def proxied(world: int, master: dict[str, Any] | None = None, **options: Any) -> Iterator[tuple[Cluster, Proxy]]:
    """A run whose peers come to their master through a proxy."""
    with MasterNode("127.0.0.1:0", peer_timeout=30, **(master or {})) as node, Proxy(node.address) as proxy:
        cluster = Cluster(proxy.address, master_timeout=2 * WAIT_S, **options)
        cluster.join(world)
        yield cluster, proxy
        cluster.close_all()


def views(cluster: Cluster) -> list[int]:
    found = []
    for peer in cluster.peers:
        session = peer._inner._session
        assert session is not None
        assert session.view is not None
        found.append(session.view.view)
    return found


def until_whole(proxy: Proxy, world: int) -> None:
    """Everybody has both connections again."""

    def is_whole() -> bool:
        live = [route for route in proxy.routes if not route.is_over]
        return (
            sum(route.is_for_heartbeats for route in live)
            == world
            == sum(not route.is_for_heartbeats for route in live)
        )

    until(is_whole, "all connections stand again")


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("heartbeats", "control"), [(False, True), (True, False), (True, True)])
def test_resets_evict_nobody(world: int, heartbeats: bool, control: bool) -> None:
    with proxied(world) as (cluster, proxy):
        before = views(cluster)
        for _ in range(3):
            until_whole(proxy, world)
            proxy.reset_all(heartbeats, control)
            cluster.each(lambda peer, _: peer.are_peers_pending())
            if world > 1:
                assert cluster.each(reduce_once) == [world] * world
        assert views(cluster) == before


@pytest.mark.parametrize("kind", ["token", "tls"])
def test_a_session_is_carried_on_by_who_proves_itself(kind: str) -> None:
    tls = kind == "tls"
    master = {"token": "secret", "ssl_context": master_context() if tls else None}
    peers = {"token": "secret", "ssl_context": peer_context() if tls else None}
    with proxied(3, master, **peers) as (cluster, proxy):
        before = views(cluster)
        for _ in range(3):
            until_whole(proxy, 3)
            proxy.reset_all()
            assert cluster.each(lambda peer, _: peer.are_peers_pending()) == [False] * 3
            assert cluster.each(reduce_once) == [3] * 3
        assert views(cluster) == before


def test_a_connection_that_is_reset_while_calls_wait_loses_no_call() -> None:
    with proxied(3) as (cluster, proxy):
        for kind in ("update_topology", "are_peers_pending", "optimize_topology"):
            waiting = [Background(getattr(peer, kind)) for peer in cluster.peers[:2]]
            until_whole(proxy, 3)
            proxy.reset_all(heartbeats=False)
            waiting.append(Background(getattr(cluster[2], kind)))
            for call in waiting:
                call.result()
        x, y = ones(), ones()
        handle = cluster[0].all_reduce_async(x, op=SUM)
        other = cluster[1].all_reduce_async(y, op=SUM)
        proxy.reset_all()
        reduce_once(cluster[2])
        handle.wait()
        other.wait()
        assert np.all(x == 3)
        assert np.all(y == 3)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_a_run_goes_on_while_every_connection_is_reset_after_a_few_bytes(seed: int) -> None:
    """Connections break in the middle of frames and between them, in either direction: joins, ops, calls, syncs,
    leaves."""
    rng = random.Random(seed)

    def budget(opening: str) -> int:
        if opening == "Hello":  # there is no session to go on with before the answer
            return OPENING_BYTES
        return rng.randrange(20, 100) if opening == "HeartbeatHello" else rng.randrange(20, 900)

    with MasterNode("127.0.0.1:0", peer_timeout=30) as node, Proxy(node.address, budget) as proxy:
        cluster = Cluster(proxy.address, master_timeout=2 * WAIT_S)
        cluster.join(3)
        arrays = [np.full(1000, i, np.float32) for i in range(3)]
        states = [SharedState.from_numpy({"array": array}) for array in arrays]
        resets = proxy.resets
        for step in range(8):
            assert cluster.each(reduce_once) == [3] * 3
            assert cluster.each(lambda peer, _: peer.are_peers_pending()) == [False] * 3
            arrays[0][:] = step
            states[0].revision = step + 1
            cluster.each(lambda peer, i: peer.sync_shared_state(states[i]))
            assert all(np.array_equal(array, arrays[0]) for array in arrays)
            cluster.each(lambda peer, _: peer.update_topology())
        assert proxy.resets > resets + 5
        cluster.close_all()


def test_a_peer_of_a_master_that_does_not_know_the_session_looks_for_one() -> None:
    """A master that has been started anew at the same address does not know it."""
    with MasterNode("127.0.0.1:0") as first, Proxy(first.address) as proxy:
        cluster = Cluster(proxy.address, master_timeout=WAIT_S)
        cluster.join(2)
        with MasterNode("127.0.0.1:0") as second:
            proxy._target = ("127.0.0.1", int(second.address.rpartition(":")[2]))
            first.interrupt()
            first.wait()
            proxy.reset_all()
            assert cluster.each(lambda peer, _: peer.are_peers_pending()) == [False] * 2
            assert cluster.each(reduce_once) == [2] * 2
            cluster.close_all()


def test_who_does_not_come_back_is_lost_after_the_peer_timeout() -> None:
    """The peer gives heartbeats, but says nothing."""
    with MasterNode("127.0.0.1:0", peer_timeout=1) as node, Proxy(node.address) as proxy:
        cluster = Cluster(node.address, master_timeout=WAIT_S)
        cluster.join(2)
        lone = Communicator(proxy.address, master_timeout=0.5)
        cluster.admit([lone])
        proxy.is_open = False
        proxy.reset_all(heartbeats=False)
        assert cluster.peers.pop() is lone
        until(lambda: cluster[0].world_size == 2, "it is lost")
        assert cluster.each(reduce_once) == [2, 2]
        call = Background(lone.are_peers_pending)
        assert results([call.outcome()]) == [Result.MASTER_CONNECTION_FAILED]
        lone.close()
        cluster.close_all()
