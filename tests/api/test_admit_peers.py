"""admit_peers: newcomers, the shared state, and both together."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from pccl import AsyncCommunicator, Communicator, PCCLError, SharedState, UsageError
from tests.api.test_async_communicator import Peers, all_of, in_run
from tests.support.cluster import SUM, Background, Cluster, ones, refusal, until, waits_at_master

STEPS = 6


def states(count: int) -> list[SharedState]:
    return [SharedState.from_numpy({"x": np.full(9, float(index))}) for index in range(count)]


def value(state: SharedState) -> float:
    return float(np.frombuffer(state.tensors[0]._operand.memory(), np.float64)[0])


def test_admit_peers_synchronizes_once(cluster: Cluster) -> None:
    cluster.join(2)
    held = states(2)
    held[1].revision = 3
    assert cluster.each(lambda peer, i: peer.admit_peers(held[i])) == [True, True]
    assert [state.revision for state in held] == [3, 3]
    assert [value(state) for state in held] == [1.0, 1.0]
    assert cluster.each(lambda peer, i: peer.admit_peers(held[i])) == [False, False]


def test_admit_peers_without_a_state(cluster: Cluster) -> None:
    cluster.join(1)
    assert cluster[0].admit_peers() is False
    newcomer = cluster.new()
    connecting = Background(newcomer.connect)
    until(partial(waits_at_master, newcomer), "it waits")
    assert cluster[0].admit_peers() is True
    connecting.result()
    cluster.peers.append(newcomer)
    assert cluster.each(lambda peer, _: peer.world_size) == [2, 2]


def loop(peer: Communicator, state: SharedState) -> int:
    while state.revision < STEPS:
        peer.admit_peers(state)
        if peer.world_size > 1:
            peer.all_reduce(ones(), op=SUM, step=state.revision)
            state.revision += 1
    return state.revision


def test_usual_loop_takes_newcomers_in(cluster: Cluster) -> None:
    """Each peer enters the loop when it is accepted."""
    held = states(3)

    def take_part(index: int) -> int:
        with cluster.new() as peer:
            return loop(peer, held[index])

    peers = [Background(partial(take_part, index)) for index in range(3)]
    assert [peer.result() for peer in peers[:1]] == [STEPS]
    for peer in peers[1:]:
        peer.outcome()


def test_admit_peers_refuses_what_is_not_a_state(cluster: Cluster) -> None:
    cluster.join(1)
    refused = refusal(partial(cluster[0].admit_peers, {"x": ones()}))
    assert isinstance(refused, UsageError)
    assert refused.func_name == "admit_peers"


@in_run(2)
async def test_admit_peers_as_coroutine(peers: Peers) -> None:
    held = states(2)

    async def admit(peer: AsyncCommunicator, state: SharedState) -> bool:
        return await peer.admit_peers(state)

    assert await all_of(*(partial(admit, *pair) for pair in zip(peers, held, strict=True))) == [True, True]
    with pytest.raises(PCCLError, match="TIMEOUT"):
        await peers[0].admit_peers(held[0], timeout=0.05)
