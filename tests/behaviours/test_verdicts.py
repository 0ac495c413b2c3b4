"""Ops that their participants end by themselves, and what becomes of them when one gives up, is lost, or waits."""

from __future__ import annotations

from itertools import permutations

import pytest

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from pccl.protocol.peer.ops import STALL_AFTER_S
from pccl.types import Result
from tests.simulation.node import Node
from tests.simulation.world import TAG, World


def said(world: World, *kinds: type[m.Message]) -> list[m.FromPeer]:
    return [message for _, message in world.from_peers if isinstance(message, kinds)]


def until_all_are_done(world: World, nodes: list[Node]) -> list[int]:
    """Return peers in an op that they have just launched, with the reports of their engines under way."""
    ops = [world.launch(node, TAG) for node in nodes]
    world.run_until(lambda: all(node.held for node in nodes))
    assert not any(node.results for node in nodes)
    return ops


def until_all_but_the_first_have_committed(world: World, nodes: list[Node]) -> list[int]:
    """The first does not hear the last."""
    ops = until_all_are_done(world, nodes)
    world.block(nodes[-1], nodes[0])
    world.run()
    return ops


def results(nodes: list[Node], ops: list[int]) -> list[Result]:
    return [node.result(op) for node, op in zip(nodes, ops, strict=True)]


@pytest.fixture
def nodes(world: World) -> list[Node]:
    return world.join(0, 0, 0)


def test_commit_needs_no_master(world: World, nodes: list[Node]) -> None:
    assert world.reduce(nodes) == [Result.SUCCESS] * 3
    assert not said(world, m.OpsDone)
    assert not any(isinstance(message, m.OpsCommit) for _, message in world.from_masters)


def test_group_without_a_mesh_asks_the_master(world: World) -> None:
    a, b, c, d = (world.add() for _ in range(4))
    world.network.unreachable.add(frozenset((a.name, c.name)))
    world.admit_all()
    assert world.reduce([a, b, c, d]) == [Result.SUCCESS] * 4
    assert len(said(world, m.OpsDone)) == 4
    pair = [world.launch(a, TAG, pair=(b, True)), world.launch(b, TAG, pair=(a, False))]
    world.run()
    assert results([a, b], pair) == [Result.SUCCESS] * 2
    assert len(said(world, m.OpsDone)) == 4, "two peers with a link need no master"


def test_commit_of_a_lost_peer_stands(world: World, nodes: list[Node]) -> None:
    a, b, c = nodes
    ops = until_all_are_done(world, nodes)
    world.block(c, a)
    world.block(c, b)
    world.run()
    assert c.result(ops[2]) is Result.SUCCESS
    assert not a.results
    assert not b.results
    world.kill(c)
    world.run()
    assert results([a, b], ops[:2]) == [Result.SUCCESS] * 2


def test_commit_of_a_survivor_stands(world: World, nodes: list[Node]) -> None:
    a, b, c = nodes
    ops = until_all_but_the_first_have_committed(world, nodes)
    assert results([b, c], ops[1:]) == [Result.SUCCESS] * 2
    world.kill(c)
    world.run()
    assert a.result(ops[0]) is Result.SUCCESS


def test_timeout_aborts_an_op_that_is_incomplete_elsewhere(world: World, nodes: list[Node]) -> None:
    a, b, c = nodes
    world.engines.held_back = {c.name}
    ops = [world.launch(node, TAG) for node in nodes]
    world.run()
    assert a.held
    assert b.held
    world.cancel(a, ops[0])
    world.run()
    assert results(nodes, ops) == [Result.TIMEOUT] * 3
    assert len(said(world, m.AbortVote)) == 2
    world.engines.release()
    assert world.reduce(nodes) == [Result.SUCCESS] * 3


def test_timeout_of_an_op_committed_elsewhere_commits(world: World, nodes: list[Node]) -> None:
    a = nodes[0]
    ops = until_all_but_the_first_have_committed(world, nodes)
    assert not a.results
    world.cancel(a, ops[0])
    world.run()
    assert results(nodes, ops) == [Result.SUCCESS] * 3
    world.heal()
    assert world.reduce(nodes) == [Result.SUCCESS] * 3


