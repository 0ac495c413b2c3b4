"""optimize_topology: rings by what was measured of the links."""

from __future__ import annotations

from itertools import permutations

from pccl.protocol import messages as m
from pccl.protocol.link_metrics import FRESH_S
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.world import World, rings

SLOW, FAST = 2.5e6, 25e6
OK = Result.SUCCESS


def _costs(world: World, *cheap: tuple[int, int]) -> None:
    names = {node.number: node.name for node in world.nodes}
    for a in names.values():
        for b in names.values():
            world.network.costs[frozenset((a, b))] = 1000
    for a_number, b_number in cheap:
        world.network.costs[frozenset((names[a_number], names[b_number]))] = 10


def _rates(world: World, *fast: tuple[int, int]) -> None:
    """All links are slow except for these, by sender and receiver."""
    names = {node.number: node.name for node in world.nodes}
    for a, sender in names.items():
        for b, receiver in names.items():
            world.network.rates[sender, receiver] = FAST if (a, b) in fast else SLOW


def _measured(world: World) -> int:
    """Links whose master was told metrics."""
    return sum(len(message.found) for _, message in world.from_peers if isinstance(message, m.Probes))


def test_ring_follows_the_measured_costs(world: World) -> None:
    nodes = world.join(0, 0, 0, 0)
    _costs(world, (1, 3), (3, 2), (2, 4), (4, 1))
    assert world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY) == [Result.SUCCESS] * 4
    assert rings(nodes) == {(1, 3, 2, 4)}
    assert world.reduce(nodes) == [Result.SUCCESS] * 4


def test_ring_goes_the_way_round_that_is_fast(world: World) -> None:
    """Each link has two directions; the ring uses one."""
    nodes = world.join(0, 0, 0, 0)
    _rates(world, (1, 4), (4, 2), (2, 3), (3, 1))
    assert world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY) == [OK] * 4
    assert rings(nodes) == {(1, 4, 2, 3)}
    assert world.reduce(nodes) == [OK] * 4


def test_the_slowest_link_counts_before_the_latency(world: World) -> None:
    nodes = world.join(0, 0, 0, 0)
    _costs(world, (1, 2), (2, 3), (3, 4), (4, 1))
    _rates(world, (1, 3), (3, 2), (2, 4), (4, 1))
    assert world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY) == [OK] * 4
    assert rings(nodes) == {(1, 3, 2, 4)}


def test_ring_that_is_best_already_stays(world: World) -> None:
    nodes = world.join(0, 0, 0, 0)
    _costs(world, (1, 2), (2, 3), (3, 4), (4, 1))
    assert world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY) == [OK] * 4
    assert rings(nodes) == {(1, 2, 3, 4)}
    view = world.master.state.view  # where peers know up to what size they go direct
    assert world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY) == [OK] * 4
    assert world.master.state.view == view


def test_only_the_group_whose_ring_changes_is_flushed(world: World) -> None:
    nodes = world.join(0, 0, 0, 0, 1, 1)
    _costs(world, (1, 3), (3, 2), (2, 4), (4, 1))
    epoch = nodes[4].view.epoch
    assert world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY) == [Result.SUCCESS] * 6
    assert nodes[0].view.ring == (1, 3, 2, 4)
    assert nodes[4].view.epoch == epoch


def test_what_is_known_is_not_measured_again_before_it_is_old(world: World) -> None:
    nodes = world.join(0, 0, 0)
    assert world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY) == [OK] * 3
    assert _measured(world) == 6
    assert world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY) == [OK] * 3
    assert _measured(world) == 6
    world.wait(FRESH_S)
    world.run()
    assert world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY) == [OK] * 3
    assert _measured(world) == 12


