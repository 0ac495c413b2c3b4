"""wait_for_peers: peers that begin together, whoever comes when, and whatever the others do meanwhile."""

from __future__ import annotations

import logging
import re
from functools import partial
from typing import Any

import pytest
import trio

from pccl import AsyncCommunicator, Communicator, MasterNode, PCCLError, Result, SharedState
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


@pytest.fixture(autouse=True)
def stalls_are_told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.protocol.peer.ops.STALL_AFTER_S", 0.1)


def join_and_wait(peer: Communicator, count: int) -> int:
    peer.connect()
    return peer.wait_for_peers(count, timeout=WAIT_S)


def is_calling(peer: Communicator) -> bool:
    session = peer._inner._session
    return session is not None and len(session._calls) > 0


def test_peers_that_come_one_after_the_other_begin_together(cluster: Cluster) -> None:
    peers, calls = [cluster.new() for _ in range(4)], []
    for peer in peers:
        calls.append(Background(partial(join_and_wait, peer, 4)))
        until(lambda peer=peer: is_calling(peer) or waits_at_master(peer), "it has come")  # type: ignore[misc]
    assert [call.result() for call in calls] == [4] * 4
    assert together([partial(reduce_once, peer) for peer in peers]) == [4] * 4
    together([peer.close for peer in peers])


def test_a_peer_may_call_it_long_after_it_was_let_in(cluster: Cluster) -> None:
    first, second, third = (cluster.new() for _ in range(3))
    waiting = Background(partial(join_and_wait, first, 3))
    until(lambda: first.is_connected, "the first has founded the run")
    second.connect()  # the first lets it in, and asks whether there are more
    newcomer = Background(partial(join_and_wait, third, 3))
    until(partial(waits_at_master, third), "the third has come")
    until(partial(is_calling, first), "the first asks")
    assert not waiting.is_over
    assert second.wait_for_peers(3, timeout=WAIT_S) == 3
    assert (waiting.result(), newcomer.result()) == (3, 3)
    together([peer.close for peer in (first, second, third)])


def test_a_newcomer_does_not_hold_up_a_run_that_has_begun(cluster: Cluster) -> None:
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


def test_a_newcomer_finds_the_others_in_their_sync(cluster: Cluster) -> None:
    cluster.join(2)
    states = [SharedState.from_numpy({"x": ones()}) for _ in range(3)]
    newcomer = cluster.new()

    def admit_and_sync(peer: Communicator, state: SharedState) -> None:
        while peer.world_size < 3:
            peer.update_topology()
        peer.sync_shared_state(state)

    others = [Background(partial(admit_and_sync, *each)) for each in zip(cluster.peers, states, strict=False)]
    assert join_and_wait(newcomer, 4) == 3
    newcomer.sync_shared_state(states[2])
    for call in others:
        call.result()
    cluster.peers.append(newcomer)


def test_who_has_missed_the_moment_in_which_there_were_enough_goes_on(cluster: Cluster) -> None:
    """One has seen three peers and reduces; for the other there are two since the third was lost."""
    cluster.join(3)
    assert cluster[0].wait_for_peers(3) == 3
    gone = cluster.peers.pop()
    gone.close()
    until(lambda: [peer.world_size for peer in cluster.peers] == [2, 2], "it has left")
    reducing = Background(partial(reduce_once, cluster[0]))
    assert cluster[1].wait_for_peers(3, timeout=WAIT_S) == 2
    assert reduce_once(cluster[1]) == 2
    assert reducing.result() == 2


def test_who_comes_while_the_others_admit_joins_them(cluster: Cluster) -> None:
    """As after a call that was interrupted when all knew that somebody waits."""
    cluster.join(2)
    newcomer = cluster.new()
    connecting = Background(newcomer.connect)
    until(partial(waits_at_master, newcomer), "the newcomer has come")
    admitting = Background(cluster[0].update_topology)
    until(partial(is_calling, cluster[0]), "the first admits")
    assert cluster[1].wait_for_peers(3, timeout=WAIT_S) == 3
    connecting.result()
    assert admitting.result() is None
    cluster.peers.append(newcomer)


def test_a_timeout_says_how_many_are_there_and_the_call_can_be_made_again(cluster: Cluster) -> None:
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


def test_the_timeout_of_the_communicator_counts(cluster: Cluster) -> None:
    (peer,) = cluster.join(1)
    peer.timeout = 0.05
    assert refusal(partial(cluster[0].wait_for_peers, 2)).result is Result.TIMEOUT


def test_peers_of_the_own_group_are_counted(cluster: Cluster) -> None:
    """A group that is complete goes on. Newcomers of another one come in when its peers call update_topology."""
    one, other, last, last_other = peers = [cluster.new(peer_group=group) for group in (0, 1, 0, 1)]
    calls = []
    for peer in (one, other):
        calls.append(Background(partial(join_and_wait, peer, 2)))
        until(lambda peer=peer: peer.is_connected, "it is in the run")  # type: ignore[misc]
    assert join_and_wait(last, 2) == calls[0].result() == 2
    assert not calls[1].is_over
    newcomer = Background(partial(join_and_wait, last_other, 2))
    until(partial(waits_at_master, last_other), "it waits for all who are in the run")
    together([one.update_topology, last.update_topology])
    assert newcomer.result() == calls[1].result() == 2
    together([peer.close for peer in peers])


@pytest.mark.parametrize("count", [0, -1, "2", 1.5, None])
def test_a_wrong_count_is_refused(cluster: Cluster, count: Any) -> None:
    cluster.join(1)
    error = refusal(partial(cluster[0].wait_for_peers, count))
    assert (error.result, error.func_name) == (Result.INVALID_ARGUMENT, "wait_for_peers")


def test_before_connect_and_with_ops_in_flight_it_is_refused(cluster: Cluster) -> None:
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


def test_it_does_not_wait_in_silence(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pccl.protocol.long_wait.FIRST_S", 0.02)
    monkeypatch.setattr("pccl.runtime.threads.waking.LOOK_S", 0.02)
    cluster.join(1)
    with caplog.at_level(logging.WARNING, "pccl"):
        assert refusal(partial(cluster[0].wait_for_peers, 5, timeout=1)).result is Result.TIMEOUT
    said = [record.getMessage() for record in caplog.records if "wait_for_peers" in record.getMessage()]
    assert re.match(r"wait_for_peers has waited \d s for more peers to connect to", said[0])
    assert "1 of 5 are in group 0 now; look at `pccl status" in said[0]
    assert 2 <= len(said) < 8


def test_trio_programs_have_it_too(master: MasterNode) -> None:
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