def test_timeout_while_others_are_several_ops_ahead(world: World, nodes: list[Node]) -> None:
    a, b, c = nodes
    ops = until_all_but_the_first_have_committed(world, nodes)
    later = [world.launch(node, TAG) for node in (b, c)]
    world.run_until(lambda: all(len(node.submitted) == 1 for node in (b, c)))
    world.cancel(b, later[0])
    world.run()
    assert results([b, c], later) == [Result.TIMEOUT] * 2
    assert not a.results
    world.cancel(a, ops[0])
    world.run()
    assert results(nodes, ops) == [Result.SUCCESS] * 3
    assert a.result(world.launch(a, TAG)) is Result.TIMEOUT, "the use that b gave up"
    world.heal()
    assert world.reduce(nodes) == [Result.SUCCESS] * 3


def test_timeout_on_all_peers(world: World, nodes: list[Node]) -> None:
    ops = until_all_are_done(world, nodes)
    for a, b in permutations(nodes, 2):
        world.block(a, b)
    for node, op in zip(nodes, ops, strict=True):
        world.cancel(node, op)
    world.run()
    assert results(nodes, ops) == [Result.TIMEOUT] * 3


def test_timeout_of_an_op_that_a_peer_has_not_called(world: World, nodes: list[Node]) -> None:
    """He may be stopped: the others are not asked."""
    a, b, c = nodes
    world.freeze(c)
    ops = [world.launch(node, TAG) for node in (a, b)]
    world.run()
    world.cancel(a, ops[0])
    world.run_until(lambda: a.results and b.results)
    assert results([a, b], ops) == [Result.TIMEOUT] * 2
    assert not said(world, m.AbortVote)
    world.thaw(c)
    late = world.launch(c, TAG)
    world.run()
    assert c.result(late) is Result.TIMEOUT


@pytest.mark.parametrize("lost", [1, 2])
def test_loss_during_a_vote(world: World, nodes: list[Node], lost: int) -> None:
    """A result that all survivors have is committed, even if a call has timed out."""
    ops = until_all_are_done(world, nodes)
    world.freeze(nodes[lost])
    for other in nodes:
        world.block(nodes[lost], other)
    world.cancel(nodes[0], ops[0])
    world.run_until(lambda: said(world, m.AbortVote))
    assert not nodes[0].results, "one has not answered"
    world.kill(nodes[lost])
    world.run()
    left = [node for node in nodes if node is not nodes[lost]]
    assert {code for node in left for code in [node.result(ops[nodes.index(node)])]} == {Result.SUCCESS}


def test_commit_reported_after_the_flush_stands(world: World, nodes: list[Node]) -> None:
    """All are done, c has committed, a gives up and hears from the master that it is committed. So does b, but what
    its own engine says comes only after c is lost."""
    a, b, c = nodes
    world.block(b, b)
    ops = until_all_are_done(world, nodes)
    world.block(c, a)
    world.run()
    assert c.result(ops[2]) is Result.SUCCESS
    assert not a.results
    world.cancel(a, ops[0])
    world.run_until(lambda: a.results)
    world.run()
    assert a.result(ops[0]) is Result.SUCCESS
    assert not b.results
    world.kill(c)
    world.heal()
    world.run()
    assert b.result(ops[1]) is Result.SUCCESS
    assert a.view.ring == b.view.ring == (a.number, b.number)


def test_long_wait_for_a_finished_op_fails_no_call(world: World, nodes: list[Node]) -> None:
    a, b, c = nodes
    ops = until_all_but_the_first_have_committed(world, nodes)
    world.wait(STALL_AFTER_S)
    world.run()
    calls = [world.group_call(node, Kind.UPDATE_TOPOLOGY) for node in (b, c)]
    world.run()
    assert results(nodes, ops) == [Result.SUCCESS] * 3
    assert not b.calls
    own = world.group_call(a, Kind.UPDATE_TOPOLOGY)
    world.run()
    assert [a.call(own), b.call(calls[0]), c.call(calls[1])] == [Result.SUCCESS] * 3


def test_master_learns_the_end_of_a_long_op(world: World, nodes: list[Node]) -> None:
    world.engines.held_back = {node.name for node in nodes[1:]}
    ops = [world.launch(node, TAG) for node in nodes]
    world.run()
    world.wait(STALL_AFTER_S)
    world.run()
    group = world.master.state.groups[0]
    assert group.ledger.stalled
    world.engines.release()
    world.run()
    assert results(nodes, ops) == [Result.SUCCESS] * 3
    assert not group.ledger.entries
