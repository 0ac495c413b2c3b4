"""optimize_topology: rings by measured round trips."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.world import World, rings


def _costs(world: World, *cheap: tuple[int, int]) -> None:
    names = {node.number: node.name for node in world.nodes}
    for a in names.values():
        for b in names.values():
            world.costs[frozenset((a, b))] = 1000
    for a_number, b_number in cheap:
        world.costs[frozenset((names[a_number], names[b_number]))] = 10


def test_ring_follows_the_measured_costs(world: World) -> None:
    nodes = world.join(0, 0, 0, 0)
    _costs(world, (1, 3), (3, 2), (2, 4), (4, 1))
    assert world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY) == [Result.SUCCESS] * 4
    assert rings(nodes) == {(1, 3, 2, 4)}
    assert world.reduce(nodes) == [Result.SUCCESS] * 4


def test_ring_that_is_best_already_stays(world: World) -> None:
    nodes = world.join(0, 0, 0, 0)
    _costs(world, (1, 2), (2, 3), (3, 4), (4, 1))
    view = world.master.view
    assert world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY) == [Result.SUCCESS] * 4
    assert world.master.view == view


def test_only_the_group_whose_ring_changes_is_flushed(world: World) -> None:
    nodes = world.join(0, 0, 0, 0, 1, 1)
    _costs(world, (1, 3), (3, 2), (2, 4), (4, 1))
    epoch = nodes[4].view.epoch
    assert world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY) == [Result.SUCCESS] * 6
    assert nodes[0].view.ring == (1, 3, 2, 4)
    assert nodes[4].view.epoch == epoch


def test_pair_that_could_not_be_measured_is_avoided(world: World) -> None:
    nodes = world.join(0, 0, 0, 0)
    _costs(world)
    world.unreachable = {frozenset(("n1", "n2"))}
    assert world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY) == [Result.SUCCESS] * 4
    ring = nodes[0].view.ring
    assert {frozenset((ring[i - 1], ring[i])) for i in range(4)}.isdisjoint({frozenset((1, 2))})


def test_peer_lost_while_it_measures(world: World) -> None:
    nodes = world.join(0, 0, 0, 0)
    calls = [world.joint(node, Kind.OPTIMIZE_TOPOLOGY) for node in nodes]
    world.run_until(lambda: sum(isinstance(message, m.Probes) for _, message in world.said) == 2)
    world.kill(nodes[3])
    world.run()
    assert [node.call(call) for node, call in zip(nodes[:3], calls[:3], strict=True)] == [Result.SUCCESS] * 3