def test_what_is_known_is_known_to_the_next_master() -> None:
    world = World(masters=1)
    nodes = world.join(0, 0, 0, 0)
    _costs(world)
    _rates(world, (1, 3), (3, 2), (2, 4), (4, 1))
    assert world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY) == [OK] * 4
    links = list(permutations((1, 2, 3, 4), 2))
    known = {link: world.master.state.link_metrics.get(link) for link in links}
    measured = _measured(world)
    world.wait(FRESH_S / 2)
    world.kill_master()
    world.restart_master()
    world.run()
    assert {link: world.master.state.link_metrics.get(link) for link in links} == known
    assert world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY) == [OK] * 4
    assert rings(nodes) == {(1, 3, 2, 4)}
    assert _measured(world) == measured == 12
    world.wait(FRESH_S / 2)
    assert world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY) == [OK] * 4
    assert _measured(world) == measured + 12


def test_links_measured_at_once_share_no_sender_and_no_receiver(world: World) -> None:
    nodes = world.join(0, 0, 0, 0, 0)
    world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY)
    asked: dict[int, list[tuple[int, int]]] = {}
    numbers = {node.name: node.number for node in nodes}
    for name, message in world.from_masters:
        if isinstance(message, m.Probe):
            me = numbers[name]
            asked.setdefault(message.probe, []).extend((p, me) if inbound else (me, p) for p, inbound in message.links)
    links = [link for together in asked.values() for link in together]
    assert len(links) == len(set(links)) == 20
    for together in asked.values():
        assert len({sender for sender, _ in together}) == len({receiver for _, receiver in together}) == len(together)
        assert len({frozenset(link) for link in together}) == len(together)
    assert max(len(together) for together in asked.values()) == 5


def test_pair_that_could_not_be_measured_is_avoided(world: World) -> None:
    nodes = world.join(0, 0, 0, 0)
    _costs(world)
    world.network.unreachable = {frozenset(("n1", "n2"))}
    assert world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY) == [Result.SUCCESS] * 4
    ring = nodes[0].view.ring
    assert {frozenset((ring[i - 1], ring[i])) for i in range(4)}.isdisjoint({frozenset((1, 2))})


def test_peer_lost_while_it_measures(world: World) -> None:
    nodes = world.join(0, 0, 0, 0)
    calls = [world.group_call(node, Kind.OPTIMIZE_TOPOLOGY) for node in nodes]
    world.run_until(lambda: sum(isinstance(message, m.Probes) for _, message in world.from_peers) == 2)
    world.kill(nodes[3])
    world.run()
    assert [node.call(call) for node, call in zip(nodes[:3], calls[:3], strict=True)] == [Result.SUCCESS] * 3


def test_peer_that_does_not_answer_is_not_waited_for_twice(world: World) -> None:
    """Its process hangs, except for its heartbeat: its links count as unreachable, and the others' are measured."""
    nodes = world.join(0, 0, 0, 0)
    calls = [world.group_call(node, Kind.OPTIMIZE_TOPOLOGY) for node in nodes]
    world.run_until(lambda: any(isinstance(message, m.Probe) for _, message in world.from_masters))
    world.hang(nodes[3])
    begun_at = world.now
    while not all(call in node.calls for node, call in zip(nodes[:3], calls, strict=False)):
        world.run()
        if world.master.is_changing:  # the present links of the mute peer are avoided: its answer to that is due
            world.thaw(nodes[3])
        world.wait(0.5)
        assert world.now < begun_at + 60
    assert [node.call(call) for node, call in zip(nodes[:3], calls, strict=False)] == [OK] * 3
    assert sum("could not be measured" in line for line in world.log) <= 6


def test_newcomer_leaves_the_rest_of_the_ring_as_it_is(world: World) -> None:
    nodes = world.join(0, 0, 0, 0)
    _rates(world, (1, 3), (3, 2), (2, 4), (4, 1))
    world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY)
    world.join(0)
    (ring,) = rings(nodes)
    assert tuple(peer for peer in ring if peer != 5) == (1, 3, 2, 4)


def test_loss_leaves_the_rest_of_the_ring_as_it_is(world: World) -> None:
    nodes = world.join(0, 0, 0, 0)
    _rates(world, (1, 3), (3, 2), (2, 4), (4, 1))
    world.call_all(nodes, Kind.OPTIMIZE_TOPOLOGY)
    world.kill(nodes[2])
    world.run()
    assert nodes[0].view.ring == (1, 2, 4)
