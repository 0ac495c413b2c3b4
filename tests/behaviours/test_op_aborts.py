"""Ops, from their launch to the verdict that all hear."""

from __future__ import annotations

import pytest

from pccl.protocol import messages as m
from pccl.protocol.completion import pair_tag
from pccl.protocol.messages import Kind
from pccl.protocol.peer.ops import ABORTS_KEPT_MAX
from pccl.types import Result
from tests.simulation.world import TAG, World


def test_op_commits_when_all_are_done(world: World) -> None:
    nodes = world.join(0, 0, 0)
    world.engines.held_back = {"n3"}
    ops = [world.launch(node, TAG) for node in nodes]
    world.run()
    assert not any(node.results for node in nodes)
    world.engines.release()
    world.run()
    assert [node.result(op) for node, op in zip(nodes, ops, strict=True)] == [Result.SUCCESS] * 3
    result = nodes[0].results[ops[0]]
    assert (result.world_size, result.tx_bytes, result.rx_bytes) == (3, 10, 20)


def test_tags_are_used_again_and_launched_in_any_order(world: World) -> None:
    a, b = world.join(0, 0)
    for _ in range(3):
        ops = [(a, world.launch(a, tag)) for tag in (1, 2, 3)] + [(b, world.launch(b, tag)) for tag in (3, 1, 2)]
        world.run()
        assert all(node.result(op) is Result.SUCCESS for node, op in ops)
    assert set(world.checks.verdicts) == {(0, 2, tag, use) for tag in (1, 2, 3) for use in range(3)}


