"""Peers that leave, die, fall silent or lose the master."""

from __future__ import annotations

import itertools
import random

import pytest

from pccl.protocol import messages as m
from pccl.protocol.master.run_state import MasterOptions
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.world import TAG, World, rings


def test_leave_is_a_loss_with_a_reason(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    world.leave(b)
    world.run()
    assert b.ended is not None
    assert b.ended.code is Result.NOT_INITIALIZED
    assert rings([a, c]) == {(1, 3)}
    assert a.lost == [(2, "left")]
    assert world.reduce([a, c]) == [Result.SUCCESS] * 2


def test_ring_closes_after_a_loss(world: World) -> None:
    a, b, c, d = world.join(0, 0, 0, 0)
    world.kill(c)
    world.run()
    assert rings([a, b, d]) == {(1, 2, 4)}
    assert all(link.effect.member.peer != 3 for node in (a, b, d) for link in node.links.values())
    assert world.reduce([a, b, d]) == [Result.SUCCESS] * 3


def test_loss_of_a_newcomer_costs_no_one(world: World) -> None:
    a, b = world.join(0, 0)
    op = world.launch(a, TAG)
    stranger, pending = world.connect(), world.add()
    world.run()
    world.kill(stranger)
    world.kill(pending)
    world.run()
    assert (world.master.state.pending, world.master.state.view) == ([], 2)
    assert world.reduce([b]) == [Result.SUCCESS]
    assert a.result(op) is Result.SUCCESS


def test_two_losses_in_one_change(world: World) -> None:
    a, b, c, d = world.join(0, 0, 0, 0)
    ops = [world.launch(node, TAG) for node in (a, b, c)]
    world.run()
    world.kill(d)
    world.run_until(lambda: any(isinstance(message, m.FlushReply) for _, message in world.from_peers))
    world.kill(c)
    world.run()
    assert [node.result(op) for node, op in zip((a, b), ops[:2], strict=True)] == [Result.RANK_CONNECTION_LOST] * 2
    assert rings([a, b]) == {(1, 2)}
    assert {peer for peer, _ in a.lost} == {3, 4}


def test_newcomer_lost_while_it_is_admitted(world: World) -> None:
    a, b = world.join(0, 0)
    c = world.add()
    world.run()
    calls = [world.group_call(node, Kind.UPDATE_TOPOLOGY) for node in (a, b)]
    world.run_until(lambda: world.master.state.is_changing)
    world.kill(c)
    world.run()
    assert [node.call(call) for node, call in zip((a, b), calls, strict=True)] == [Result.SUCCESS] * 2
    assert rings([a, b]) == {(1, 2)}
    assert a.lost == []


def test_peer_lost_while_a_newcomer_is_admitted(world: World) -> None:
    a, b = world.join(0, 0)
    c = world.add()
    world.run()
    calls = [world.group_call(node, Kind.UPDATE_TOPOLOGY) for node in (a, b)]
    world.run_until(lambda: world.master.state.is_changing)
    world.kill(a)
    world.run()
    assert b.call(calls[1]) is Result.SUCCESS
    assert rings([b, c]) == {(2, 3)}


def test_peer_that_does_not_answer_a_flush_is_evicted(world: World) -> None:
    a, b, c = world.join(0, 0, 0)
    op = world.launch(a, TAG)
    world.hang(b)
    world.kill(c)
    world.run()
    assert op not in a.results
    world.wait(MasterOptions().answer_timeout_s)
    world.run()
    assert a.result(op) is Result.RANK_CONNECTION_LOST
    assert a.view.ring == (1,)
    assert any(peer == 2 and "did not answer the master within 90 s" in reason for peer, reason in a.lost)
    world.thaw(b)
    world.run()
    assert b.ended is not None
    assert "did not answer" in b.ended.reason


def test_newcomer_that_does_not_answer_is_evicted(world: World) -> None:
    (a,) = world.join(0)
    b = world.add(1)
    world.run()
    world.hang(b)
    call = world.group_call(a, Kind.UPDATE_TOPOLOGY)
    world.run()
    assert call not in a.calls
    world.wait(MasterOptions().answer_timeout_s)
    world.run()
    assert a.call(call) is Result.SUCCESS
    assert a.view.global_world_size == 1


def test_evicted_peer_learns_why(world: World) -> None:
    a, b = world.join(0, 0)
    ops = [world.launch(node, TAG) for node in (a, b)]
    world.engines.held_back = {"n1", "n2"}
    world.run()
    call = world.group_call(b, Kind.ARE_PEERS_PENDING)
    waiting = world.group_call(b, Kind.UPDATE_TOPOLOGY)
    world.send(b, m.GroupCall(99, Kind.UPDATE_TOPOLOGY))
    world.run()
    assert b.ended is not None
    for result in (b.results[ops[1]], b.calls[call], b.calls[waiting]):
        assert (result.code, result.reason) == (Result.INVALID_USAGE, "evicted: a group call out of turn")
    assert a.result(ops[0]) is Result.RANK_CONNECTION_LOST
    late, later = world.launch(b, TAG), world.group_call(b, Kind.ARE_PEERS_PENDING)
    assert (b.result(late), b.call(later)) == (Result.NOT_INITIALIZED, Result.NOT_INITIALIZED)


def test_master_lost(world: World) -> None:
    a, b = world.join(0, 0)
    world.engines.held_back = {"n1", "n2"}
    ops = [world.launch(node, TAG) for node in (a, b)]
    world.run()
    call = world.group_call(a, Kind.ARE_PEERS_PENDING)
    queued = world.group_call(a, Kind.UPDATE_TOPOLOGY)
    world.run()
    for node in (a, b):
        world.sever(node)
    world.run()
    for result in (a.results[ops[0]], b.results[ops[1]], a.calls[call], a.calls[queued]):
        assert (result.code, result.reason) == (
            Result.MASTER_CONNECTION_FAILED,
            "the master closed the connection",
        )
    assert not a.submitted, "the engine has given the buffers back"


def test_leaver_gets_its_open_ops_back(world: World) -> None:
    a, b = world.join(0, 0)
    ops = [world.launch(node, TAG) for node in (a, b)]
    world.engines.held_back = {"n1", "n2"}
    world.run()
    world.leave(b)
    world.run()
    assert b.result(ops[1]) is Result.NOT_INITIALIZED
    assert a.result(ops[0]) is Result.RANK_CONNECTION_LOST
    assert "peer 2 (n2) was lost (left)" in a.results[ops[0]].reason


@pytest.mark.parametrize("victims", list(itertools.permutations(range(4), 2)))
def test_second_loss_during_recovery(victims: tuple[int, int]) -> None:
    """Whatever the others are about when the second dies: no time has to pass."""
    for steps in range(0, 60, 2):
        world = World(rng=random.Random(steps))
        nodes = world.join(0, 0, 0, 0)
        first, second = (nodes[victim] for victim in victims)
        world.kill(first)
        for _ in range(steps):
            world.step()
        world.kill(second)
        start_s = world.now
        world.run()
        assert [node.view.world_size for node in world.alive] == [2, 2]
        assert world.now == start_s, f"waited for {world.now - start_s} s, with {steps} steps between the two"
