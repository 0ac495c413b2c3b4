"""admit_peers and wait_for_peers: newcomers join, and peers begin together."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio

from pccl import AsyncCommunicator, Communicator, MasterNode, PCCLError, Result, SharedState, UsageError
from pccl._session_holder import SessionHolder
from pccl._timeouts import Timeout
from pccl.protocol.messages import Kind
from tests.api.test_async_communicator import Peers, all_of, in_run
from tests.support.cluster import (
    SUM,
    WAIT_S,
    Background,
    Cluster,
    ones,
    reduce_once,
    refusal,
    results,
    together,
    until,
    waits_at_master,
)

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


@pytest.fixture(autouse=True)
def stalls_are_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.protocol.peer.ops.STALL_AFTER_S", 0.1)


def join_and_wait(peer: Communicator, count: int) -> int:
    peer.connect()
    return peer.wait_for_peers(count, timeout=WAIT_S)


def is_calling(peer: Communicator) -> bool:
    session = peer._inner._session
    return session is not None and len(session._calls) > 0


def test_peers_begin_together(cluster: Cluster) -> None:
    peers, calls = [cluster.new() for _ in range(4)], []
    for peer in peers:
        calls.append(Background(partial(join_and_wait, peer, 4)))
        until(lambda peer=peer: is_calling(peer) or waits_at_master(peer), "it has come")  # type: ignore[misc]
    assert [call.result() for call in calls] == [4] * 4
    assert together([partial(reduce_once, peer) for peer in peers]) == [4] * 4
    together([peer.close for peer in peers])


def test_newcomer_does_not_delay_a_run(cluster: Cluster) -> None:
    """Two of the four that began are left: who takes a lost one's place finds three, and the others in their steps."""
    cluster.join(2)

    def steps(peer: Communicator, world: int) -> list[int]:
        found = []
        while not found or found[-1] < world:
            if peer.are_peers_pending():
                peer.update_topology()
            found.append(reduce_once(peer))
        return found

    newcomer = cluster.new()
    training = [Background(partial(steps, peer, 3)) for peer in cluster.peers]
    assert join_and_wait(newcomer, 4) == 3
    assert steps(newcomer, 3) == [3]
    assert [call.result()[-1] for call in training] == [3, 3]
    cluster.peers.append(newcomer)


def test_timeout_names_the_number_of_peers(cluster: Cluster) -> None:
    cluster.join(1)
    error = refusal(partial(cluster[0].wait_for_peers, 2, timeout=0.05))
    assert (error.result, error.func_name) == (Result.TIMEOUT, "wait_for_peers")
    assert "it waited for more peers to connect to" in str(error)
    assert "1 of 2 are in group 0 now" in str(error)
    assert cluster.address in str(error)
    newcomer = cluster.new()
    joining = Background(partial(join_and_wait, newcomer, 2))
    assert cluster[0].wait_for_peers(2, timeout=WAIT_S) == 2
    assert joining.result() == 2
    cluster.peers.append(newcomer)


@pytest.mark.parametrize("count", [0, -1, "2", 1.5, None])
def test_wrong_count_is_refused(cluster: Cluster, count: Any) -> None:
    cluster.join(1)
    error = refusal(partial(cluster[0].wait_for_peers, count))
    assert (error.result, error.func_name) == (Result.INVALID_ARGUMENT, "wait_for_peers")


def test_wait_for_peers_with_ops_in_flight_is_refused(cluster: Cluster) -> None:
    assert refusal(partial(cluster.new().wait_for_peers, 2)).result is Result.NOT_INITIALIZED
    cluster.join(2)
    handle = cluster[0].all_reduce_async(ones(), op=SUM)
    newcomer = cluster.new()
    joining = Background(partial(join_and_wait, newcomer, 3))
    until(partial(waits_at_master, newcomer), "the newcomer has come")
    error = refusal(partial(cluster[0].wait_for_peers, 3))
    assert (error.result, "tags [0]" in str(error)) == (Result.PENDING_ASYNC_OPS, True)
    assert reduce_once(cluster[1]) == 2, "the other was not drawn into anything"
    assert handle.wait()[0]
    assert cluster.each(lambda peer, _: peer.wait_for_peers(3, timeout=WAIT_S)) == [3, 3]
    assert joining.result() == 3
    cluster.peers.append(newcomer)


def test_wait_for_peers_ends_though_the_newcomer_has_left(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.join(1)
    newcomer = cluster.new()
    call = SessionHolder.group_call

    async def answer_late(holder: SessionHolder, name: str, kind: str, timeout: Timeout) -> int:
        value = await call(holder, name, kind, timeout)
        if kind == Kind.UPDATE_TOPOLOGY:
            while holder.view(name).world_size > 1:
                await trio.lowlevel.checkpoint()
        return value

    def join_and_leave() -> None:
        newcomer.connect()
        newcomer.close()

    leaving = Background(join_and_leave)
    monkeypatch.setattr(SessionHolder, "group_call", answer_late)
    assert cluster[0].wait_for_peers(2, timeout=WAIT_S) == 2
    leaving.result()


def test_wait_for_peers_counts_peers_that_were_admitted_together(cluster: Cluster) -> None:
    cluster.join(1)
    newcomer = cluster.new()
    connecting = Background(newcomer.connect)
    assert cluster[0].wait_for_peers(2, timeout=WAIT_S) == 2
    connecting.result()
    cluster.close(cluster[0])
    until(lambda: newcomer.world_size == 1, "the newcomer notices")
    assert newcomer.wait_for_peers(2, timeout=WAIT_S) == 2
    assert refusal(partial(newcomer.wait_for_peers, 2, timeout=0.01)).result is Result.TIMEOUT
    newcomer.close()


@pytest.mark.parametrize("call", [reduce_once, Communicator.are_peers_pending])
def test_wait_for_peers_waits_after_other_calls(cluster: Cluster, call: Callable[[Communicator], object]) -> None:
    """Though the group was large enough when this peer was admitted."""
    cluster.join(2)
    together([partial(call, peer) for peer in cluster.peers])
    cluster.close(cluster[0])
    until(lambda: cluster[0].world_size == 1, "the loss is known")
    assert refusal(partial(cluster[0].wait_for_peers, 2, timeout=0.01)).result is Result.TIMEOUT


def test_long_wait_for_peers_is_logged(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pccl.protocol.wait_reasons.FIRST_S", 0.02)
    cluster.join(1)
    with caplog.at_level(logging.WARNING, "pccl"):
        assert refusal(partial(cluster[0].wait_for_peers, 5, timeout=1)).result is Result.TIMEOUT
    said = [record.getMessage() for record in caplog.records if "wait_for_peers" in record.getMessage()]
    assert re.match(r"wait_for_peers has waited \d s for more peers to connect to", said[0])
    assert "1 of 5 are in group 0 now; look at `pccl status" in said[0]
    assert 2 <= len(said) < 8


def test_wait_for_peers_in_trio(master: MasterNode) -> None:
    found: list[int | PCCLError] = []

    async def peer() -> None:
        async with AsyncCommunicator(master.address) as communicator:
            found.append(await communicator.wait_for_peers(3))
            await communicator.barrier()

    async def main() -> None:
        with trio.fail_after(WAIT_S):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(peer)

    trio.run(main)
    assert found == [3, 3, 3]
    assert results(found) == [Result.SUCCESS] * 3
