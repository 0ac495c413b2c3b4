"""Admission: which newcomers are admitted and when, and which are turned away."""

from __future__ import annotations

import pytest

from pccl.protocol import messages as m
from pccl.protocol.master.run_state import MasterOptions
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.world import MASTER, World, rings


def test_first_peer_is_admitted_at_once(world: World) -> None:
    node = world.add()
    world.run()
    assert node.view.ring == (1,)
    assert (node.view.world_size, node.view.global_world_size) == (1, 1)
    assert world.master.state.pending == []


def test_joiner_waits_until_all_call_update_topology(world: World) -> None:
    a, b = world.join(0, 0)
    c = world.add()
    world.run()
    assert world.master.state.pending == [3]
    assert c.machine.view is None
    first = world.group_call(a, Kind.UPDATE_TOPOLOGY)
    world.run()
    assert first not in a.calls
    assert world.master.state.pending == [3]
    second = world.group_call(b, Kind.UPDATE_TOPOLOGY)
    world.run()
    assert (a.call(first), b.call(second)) == (Result.SUCCESS, Result.SUCCESS)
    assert rings([a, b, c]) == {(1, 2, 3)}


def test_call_returns_only_when_the_new_view_is_in_force(world: World) -> None:
    (a,) = world.join(0)
    world.add()
    world.run()
    call = world.group_call(a, Kind.UPDATE_TOPOLOGY)
    world.run_until(lambda: call in a.calls)
    assert a.view.ring == (1, 2)


def test_update_topology_without_joiners_changes_nothing(world: World) -> None:
    nodes = world.join(0, 0)
    view = world.master.state.view
    assert world.call_all(nodes, Kind.UPDATE_TOPOLOGY) == [Result.SUCCESS] * 2
    assert world.master.state.view == view


def test_joiner_that_comes_during_a_change_waits_for_the_next_call(world: World) -> None:
    (a,) = world.join(0)
    b = world.add()
    world.run()
    call = world.group_call(a, Kind.UPDATE_TOPOLOGY)
    world.run_until(lambda: world.master.state.is_changing)
    c = world.add()
    world.run()
    assert a.call(call) is Result.SUCCESS
    assert rings([a, b]) == {(1, 2)}
    assert world.master.state.pending == [3]
    assert c.machine.view is None


def test_are_peers_pending_counts_and_needs_all(world: World) -> None:
    a, b = world.join(0, 1)
    world.add(2)
    world.run()
    first = world.group_call(a, Kind.ARE_PEERS_PENDING)
    world.run()
    assert first not in a.calls
    second = world.group_call(b, Kind.ARE_PEERS_PENDING)
    world.run()
    assert (a.calls[first].value, b.calls[second].value) == (1, 1)
    world.admit_all()
    assert world.call_all([a, b, world.nodes[2]], Kind.ARE_PEERS_PENDING) == [Result.SUCCESS] * 3
    assert [node.calls[max(node.calls)].value for node in world.nodes] == [0, 0, 0]


def test_newcomer_is_admitted_after_all_peers_left(world: World) -> None:
    (a,) = world.join(0)
    b, c = world.add(), world.add(1)
    world.run()
    world.kill(a)
    world.run()
    assert (b.view.ring, c.view.ring) == ((2,), (3,))
    assert b.view.global_world_size == 2


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"protocol": m.PROTOCOL_VERSION + 1}, "speaks protocol"),
        ({"group": -1}, "peer_group -1"),
        ({"group": 2**32}, "peer_group 4294967296"),
        ({"port": 0}, "listening port 0"),
        ({"port": 65536}, "listening port 65536"),
        ({"connections": 0}, "p2p_connection_pool_size 0"),
        ({"connections": 65}, "p2p_connection_pool_size 65"),
    ],
)
def test_invalid_hello_is_refused(world: World, change: dict[str, int], wanted: str) -> None:
    (a,) = world.join(0)
    stranger = world.connect()
    fields = {name: getattr(world.hello(stranger), name) for name in m.Hello.__struct_fields__}
    world.send(stranger, m.Hello(**(fields | change)))
    world.run()
    assert stranger.ended is not None
    assert stranger.ended.code is Result.MASTER_CONNECTION_FAILED
    assert wanted in stranger.ended.reason
    assert world.master.state.accepted == [a.number]
    assert world.master.state.pending == []


def test_too_many_connections_are_refused() -> None:
    world = World(options=MasterOptions(connections_max=2))
    a, _ = world.add(), world.add()
    one_too_many = world.add()
    world.run()
    assert one_too_many.ended is not None
    assert "too many connections" in one_too_many.ended.reason
    world.kill(a)
    world.run()
    late = world.add()
    world.run()
    assert late.number == 3


def test_silent_connection_is_closed(world: World) -> None:
    world.join(0)
    stranger = world.connect()
    world.run()
    world.wait(9.9)
    world.run()
    assert stranger in world.alive
    world.wait(0.2)
    world.run()
    assert stranger.ended is not None
    assert world.master.state.accepted == [1]


def test_slow_peers_of_unchanged_rings_do_not_delay_a_view(world: World) -> None:
    a, b, _, d = world.join(0, 0, 1, 2)
    world.freeze(d)
    world.kill(b)
    world.run()
    assert a.view.ring == (a.number,)
    assert world.master.state.installed_view == a.view.view > d.view.view


def test_newcomer_asks_all_addresses_before_it_may_bootstrap() -> None:
    """One master restarts. A run that the other one leads must not get a rival."""
    world = World(masters=2)
    world.kill_master()
    newcomer = world.add()
    world.run_until(lambda: newcomer.tried == {MASTER})
    world.restart_master()
    asked = len(world.from_peers)
    world.run_until(lambda: len(world.from_peers) > asked)
    assert newcomer.control is not None
    assert newcomer.control.host is world.hosts[1]
    hello = world.from_peers[-1][1]
    assert isinstance(hello, m.Hello)
    assert hello.may_found
