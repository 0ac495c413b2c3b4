"""Faults of the world, one by one: processes stopped or killed between any two effects, masters that are wedged or
behind one name, clocks that drift, and newcomers that do not know whether there is a run."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.node import Node
from tests.simulation.scene import CLOCK_RATES
from tests.simulation.world import TAG, World


def _pass(world: World, seconds: float) -> None:
    end_at = world.now + seconds
    while world.now < end_at:
        world.wait(2.5)
        world.run()


def _all_go_on(world: World, nodes: list[Node]) -> None:
    assert all(node.ended is None for node in nodes)
    world.check_rest()
    world.cancel_all()
    assert set(world.reduce(nodes, tag=9)) == {Result.SUCCESS}
    assert set(world.call_all(nodes, Kind.SYNC)) == {Result.SUCCESS}
    world.checks.agreement()


def _work(world: World, nodes: list[Node]) -> None:
    for node in nodes:
        node.root = node.name.encode()
        world.launch(node, TAG)
    world.run()
    for node in nodes:
        if not node.open_ops and not node.is_frozen and node.is_alive:
            world.group_call(node, Kind.SYNC)
    world.run()


def _until_it_has_no_more_effects(
    doom: Callable[[World, list[Node], int], None], go_on: Callable[[World, list[Node]], None]
) -> None:
    """Doom a process after no effect of its machine, after one, ..., in worlds of their own, until it outlives all."""
    for effects in count():
        world = World(random.Random(effects), masters=1)
        nodes = [*world.join(0), *world.join(0, 0)]
        doom(world, nodes, effects)
        _work(world, nodes)
        if world.dooms:
            assert effects > 5
            return
        go_on(world, nodes)


def test_a_peer_stopped_between_any_two_effects_goes_on() -> None:
    def go_on(world: World, nodes: list[Node]) -> None:
        world.thaw(nodes[1])
        world.run()
        _all_go_on(world, nodes)

    _until_it_has_no_more_effects(lambda world, nodes, effects: world.stop_within(nodes[1], effects), go_on)


def test_peer_stopped_at_its_end_answers_callers_later() -> None:
    for effects in count():
        world = World(random.Random(effects))
        node, _ = [*world.join(0), *world.join(0)]
        ops = [world.launch(node, tag) for tag in (TAG, TAG + 1)]
        world.run()
        world.stop_within(node, effects)
        world.kill_master()
        world.run()
        if node.ended is not None:
            world.check_rest()
        if world.dooms:
            assert effects > 2
            return
        world.thaw(node)
        world.run()
        world.check_rest()
        assert [node.result(op) for op in ops] == [Result.MASTER_CONNECTION_FAILED] * 2


def test_peer_killed_between_any_two_effects() -> None:
    def go_on(world: World, nodes: list[Node]) -> None:
        _pass(world, 15.0)
        _all_go_on(world, [nodes[0], nodes[2]])

    _until_it_has_no_more_effects(lambda world, nodes, effects: world.kill_within(nodes[1], effects), go_on)


def test_a_master_stopped_between_any_two_effects_leads_on() -> None:
    def go_on(world: World, nodes: list[Node]) -> None:
        world.thaw_master()
        world.run()
        _all_go_on(world, nodes)

    _until_it_has_no_more_effects(lambda world, _, effects: world.stop_master_within(world.hosts[0], effects), go_on)


def test_master_killed_between_any_two_effects_loses_no_peer() -> None:
    def go_on(world: World, nodes: list[Node]) -> None:
        world.restart_master()
        _pass(world, 15.0)
        _all_go_on(world, nodes)

    _until_it_has_no_more_effects(lambda world, _, effects: world.kill_master_within(world.hosts[0], effects), go_on)


def test_wedged_master_delays_newcomers_only() -> None:
    world = World(masters=1)
    nodes = [*world.join(0), *world.join(0)]
    world.wedge_master(world.hosts[0])
    newcomer = world.add()
    _pass(world, 20.0)
    op = [world.launch(node, TAG) for node in nodes]
    world.run()
    assert newcomer.number == 0
    assert all(node.ended is None for node in nodes)
    world.unwedge_master(world.hosts[0])
    world.run()
    assert [node.result(each) for node, each in zip(nodes, op, strict=True)] == [Result.SUCCESS] * 2
    world.admit_all()
    assert newcomer.view.world_size == 3


def test_two_masters_behind_one_name_may_lead_a_run_each_and_agree_within_it() -> None:
    world = World(masters=2, is_one_name=True)
    first = world.join(0, 0)
    for node in first:
        assert node.route == 0
    other = world.connect()
    other.control = None
    other.route = 1
    world.run()
    assert [host.is_leading for host in world.hosts] == [True, True]
    assert {node.run for node in first} != {other.run}
    assert world.reduce(first) == [Result.SUCCESS] * 2
    world.checks.agreement()


def test_peers_that_the_name_leads_elsewhere_are_led_on_and_agree() -> None:
    world = World(masters=2, is_one_name=True)
    nodes = [*world.join(0), *world.join(0, 0)]
    for node in nodes:
        node.route = 1
        world.reset(node)
        world.break_heartbeats(node)
    world.run()
    _pass(world, 15.0)
    assert [host.is_leading for host in world.hosts] == [False, True]
    _all_go_on(world, nodes)


def test_clock_drift_loses_no_peer() -> None:
    world = World(masters=1, clocks=random.Random(1))
    nodes = [*world.join(0), *world.join(0, 0)]
    assert len({node.rate for node in nodes}) == 3
    assert all(CLOCK_RATES[0] <= each.rate <= CLOCK_RATES[1] for each in (*nodes, *world.hosts))
    _pass(world, 60.0)
    world.kill_master()
    world.restart_master()
    _pass(world, 15.0)
    _all_go_on(world, nodes)


def test_newcomer_starts_no_second_run_when_a_standby_leads() -> None:
    world = World(masters=3)
    nodes = [*world.join(0), *world.join(0)]
    primary, *standbys = world.hosts
    world.kill_master(primary)
    _pass(world, 15.0)
    world.restart_master(primary)
    _pass(world, 15.0)
    assert sum(standby.is_leading for standby in standbys) == 1
    hellos = len(world.from_peers)
    newcomer = world.add()
    world.run()
    said = [message.may_found for _, message in world.from_peers[hellos:] if isinstance(message, m.Hello)]
    assert said[0] is False
    assert newcomer.run == nodes[0].run
    assert not primary.is_leading
