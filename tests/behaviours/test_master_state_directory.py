"""A master at one address with a state directory goes on with however few peers it had left."""

from __future__ import annotations

import pytest

from pccl.protocol import messages as m
from pccl.protocol.master.run_state import MasterOptions
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.master_host import Memory
from tests.simulation.node import Node
from tests.simulation.world import MASTER, MASTER_TIMEOUT_S, TAG, World

TIMEOUT_S = MasterOptions().peer_timeout_s


def _left_with_two(memory: Memory) -> tuple[World, list[Node], list[Node]]:
    """The master evicts three of five peers, one after the other. The last two go on, and sync."""
    world = World(masters=1, memory=memory)
    nodes = [*world.join(0), *world.join(0, 0, 0, 0)]
    kept, lost = nodes[:2], nodes[2:]
    assert set(world.call_all(nodes, Kind.SYNC)) == {Result.SUCCESS}
    for node in lost:
        world.isolate(node)
        for _ in range(3):
            world.wait(2.0)
            world.run()
    assert {node.view.ring for node in kept} == {(1, 2)}
    for node in kept:
        node.revision, node.root = 7, b"later"
    assert world.reduce(kept) == [Result.SUCCESS] * 2
    assert set(world.call_all(kept, Kind.SYNC)) == {Result.SUCCESS}
    return world, kept, lost


def _led_by(world: World, seconds: float) -> None:
    end_at = world.now + seconds
    while world.now < end_at:
        world.run()
        world.wait(0.5)
    world.run()


@pytest.mark.parametrize("memory", [Memory.NONE, Memory.DISK])
def test_evicted_peers_do_not_continue_the_run(memory: Memory) -> None:
    world, kept, lost = _left_with_two(memory)
    world.kill_master()
    world.heal()
    for node in kept:
        world.cut(node, MASTER)
    world.restart_master()
    for _ in range(3):
        world.run()
        world.wait(2.0)
    assert not world.hosts[0].is_leading
    world.heal()
    for _ in range(4):
        world.run()
        world.wait(2.0)
    assert world.master.state.accepted == [node.number for node in kept]
    assert [node.ended is not None for node in [*kept, *lost]] == [False, False, True, True, True]
    assert all(node.ended is not None and "evicted" in node.ended.reason for node in lost)
    assert world.reduce(kept) == [Result.SUCCESS] * 2


def test_evicted_peers_are_rejected_at_once() -> None:
    world, kept, lost = _left_with_two(Memory.DISK)
    world.kill_master()
    world.heal()
    world.cut(kept[0], MASTER)
    world.cut(kept[1], MASTER)
    world.restart_master()
    world.run()
    # The record is of the time before the last view was in force, so the last one lost may still have had a part.
    assert [node.ended is not None for node in lost] == [True, True, False]


def test_one_lost_link_under_a_new_master_is_not_a_loss() -> None:
    """A peer that stands still loses its connections to the master and one link, just after a takeover that has changed
    no view. Two others have a link with it."""
    world = World(masters=1, memory=Memory.DISK)
    nodes = [*world.join(0), *world.join(0, 0, 0)]
    view = nodes[0].view.view
    world.kill_master()
    world.restart_master()
    while world.now < MASTER_TIMEOUT_S and not world.hosts[0].is_leading:
        world.run()
        world.wait(0.5)
    world.run()
    assert {node.view.view for node in nodes} == {view}
    world.freeze(nodes[3])
    world.reset(nodes[3])
    world.break_heartbeats(nodes[3])
    world.run_while_any()
    world.break_link(nodes[0], nodes[3])
    world.run_while_any()
    world.thaw(nodes[3])
    world.run()
    assert world.reduce(nodes) == [Result.SUCCESS] * 4


def test_remaining_few_continue() -> None:
    world = World(masters=1, memory=Memory.DISK)
    nodes = [*world.join(0), *world.join(0)]
    op = world.launch(nodes[0], TAG)
    world.kill_master()
    world.kill(nodes[1])
    world.restart_master()
    newcomers = [world.add(), world.add()]
    _led_by(world, 3 * TIMEOUT_S)
    assert nodes[0].ended is None
    assert nodes[0].result(op) is Result.RANK_CONNECTION_LOST
    world.admit_all()
    assert set(world.reduce([nodes[0], *newcomers])) == {Result.SUCCESS}


def test_peers_of_an_older_view_do_not_continue() -> None:
    world, kept, lost = _left_with_two(Memory.DISK)
    world.kill_master()
    world.heal()
    for node in kept:
        world.cut(node, MASTER)
    world.restart_master()
    while any(node.ended is None for node in lost):
        world.run()
        world.wait(1.0)
        assert not world.hosts[0].is_leading


@pytest.mark.parametrize("has_died", [True, False])
def test_newcomers_start_a_run_when_no_peer_of_the_last_one_returns(has_died: bool) -> None:
    """Newcomers come, as many as peers are missing: it is not the master that is cut off."""
    world = World(masters=1, memory=Memory.DISK)
    nodes = [*world.join(0), *world.join(0)]
    for node in nodes:
        world.isolate(node)
    if has_died:
        world.kill_master()
        world.restart_master()
    else:
        _led_by(world, TIMEOUT_S + 0.5)
    newcomers = [world.add(), world.add()]
    _led_by(world, 3 * TIMEOUT_S - 1.0)
    assert not world.hosts[0].is_leading
    _led_by(world, 2.0)
    assert world.master.state.accepted
    world.heal()
    _led_by(world, 3.0)
    assert all(node.ended is not None for node in nodes)
    world.admit_all()
    assert world.reduce(newcomers) == [Result.SUCCESS] * 2


def test_recorded_run_prevents_a_second_run_until_it_is_over() -> None:
    world = World(masters=1, memory=Memory.DISK)
    nodes = [*world.join(0), *world.join(0)]
    world.isolate(nodes[0])
    world.isolate(nodes[1])
    world.kill_master()
    world.restart_master()
    newcomer = world.add()
    world.run()
    world.wait(30.0)
    world.run()
    assert not world.hosts[0].is_leading
    world.heal()
    world.wait(1.0)
    world.run()
    assert world.master.state.accepted == [node.number for node in nodes]
    world.admit_all()
    for node in [*nodes, newcomer]:
        world.leave(node)
    world.run()
    world.kill_master()
    world.restart_master()
    founder = world.add()
    world.run()
    assert world.master.state.accepted == [founder.number]


def test_evicted_peers_that_return_first_hurry_no_survivor() -> None:
    """A master dies while it installs a view without two peers, which find the next master long before the others."""
    world = World(masters=1, memory=Memory.DISK)
    nodes = world.join(0, 0, 0, 0, 0)
    few, rest = nodes[3:], nodes[:3]
    for node in few:
        world.cut(node, MASTER)
    sent = len(world.from_masters)
    world.wait(TIMEOUT_S)
    world.run_until(
        lambda: sum(isinstance(message, m.Install) for _, message in world.from_masters[sent:]) == len(rest)
    )
    world.run_while_any()
    world.kill_master()
    world.heal()
    for node in rest:
        world.cut(node, MASTER)
    world.restart_master()
    for _ in range(5):
        world.run_while_any()
        world.wait(TIMEOUT_S / 2)
    for node in rest:
        world.network.blocked -= {(node.name, MASTER), (MASTER, node.name)}
        world.wait(TIMEOUT_S / 10)
        world.run_while_any()
    world.run()
    assert [node.ended for node in rest] == [None] * len(rest)
    assert all(node.ended for node in few)
    assert world.reduce(rest) == [Result.SUCCESS] * len(rest)
