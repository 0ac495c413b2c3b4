"""The master's network fails for a while: it keeps all peers that return in time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pccl.protocol.master.run_state import MasterOptions
from pccl.types import Result
from tests.simulation.master_host import Memory
from tests.simulation.node import Node
from tests.simulation.world import MASTER, TAG, World

TIMEOUT_S = MasterOptions().peer_timeout_s
JUST_UNDER_S = TIMEOUT_S - 0.1

Fault = Callable[[World, Node], None]
FAULTS: dict[str, Fault] = {
    "frozen": lambda world, node: world.freeze(node),
    "cut off": lambda world, node: world.isolate(node),
    "not heard": lambda world, node: world.block(node, MASTER),
    "receives no message": lambda world, node: world.block(MASTER, node),
}


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest) -> Fault:
    return FAULTS[request.param]


def _led_through(world: World, seconds: float) -> None:
    end_at = world.now + seconds
    while world.now < end_at:
        world.wait(0.25)
        world.run()


def test_short_pause_of_the_master_loses_no_peer(world: World) -> None:
    a, b = world.join(0, 0)
    world.freeze_master()
    world.wait(JUST_UNDER_S)
    world.thaw_master()
    world.wait(0.2)
    world.run()
    assert world.reduce([a, b]) == [Result.SUCCESS] * 2


def test_all_peers_but_one_fall_silent() -> None:
    """The master may be cut off itself, so it waits for them. They are dead, and the one goes on in time."""
    world = World(masters=1)
    nodes = [*world.join(0), *world.join(0, 0, 0, 0)]
    ops = [world.launch(node, TAG) for node in nodes[1:]]
    for node in nodes[1:]:
        world.freeze(node)
    _led_through(world, 3 * TIMEOUT_S - 1.0)
    assert nodes[0].view.ring == (1, 2, 3, 4, 5)
    _led_through(world, 1.5)
    assert nodes[0].view.ring == (1,)
    for node in nodes[1:]:
        world.thaw(node)
    _led_through(world, 1.0)
    for node, op in zip(nodes[1:], ops, strict=True):
        assert node.result(op) is Result.MASTER_CONNECTION_FAILED
        assert node.ended is not None
        assert "evicted" in node.ended.reason


@pytest.mark.parametrize("memory", Memory)
@pytest.mark.parametrize("outage_s", [TIMEOUT_S + 0.1, 2 * TIMEOUT_S, 6 * TIMEOUT_S])
@pytest.mark.parametrize("ways", [(True, True), (True, False), (False, True)])
def test_outage_of_the_master_loses_no_peer(memory: Memory, outage_s: float, ways: tuple[bool, bool]) -> None:
    world = World(masters=1, memory=memory)
    nodes = [*world.join(0), *world.join(0, 0, 0)]
    for node in nodes:
        for is_cut, ends in zip(ways, ((node, MASTER), (MASTER, node)), strict=True):
            if is_cut:
                world.block(*ends)
    newcomer = world.add() if ways[0] else None
    _led_through(world, outage_s)
    assert world.reduce(nodes) == [Result.SUCCESS] * 4
    world.heal()
    _led_through(world, 3.0)
    assert [node.ended for node in nodes] == [None] * 4
    assert world.master.state.accepted == [node.number for node in nodes]
    assert {node.view.ring for node in nodes} == {(1, 2, 3, 4)}
    assert world.reduce(nodes) == [Result.SUCCESS] * 4
    if newcomer is not None:
        world.admit_all()
        assert set(world.reduce([*nodes, newcomer])) == {Result.SUCCESS}


def test_newcomers_rule_out_an_outage() -> None:
    world = World(masters=1)
    nodes = [*world.join(0), *world.join(0)]
    newcomers = [world.add() for _ in range(3)]
    _led_through(world, 1.0)
    for node in nodes:
        world.isolate(node)
    _led_through(world, TIMEOUT_S + 0.5)
    world.admit_all()
    assert set(world.reduce(newcomers)) == {Result.SUCCESS}


def _reset_all(world: World, nodes: list[Node], are_heartbeats_reset: bool) -> None:
    """Connections to the master, which hears of that. It and the peers reach each other no more."""
    for node in nodes:
        world.cut(node, MASTER)
        control = node.control
        assert control is not None
        world.reset(node)
        control.outbox.clear()
        world.control_plane.lose(control)
        if are_heartbeats_reset:
            world.break_heartbeats(node)


@pytest.mark.parametrize("memory", Memory)
@pytest.mark.parametrize("are_heartbeats_reset", [True, False])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("outage_s", [TIMEOUT_S + 0.1, 2 * TIMEOUT_S, 3 * TIMEOUT_S - 1.0])
def test_reset_of_most_connections_loses_no_peer(
    memory: Memory, are_heartbeats_reset: bool, first: int, outage_s: float
) -> None:
    world = World(masters=1, memory=memory)
    nodes = [*world.join(0), *world.join(0, 0, 0)]
    _reset_all(world, nodes[first:], are_heartbeats_reset)
    _led_through(world, outage_s)
    world.heal()
    _led_through(world, 3.0)
    assert [node.ended for node in nodes] == [None] * 4
    assert world.master.state.accepted == [node.number for node in nodes]
    assert {node.view.ring for node in nodes} == {(1, 2, 3, 4)}
    assert world.reduce(nodes) == [Result.SUCCESS] * 4


@pytest.mark.parametrize("are_heartbeats_reset", [True, False])
def test_first_peers_back_after_a_reset_wait_for_the_rest(are_heartbeats_reset: bool) -> None:
    world = World(masters=1)
    nodes = [*world.join(0), *world.join(0, 0, 0)]
    _reset_all(world, nodes, are_heartbeats_reset)
    _led_through(world, 2 * TIMEOUT_S)
    newcomer = world.add()
    world.network.blocked.difference_update({(nodes[3].name, MASTER), (MASTER, nodes[3].name)})
    _led_through(world, TIMEOUT_S)
    world.heal()
    _led_through(world, 3.0)
    assert [node.ended for node in nodes] == [None] * 4
    world.admit_all()
    assert set(world.reduce([*nodes, newcomer])) == {Result.SUCCESS}


@pytest.mark.parametrize("are_heartbeats_reset", [True, False])
def test_survivors_continue_when_most_stay_away_after_a_reset(are_heartbeats_reset: bool) -> None:
    world = World(masters=1)
    nodes = [*world.join(0), *world.join(0, 0, 0)]
    _reset_all(world, nodes[1:], are_heartbeats_reset)
    _led_through(world, 3 * TIMEOUT_S - 1.0)
    assert nodes[0].view.ring == (1, 2, 3, 4)
    _led_through(world, 1.5)
    assert nodes[0].view.ring == (1,)
