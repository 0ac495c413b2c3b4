"""Calls that peers make together, and those that can never meet."""

from __future__ import annotations

import pytest

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind, PendingAnswer
from pccl.protocol.peer.ops import STALL_AFTER_S
from pccl.types import Result
from tests.simulation.world import TAG, World, rings


def test_calls_that_can_never_meet_fail_with_a_reason(world: World) -> None:
    a, b = world.join(0, 0)
    first = world.group_call(a, Kind.UPDATE_TOPOLOGY)
    second = world.group_call(b, Kind.SYNC)
    world.run()
    for node, call in ((a, first), (b, second)):
        assert node.call(call) is Result.INVALID_USAGE
        assert "peer 1 (n1) in update_topology, peer 2 (n2) in sync_shared_state" in node.calls[call].reason


def test_calls_of_the_run_that_can_never_meet_across_groups(world: World) -> None:
    a, b = world.join(0, 1)
    first = world.group_call(a, Kind.UPDATE_TOPOLOGY)
    second = world.group_call(b, Kind.OPTIMIZE_TOPOLOGY)
    world.run()
    assert (a.call(first), b.call(second)) == (Result.INVALID_USAGE, Result.INVALID_USAGE)
    assert "peer 1 (n1) in update_topology, peer 2 (n2) in optimize_topology" in a.calls[first].reason


