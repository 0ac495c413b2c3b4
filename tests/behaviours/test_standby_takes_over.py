"""A standby leads on with a majority, and only one master leads."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.master.run_state import MasterOptions
from pccl.types import Result
from tests.simulation.world import World

TIMEOUT_S = MasterOptions().peer_timeout_s


def test_majority_continues_and_minority_fails() -> None:
    world = World(masters=2)
    nodes = [*world.join(0), *world.join(0, 0, 0, 0)]
    primary, standby = world.hosts
    for node in nodes[:2]:
        world.cut(node, standby.name)
    for node in nodes[2:]:
        world.cut(node, primary.name)
    for one in nodes[:2]:
        for other in nodes[2:]:
            world.cut(one, other)
    for _ in range(10):
        world.wait(2.5)
        world.run()
    assert not primary.is_leading
    assert standby.machine.master.state.accepted == [node.number for node in nodes[2:]]
    assert standby.machine.master.state.term == 2
    for _ in range(30):
        world.wait(2.5)
        world.run()
    assert [node.ended is not None for node in nodes] == [True, True, False, False, False]
    world.heal()
    assert world.reduce(nodes[2:]) == [Result.SUCCESS] * 3


def test_evicted_peer_at_a_standby_has_no_effect() -> None:
    world = World(masters=2)
    nodes = [*world.join(0), *world.join(0, 0)]
    said = len(world.from_masters)
    primary, _ = world.hosts
    world.cut(nodes[2], primary.name)
    for _ in range(4):
        world.wait(2.0)
        world.run()
    assert primary.machine.master.state.accepted == [1, 2]
    assert any(isinstance(message, m.Resume) for name, message in world.from_peers if name == "n3")
    world.heal()
    for _ in range(10):
        world.wait(2.0)
        world.run()
    assert (primary.machine.master.state.accepted, primary.machine.master.state.term) == ([1, 2], 1)
    assert nodes[2].machine.term == 1
    assert nodes[2].ended is not None
    assert "has continued without peer 3" in nodes[2].ended.reason
    assert not any(
        isinstance(message, m.Elsewhere) for name, message in world.from_masters[said:] if name in ("n1", "n2")
    )


def test_view_that_some_peers_did_not_answer_stands() -> None:
    """It keeps the rings of all that are left, so it is in force before the last of them has heard of it. A standby to
    which that one comes, and one that has only answered, does not lead on from the view before."""
    world = World(masters=2)
    nodes = [*world.join(0), *world.join(0, 0, 0, 1)]
    answered, *others, unaware, lost = nodes
    first, second = world.hosts
    world.cut(lost, first.name)
    while first.machine.master.state.view == first.machine.master.state.installed_view:
        world.run()
        world.block(first.name, unaware)
        world.wait(0.5)
    answer = answered.name, m.LinksReady(first.machine.master.state.view, [], [])
    world.run_until(lambda: answer in world.from_peers)
    world.block(first.name, answered)
    world.run()
    in_force = first.machine.master.state.installed_view
    assert [node.view.view == in_force for node in nodes] == [False, True, True, False, False]
    world.cut(unaware, first.name)
    world.cut(answered, first.name)
    for _ in range(30):
        world.wait(0.5)
        world.run()
    assert first.machine.master.state.accepted == [node.number for node in others]
    assert not second.is_leading
    assert {node.machine.term for node in nodes} == {1}
