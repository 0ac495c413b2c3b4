"""Peers and a master that fall silent: frozen, cut off, or heard by some only. In each stage the others go on once the
peer timeout has passed, and the lost peer learns of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pccl.protocol.master.run_state import MasterOptions
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.node import Node
from tests.simulation.world import MASTER, TAG, World, rings

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


def _end(world: World, node: Node) -> None:
    """The fault ends; what the node says then is checked."""
    world.heal()
    world.thaw(node)
    world.run()
    assert node.ended is not None
    assert "silent for 5" in node.ended.reason
    assert node.ended.code is Result.MASTER_CONNECTION_FAILED
    assert not node.open_ops + node.open_calls
    world.check_rest()


def test_silent_peer_is_lost_during_an_op(world: World, fault: Fault) -> None:
    a, b, c = world.join(0, 0, 0)
    ops = [world.launch(node, TAG) for node in (a, b)]
    fault(world, c)
    world.wait(JUST_UNDER_S)
    world.run()
    assert world.master.state.accepted == [1, 2, 3]
    world.wait(0.2)
    world.run()
    assert [node.result(op) for node, op in zip((a, b), ops, strict=True)] == [Result.RANK_CONNECTION_LOST] * 2
    assert rings([a, b]) == {(1, 2)}
    assert world.reduce([a, b]) == [Result.SUCCESS] * 2
    _end(world, c)


def test_silent_peer_is_lost_during_a_flush(world: World, fault: Fault) -> None:
    a, b, c, d = world.join(0, 0, 0, 0)
    op = world.launch(a, TAG)
    fault(world, c)
    world.kill(d)
    world.run()
    world.wait(TIMEOUT_S + 0.1)
    world.run()
    assert a.result(op) is Result.RANK_CONNECTION_LOST
    assert rings([a, b]) == {(1, 2)}
    _end(world, c)


@pytest.mark.parametrize("kind", [Kind.UPDATE_TOPOLOGY, Kind.SYNC, Kind.OPTIMIZE_TOPOLOGY])
def test_silent_peer_is_taken_out_of_a_group_call(world: World, fault: Fault, kind: str) -> None:
    a, b, c = world.join(0, 0, 0)
    calls = [world.group_call(node, kind) for node in (a, b)]
    world.run()
    fault(world, c)
    world.wait(TIMEOUT_S + 0.1)
    world.run()
    assert [node.call(call) for node, call in zip((a, b), calls, strict=True)] == [Result.SUCCESS] * 2
    _end(world, c)


def test_silent_newcomer_delays_no_peer(world: World, fault: Fault) -> None:
    a, b = world.join(0, 0)
    c = world.add()
    world.run()
    calls = [world.group_call(node, Kind.UPDATE_TOPOLOGY) for node in (a, b)]
    world.run_until(lambda: world.master.state.is_changing)
    fault(world, c)
    world.run()
    world.wait(TIMEOUT_S + 0.1)
    world.run()
    assert [node.call(call) for node, call in zip((a, b), calls, strict=True)] == [Result.SUCCESS] * 2
    assert rings([a, b]) == {(1, 2)}
    _end(world, c)


def test_newcomer_without_heartbeats_is_not_admitted(world: World) -> None:
    (a,) = world.join(0)
    b = world.add()
    world.run_until(lambda: world.master.state.pending)
    world.freeze(b)
    assert world.call_all([a], Kind.UPDATE_TOPOLOGY) == [Result.SUCCESS]
    assert (world.master.state.accepted, world.master.state.pending) == ([1], [2])
    world.wait(MasterOptions().hello_timeout_s)
    world.run()
    assert world.master.state.pending == []
    world.thaw(b)
    world.run()
    assert b.ended is not None
    assert "silent for 10.0 s" in b.ended.reason


def test_short_silence_has_no_effect(world: World, fault: Fault) -> None:
    a, b = world.join(0, 0)
    ops = [world.launch(node, TAG) for node in (a, b)]
    for _ in range(3):
        fault(world, b)
        world.wait(JUST_UNDER_S)
        world.heal()
        world.thaw(b)
        world.wait(0.2)
    world.run()
    assert [node.result(op) for node, op in zip((a, b), ops, strict=True)] == [Result.SUCCESS] * 2
    assert rings([a, b]) == {(1, 2)}


def test_busy_peer_is_kept(world: World) -> None:
    a, b = world.join(0, 0)
    world.hang(b)
    op = world.launch(a, TAG)
    for _ in range(10):
        world.wait(JUST_UNDER_S)
        world.run()
    assert world.master.state.accepted == [1, 2]
    world.thaw(b)
    world.launch(b, TAG)
    world.run()
    assert a.result(op) is Result.SUCCESS


def test_heartbeat_connection_is_replaced(world: World) -> None:
    a, b = world.join(0, 0)
    for _ in range(3):
        world.break_heartbeats(b)
        world.wait(JUST_UNDER_S)
        world.run()
    world.wait(TIMEOUT_S)
    world.run()
    assert world.reduce([a, b]) == [Result.SUCCESS] * 2


def test_heartbeat_connection_that_cannot_be_replaced_is_silence(world: World) -> None:
    a, b = world.join(0, 0)
    world.cut(b, MASTER)
    world.break_heartbeats(b)
    world.wait(TIMEOUT_S)
    world.run()
    assert a.view.ring == (1,)
    _end(world, b)


def test_silent_master_is_lost_to_its_peers(world: World) -> None:
    a, b = world.join(0, 0)
    op = world.launch(a, TAG)
    call = world.group_call(b, Kind.UPDATE_TOPOLOGY)
    world.freeze_master()
    world.wait(JUST_UNDER_S)
    world.run()
    assert a.ended is None
    world.wait(0.2)
    for node in (a, b):
        assert node.ended is not None
        assert node.ended.reason == "the master was silent for 5.1 s"
    world.run()
    assert a.result(op) is b.call(call) is Result.MASTER_CONNECTION_FAILED
    world.thaw_master()
    world.run()
    assert world.master.state.accepted == []