def test_call_waits_for_peers_that_may_still_come(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    first = world.group_call(a, Kind.UPDATE_TOPOLOGY)
    second = world.group_call(b, Kind.SYNC)
    world.run()
    assert first not in a.calls
    assert second not in b.calls
    world.kill(c)
    world.run()
    assert (a.call(first), b.call(second)) == (Result.INVALID_USAGE, Result.INVALID_USAGE)


def test_deadlocked_calls_fail_after_a_view_change(world: World) -> None:
    """While the ring is mended no call is deadlocked; afterwards more than one group may be."""
    a, b, c, d, e = world.join(0, 0, 1, 1, 2)
    world.kill(e)
    calls = [
        (node, world.group_call(node, kind))
        for node, kind in ((a, Kind.SYNC), (b, Kind.OPTIMIZE_TOPOLOGY), (c, Kind.SYNC), (d, Kind.OPTIMIZE_TOPOLOGY))
    ]
    world.run()
    assert [node.call(call) for node, call in calls] == [Result.INVALID_USAGE] * 4


def test_are_peers_pending_answers_no_to_a_single_caller(world: World) -> None:
    """So a newcomer may enter the usual loop at its top, while the others go on from update_topology."""
    a, b = world.join(0, 0)
    first = world.group_call(a, Kind.SYNC)
    second = world.group_call(b, Kind.ARE_PEERS_PENDING)
    world.run()
    assert (b.call(second), b.calls[second].value) == (Result.SUCCESS, PendingAnswer.ELSEWHERE)
    assert first not in a.calls
    assert world.call_all([b], Kind.SYNC) == [Result.SUCCESS]
    assert a.call(first) is Result.SUCCESS


def test_are_peers_pending_answers_no_while_others_wait_in_an_op(world: World) -> None:
    a, b = world.join(0, 0)
    op = world.launch(a, TAG)
    call = world.group_call(b, Kind.ARE_PEERS_PENDING)
    world.run()
    assert call not in b.calls
    world.wait(STALL_AFTER_S)
    world.run()
    assert (b.call(call), b.calls[call].value) == (Result.SUCCESS, PendingAnswer.ELSEWHERE)
    assert op not in a.results
    assert world.reduce([b]) == [Result.SUCCESS]
    assert a.result(op) is Result.SUCCESS


def test_are_peers_pending_of_a_peer_in_the_op_continues(world: World) -> None:
    a, b = world.join(0, 0)
    world.engines.held_back = {"n1", "n2"}
    for node in (a, b):
        world.launch(node, TAG)
    world.run()
    call = world.group_call(b, Kind.ARE_PEERS_PENDING)
    world.run()
    world.wait(STALL_AFTER_S)
    world.run()
    assert call not in b.calls
    assert world.call_all([a], Kind.ARE_PEERS_PENDING) == [Result.SUCCESS]
    world.engines.release()
    world.run()


def test_op_and_exclusive_call_that_wait_for_each_other(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    ops = [world.launch(node, TAG) for node in (a, b)]
    call = world.group_call(c, Kind.UPDATE_TOPOLOGY)
    world.run()
    assert not a.results
    assert call not in c.calls
    world.wait(STALL_AFTER_S)
    world.run()
    assert (a.result(ops[0]), b.result(ops[1]), c.call(call)) == (Result.INVALID_USAGE,) * 3
    assert f"the op with tag {TAG}" in c.calls[call].reason
    assert "peer 3 (n3) in update_topology" in a.results[ops[0]].reason
    assert world.reduce([a, b, c]) == [Result.SUCCESS] * 3, "each has heard once what was wrong"


def test_long_wait_in_an_op_does_not_fail_it(world: World) -> None:
    a, b = world.join(0, 0)
    op = world.launch(a, TAG)
    world.run()
    world.wait(1000)
    world.run()
    assert op not in a.results
    assert world.reduce([b]) == [Result.SUCCESS]
    assert a.result(op) is Result.SUCCESS


@pytest.mark.parametrize("kind", Kind.EXCLUSIVE)
def test_exclusive_call_with_ops_in_flight(world: World, kind: str) -> None:
    a, _ = world.join(0, 0)
    op = world.launch(a, TAG)
    call = world.group_call(a, kind)
    assert a.call(call) is Result.PENDING_ASYNC_OPS
    assert f"[{TAG}]" in a.calls[call].reason
    world.cancel(a, op)
    world.run()


def test_cancelled_call_is_left(world: World) -> None:
    a, b = world.join(0, 0)
    call = world.group_call(a, Kind.UPDATE_TOPOLOGY)
    world.run()
    world.cancel_group_call(a, call)
    world.run()
    assert a.call(call) is Result.TIMEOUT
    other = world.group_call(b, Kind.UPDATE_TOPOLOGY)
    world.run()
    assert other not in b.calls
    assert world.call_all([a], Kind.UPDATE_TOPOLOGY) == [Result.SUCCESS]
    assert b.call(other) is Result.SUCCESS


def test_call_that_has_begun_cannot_be_cancelled(world: World) -> None:
    (a,) = world.join(0)
    b = world.add()
    world.run()
    call = world.group_call(a, Kind.UPDATE_TOPOLOGY)
    world.run_until(lambda: world.master.state.is_changing)
    world.cancel_group_call(a, call)
    world.run()
    assert a.call(call) is Result.SUCCESS
    assert rings([a, b]) == {(1, 2)}


def test_cancel_that_crosses_the_result(world: World) -> None:
    a, b = world.join(0, 0)
    calls = [world.group_call(node, Kind.UPDATE_TOPOLOGY) for node in (a, b)]
    told = len(world.from_masters)
    world.run_until(lambda: any(isinstance(message, m.GroupCallResult) for _, message in world.from_masters[told:]))
    world.cancel_group_call(a, calls[0])
    world.run()
    assert a.call(calls[0]) is Result.SUCCESS
    assert world.call_all([a, b], Kind.UPDATE_TOPOLOGY) == [Result.SUCCESS] * 2


@pytest.mark.parametrize("kind", Kind.ALL)
def test_group_call_survives_a_loss(world: World, kind: str) -> None:
    a, b, c = world.join(0, 0, 0)
    calls = [world.group_call(node, kind) for node in (a, b)]
    world.run()
    assert calls[0] not in a.calls
    world.kill(c)
    world.run()
    assert (a.call(calls[0]), b.call(calls[1])) == (Result.SUCCESS, Result.SUCCESS)


@pytest.mark.parametrize("kind", Kind.ALL)
def test_group_call_survives_the_loss_of_a_caller(world: World, kind: str) -> None:
    a, b, c = world.join(0, 0, 0)
    world.group_call(c, kind)
    calls = [world.group_call(a, kind)]
    world.run()
    world.kill(c)
    world.run()
    assert calls[0] not in a.calls
    assert world.call_all([b], kind) == [Result.SUCCESS]
    assert a.call(calls[0]) is Result.SUCCESS