def test_op_done_on_all_survivors_commits(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    world.engines.held_back = {"n3"}
    ops = [world.launch(node, TAG) for node in (a, b, c)]
    world.run()
    assert not a.results
    world.kill(c)
    world.run_until(lambda: ops[0] in a.results)
    assert a.view.ring == (1, 2), "a caller that now asks for the world size sees which are left"
    world.run()
    assert (a.result(ops[0]), b.result(ops[1])) == (Result.SUCCESS, Result.SUCCESS)
    assert a.results[ops[0]].world_size == 3


def test_op_missing_on_a_survivor_aborts(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    world.engines.held_back = {"n2"}
    ops = [world.launch(node, TAG) for node in (a, b, c)]
    world.run()
    world.kill(c)
    world.run_until(lambda: ops[0] in a.results)
    assert a.view.ring == (1, 2)
    world.run()
    assert (a.result(ops[0]), b.result(ops[1])) == (Result.RANK_CONNECTION_LOST,) * 2
    assert "peer 3 (n3) was lost (connection reset)" in a.results[ops[0]].reason


def test_each_op_has_its_own_verdict_at_a_flush(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    world.engines.held_back = {"n3"}
    held = [world.launch(node, 1) for node in (a, b, c)]
    lacking = [world.launch(node, 2) for node in (a, b)]
    world.run()
    world.kill(c)
    world.run()
    assert (a.result(held[0]), b.result(held[1])) == (Result.SUCCESS,) * 2
    assert (a.result(lacking[0]), b.result(lacking[1])) == (Result.RANK_CONNECTION_LOST,) * 2


def test_op_launched_by_some_survivors_aborts(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    op = world.launch(a, TAG)
    world.run()
    world.kill(c)
    world.run()
    assert a.result(op) is Result.RANK_CONNECTION_LOST
    assert world.reduce([a, b]) == [Result.SUCCESS] * 2, "in the new view both are in step"


def test_groups_are_independent(world: World) -> None:
    a, b, c, d = world.join(0, 0, 1, 1)
    before = c.view
    op = world.launch(c, TAG)
    in_group_0 = world.launch(a, TAG)
    world.run()
    world.kill(b)
    world.run()
    assert a.result(in_group_0) is Result.RANK_CONNECTION_LOST
    assert op not in c.results
    assert not any(isinstance(message, m.Flush) and name in ("n3", "n4") for name, message in world.from_masters)
    assert c.view.epoch == before.epoch
    assert (c.view.global_world_size, c.view.group_sizes) == (3, {0: 1, 1: 2})
    assert c.lost == [(2, "connection reset")]
    assert world.reduce([d]) == [Result.SUCCESS]
    assert c.result(op) is Result.SUCCESS


def test_launch_during_a_change_waits_for_the_new_view(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    world.kill(c)
    world.run_until(lambda: world.master.state.is_changing)
    world.run_until(lambda: a.frozen)
    op = world.launch(a, TAG)
    assert op not in a.keys
    world.run()
    assert a.keys[op][1] == a.view.epoch
    assert world.reduce([b]) == [Result.SUCCESS]
    assert a.result(op) is Result.SUCCESS


def test_launch_during_an_exclusive_call_waits_for_its_end(world: World) -> None:
    a, b = world.join(0, 0)
    call = world.group_call(a, Kind.SYNC)
    op = world.launch(a, TAG)
    world.run()
    assert op not in a.keys
    other = world.group_call(b, Kind.SYNC)
    world.run()
    assert (a.call(call), b.call(other)) == (Result.SUCCESS, Result.SUCCESS)
    assert op in a.keys
    assert world.reduce([b]) == [Result.SUCCESS]
    assert a.result(op) is Result.SUCCESS


def test_timeout_aborts_op_on_all_peers(world: World) -> None:
    a, b = world.join(0, 0)
    world.engines.held_back = {"n2"}
    ops = [world.launch(node, TAG) for node in (a, b)]
    world.run()
    world.cancel(a, ops[0])
    world.run()
    assert (a.result(ops[0]), b.result(ops[1])) == (Result.TIMEOUT, Result.TIMEOUT)
    assert b.results[ops[1]].reason == "its time has passed"


def test_commit_that_crosses_a_timeout_stands(world: World) -> None:
    a, b = world.join(0, 0)
    ops = [world.launch(node, TAG) for node in (a, b)]
    world.run_until(lambda: a.results or b.results)
    world.cancel(a, ops[0])
    world.run()
    assert (a.result(ops[0]), b.result(ops[1])) == (Result.SUCCESS, Result.SUCCESS)


@pytest.mark.parametrize("differing", [0, 1, 2])
def test_different_arguments_fail_the_op_on_all(world: World, differing: int) -> None:
    nodes = world.join(0, 0, 0)
    ops = [world.launch(node, TAG, "other" if i == differing else "") for i, node in enumerate(nodes)]
    world.run()
    assert [node.result(op) for node, op in zip(nodes, ops, strict=True)] == [Result.INVALID_ARGUMENT] * 3
    assert world.reduce(nodes) == [Result.SUCCESS] * 3


def test_op_alone_in_its_group(world: World) -> None:
    a, _ = world.join(0, 1)
    op = world.launch(a, TAG)
    assert a.result(op) is Result.TOO_FEW_PEERS
    assert "alone in peer group 0" in a.results[op].reason


def test_any_number_of_tags(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with them, and quiet peers are not affected."""
    monkeypatch.setattr("pccl.protocol.completion.TAGS_MAX", 20)
    nodes = world.join(0, 0, 0)
    for tag in range(100):
        assert world.reduce(nodes, tag) == [Result.SUCCESS] * 3
        assert all(node.machine.ops.uses.tags <= 20 for node in nodes)
    assert nodes[0].view.epoch > 5


# Of two.


def test_send_and_recv_during_other_ops(world: World) -> None:
    """Their op takes the same tag as everybody's, and both go through."""
    a, b, c = world.join(0, 0, 0)
    ops = [(a, world.launch(a, TAG, pair=(c, True))), (c, world.launch(c, TAG, pair=(a, False)))]
    ops += [(node, world.launch(node, TAG)) for node in (a, b, c)]
    world.run()
    assert [node.result(op) for node, op in ops] == [Result.SUCCESS] * 5
    assert {key[2:] for key in world.checks.verdicts} == {(TAG, 0), (pair_tag(0, 2, TAG), 0)}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_loss_aborts_a_transfer_between_two(world: World, lost: int) -> None:
    nodes = world.join(0, 0, 0, 0)
    receiver = nodes[3]
    op = world.launch(receiver, TAG, pair=(nodes[0], False))
    world.run()
    world.kill(nodes[lost])
    world.run()
    assert receiver.result(op) is Result.RANK_CONNECTION_LOST


def test_timeout_of_a_transfer_fails_both_ends_only(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    op = world.launch(a, TAG, pair=(b, True))
    other = world.launch(a, TAG)
    world.run()
    world.cancel(a, op)
    world.run()
    assert a.result(op) is Result.TIMEOUT
    late = world.launch(b, TAG, pair=(a, False))
    others = [world.launch(node, TAG) for node in (b, c)]
    world.run()
    assert b.result(late) is Result.TIMEOUT
    assert [a.result(other), b.result(others[0]), c.result(others[1])] == [Result.SUCCESS] * 3


@pytest.mark.parametrize("given_up", [3, 20])
def test_repeated_timeouts_end_later_calls_of_others(world: World, given_up: int) -> None:
    a, b, c = world.join(0, 0, 0)
    for _ in range(given_up):
        world.cancel(a, world.launch(a, TAG))
        while world.step():
            pass
    for node in (b, c):
        assert len(node.machine.ops.uses.aborts) == given_up
        assert not node.machine.ops.uses.promises
        assert len(node.parked) <= 1, "what came after the last verdict"
        assert len(node.machine.ops.known_verdicts) <= ABORTS_KEPT_MAX
    for _ in range(given_up):
        assert {world.reduce([node])[0] for node in (b, c)} == {Result.TIMEOUT}
    assert world.reduce([a, b, c]) == [Result.SUCCESS] * 3
