"""The master dies before every single delivery of a run, and another one follows it, or none.

By default before a sixth of the deliveries; CI tries the others, too, which are slow.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pccl.protocol import messages as m
from pccl.protocol.master.run_state import MasterOptions
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.boundaries import SHARES, boundaries
from tests.simulation.master_host import Memory
from tests.simulation.node import Node
from tests.simulation.plan import Plan
from tests.simulation.schedule import play
from tests.simulation.world import MASTER, MASTER_TIMEOUT_S, TAG, World

TIMEOUT_S = MasterOptions().peer_timeout_s

LATER = 15
"""Deliveries after which the next master begins, if not at once."""
STRIDE = 2
SCHEDULES = 60


class _Mortal(World):
    """Something happens before the n-th delivery, and something that follows from it `LATER` deliveries after that, or
    when nothing else is left to be delivered."""

    def __init__(
        self,
        at: int,
        masters: int,
        fault: Callable[[World], None],
        relief: Callable[[World], None],
        memory: Memory = Memory.NONE,
    ) -> None:
        super().__init__(random.Random(at), masters=masters, memory=memory)
        self.network.costs = {frozenset(("n1", "n2")): 500}
        self.deliveries = 0
        self._at = at
        self._fault = fault
        self._relief: Callable[[World], None] | None = relief

    def step(self) -> bool:
        self.deliveries += 1
        if self.deliveries == self._at:
            self._fault(self)
        if self.deliveries == self._at + LATER:
            self._relieve()
        if super().step():
            return True
        if self._relief is not None and self.deliveries >= self._at:
            self._relieve()
            return True
        return False

    def _relieve(self) -> None:
        relief, self._relief = self._relief, None
        if relief is not None:
            relief(self)

    def run(self, steps_max: int = 200_000) -> None:
        """Deliver until nobody waits for a master."""
        for _ in range(30):
            super().run(steps_max)
            held = [host for host in self.hosts if host.machine.master.is_vacant and not host.is_dead]
            if all(node.masterless_since is None for node in self.alive) and (self.accepted or not held):
                return
            self.wait(2.5)
        raise AssertionError("they find no master")


def _course(world: World) -> None:
    """Three peers join, reduce, sync and measure."""
    for name in ("n1", "n2", "n3"):
        newcomer = world.add()
        newcomer.root = name.encode()
        world.run()
        _all_call(world, Kind.UPDATE_TOPOLOGY)
        if world.master.pending:
            _all_call(world, Kind.UPDATE_TOPOLOGY)  # it had lost its master just then
    for tag in (1, 2):
        for node in reversed(world.accepted):
            world.launch(node, tag)
    world.run()
    _all_call(world, Kind.SYNC)
    _all_call(world, Kind.OPTIMIZE_TOPOLOGY)
    for node in world.accepted:
        world.launch(node, 3)
    world.run()


def _all_call(world: World, kind: str) -> None:
    for node in world.accepted:
        world.joint(node, kind)
    world.run()


def _close(world: World) -> None:
    """Whoever is left goes on."""
    for _ in range(8):
        world.wait(2.5)
        world.run()
    world.check_rest()
    world.cancel_all()
    world.admit_all()
    survivors = world.accepted
    assert set(world.reduce(survivors, tag=9)) == {Result.SUCCESS}
    assert set(world.call_all(survivors, Kind.SYNC)) == {Result.SUCCESS}
    world.check_rest()
    world.checks.agreement()


def _replace(world: World) -> None:
    world.kill_master()
    world.restart_master()


def _replace_and_lose(world: World) -> None:
    _replace(world)
    if len(world.accepted) > 2:
        world.kill(world.accepted[1])


def _replace_twice(world: World) -> None:
    _replace(world)
    for _ in range(7):
        world.step()
    _replace(world)


def _kill_once_accepted(world: World) -> None:
    """A standby founds no run."""
    if world.accepted:
        world.kill_master()


def _nothing(world: World) -> None:
    pass


def _thaw_stale(world: World) -> None:
    """A master that was stopped for longer than its peers waited goes on."""
    world.wait(6.0)
    world.thaw_master(world.hosts[0])


FAULTS: dict[str, tuple[int, Callable[[World], None], Callable[[World], None]]] = {
    "begun anew at once": (1, _replace, _nothing),
    "begun anew later": (1, lambda world: world.kill_master(lost=2), lambda world: world.restart_master()),
    "begun anew twice": (1, _replace_twice, _nothing),
    "followed by a standby": (2, _kill_once_accepted, _nothing),
    "followed by a standby, and back as a stale one": (2, lambda world: world.freeze_master(), _thaw_stale),
    "stopped for long": (1, lambda world: world.freeze_master(), _thaw_stale),
}


@pytest.mark.parametrize("name", FAULTS)
@SHARES
def test_master_dies_before_every_delivery_and_nothing_is_lost(name: str, share: tuple[int, ...]) -> None:
    """All peers are alive: no op fails, no call fails, nobody is lost."""

    def close(world: World) -> None:
        results = [result.code for node in world.nodes for result in node.results.values()]
        calls = [result.code for node in world.nodes for result in node.calls.values()]
        _close(world)
        assert set(results) <= {Result.SUCCESS}
        assert set(calls) <= {Result.SUCCESS}
        assert [node.ended for node in world.nodes] == [None] * 3

    _try_all(share, name, close)


@pytest.mark.parametrize("memory", [Memory.DISK])
@SHARES
def test_master_and_a_peer_die_before_every_delivery(memory: Memory, share: tuple[int, ...]) -> None:
    def close(world: World) -> None:
        _close(world)
        assert len(world.accepted) >= 2

    FAULTS["with a peer"] = 1, _replace_and_lose, _nothing
    _try_all(share, "with a peer", close, memory)


def _try_all(share: tuple[int, ...], name: str, close: Callable[[World], None], memory: Memory = Memory.NONE) -> None:
    masters, fault, relief = FAULTS[name]
    for at in boundaries(share, STRIDE):
        world = _Mortal(at, masters, fault, relief, memory)
        try:
            _course(world)
            if world.deliveries < at:
                break
            close(world)
        except BaseException as error:
            error.add_note(f"the master was {name}, before delivery {at}")
            error.add_note("\n".join(world.log[-20:]))
            raise
    assert at > 100, "the course was not run"


def test_without_a_next_master_all_fail_in_the_end() -> None:
    world = World(masters=1)
    nodes = [*world.join(0), *world.join(0, 0)]
    op = world.launch(nodes[0], 1)
    call = world.joint(nodes[1], Kind.SYNC)
    world.kill_master()
    world.run()
    world.wait(MASTER_TIMEOUT_S - 1)
    world.run()
    assert nodes[0].open_ops == [op]
    assert nodes[1].open_calls == [call]
    world.wait(1.5)
    world.run()
    assert nodes[0].result(op) is nodes[1].call(call) is Result.MASTER_CONNECTION_FAILED
    assert all(node.ended is not None for node in nodes)


def test_a_minority_does_not_go_on_and_a_majority_does() -> None:
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
    assert standby.machine.master.accepted == [node.number for node in nodes[2:]]
    assert standby.machine.master.term == 2
    for _ in range(30):
        world.wait(2.5)
        world.run()
    assert [node.ended is not None for node in nodes] == [True, True, False, False, False]
    world.heal()
    assert world.reduce(nodes[2:]) == [Result.SUCCESS] * 3


def test_who_is_put_out_of_the_run_and_asks_a_standby_disturbs_nobody() -> None:
    world = World(masters=2)
    nodes = [*world.join(0), *world.join(0, 0)]
    said = len(world.from_masters)
    primary, _ = world.hosts
    world.cut(nodes[2], primary.name)
    for _ in range(4):
        world.wait(2.0)
        world.run()
    assert primary.machine.master.accepted == [1, 2]
    assert any(isinstance(message, m.Resume) for name, message in world.from_peers if name == "n3")
    world.heal()
    for _ in range(10):
        world.wait(2.0)
        world.run()
    assert (primary.machine.master.accepted, primary.machine.master.term) == ([1, 2], 1)
    assert nodes[2].machine.term == 1
    assert nodes[2].ended is not None
    assert "has gone on without peer 3" in nodes[2].ended.reason
    assert not any(
        isinstance(message, m.Elsewhere) for name, message in world.from_masters[said:] if name in ("n1", "n2")
    )


def test_one_who_comes_too_late_hears_so() -> None:
    world = World(masters=1, memory=Memory.DISK)
    nodes = [*world.join(0), *world.join(0, 0)]
    world.cut(nodes[2], world.hosts[0].name)
    world.kill_master()
    world.restart_master()
    world.run()
    assert not world.hosts[0].is_leading
    world.wait(5.5)
    world.run()
    assert world.hosts[0].is_leading
    assert {node.view.ring for node in nodes[:2]} == {(1, 2)}
    assert nodes[0].lost == [(3, "did not come back after the loss of the master")]
    world.heal()
    world.wait(1.0)
    world.run()
    assert nodes[2].ended is not None
    assert "has gone on without peer 3" in nodes[2].ended.reason


def test_who_is_lost_in_a_sync_is_not_told_that_it_succeeded() -> None:
    """Its connection breaks, the others go on, and the master dies before any view has left it out."""
    world = World(masters=1)
    nodes = [*world.join(0), *world.join(0, 0)]
    behind = nodes[2]
    for node in nodes[:2]:
        node.root, node.revision = b"new", 3
    calls = [world.joint(node, Kind.SYNC) for node in nodes]
    world.run_until(lambda: behind.plans)
    world.sever(behind)
    world.freeze(behind)
    world.run_until(lambda: world.master.absent_until)
    world.wait(5.0)
    world.run_until(lambda: calls[0] in nodes[0].calls)
    world.kill_master(lost=5)
    world.restart_master()
    world.thaw(behind)
    for _ in range(3):
        world.run()
        world.wait(2.5)
    assert [node.call(call) for node, call in zip(nodes[:2], calls[:2], strict=True)] == [Result.SUCCESS] * 2
    assert behind.call(calls[2]) is Result.MASTER_CONNECTION_FAILED
    assert behind.root != b"new"


def test_who_was_lost_takes_a_run_over_whose_others_are_dead() -> None:
    """It stands where it was lost. What was numbered without it is numbered no second time, in the same term too."""
    world = World(masters=1)
    (alone,) = world.join(0)
    world.freeze(alone)
    world.break_heartbeats(alone)
    world.reset(alone)
    world.run()
    world.wait(6.0)
    world.cut(alone, world.hosts[0].name)
    world.thaw(alone)
    other = world.add()
    world.run()
    assert other.view.ring == (other.number,)
    world.kill_master()
    world.restart_master()
    world.run()
    led = world.master
    assert led.accepted == [other.number]
    world.kill(other)
    world.kill_master()
    world.restart_master()
    world.heal()
    for _ in range(4):
        world.run()
        world.wait(2.5)
    assert world.master.accepted == [alone.number]
    assert (world.master.run, world.master.term) == (led.run, led.term)
    assert world.master.state.view != led.state.view
    newcomer = world.add()
    world.admit_all()
    assert abs(newcomer.number - led.state.next_peer) > 1000
    assert world.reduce([alone, newcomer]) == [Result.SUCCESS] * 2


def _left_with_two(memory: Memory) -> tuple[World, list[Node], list[Node]]:
    """Five peers, of whom the master evicts three, one after the other. The last two go on, and sync."""
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


@pytest.mark.parametrize("memory", [Memory.NONE, Memory.DISK])
def test_peers_that_were_evicted_one_by_one_do_not_lead_on_though_they_come_first(memory: Memory) -> None:
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
    assert world.master.accepted == [node.number for node in kept]
    assert [node.ended is not None for node in [*kept, *lost]] == [False, False, True, True, True]
    assert all(node.ended is not None and "evicted" in node.ended.reason for node in lost)
    assert world.reduce(kept) == [Result.SUCCESS] * 2


def test_with_a_fence_the_evicted_hear_so_at_once() -> None:
    world, kept, lost = _left_with_two(Memory.DISK)
    world.kill_master()
    world.heal()
    world.cut(kept[0], MASTER)
    world.cut(kept[1], MASTER)
    world.restart_master()
    world.run()
    # The record is of the time before the last view was in force, so the last one lost may still have had a part.
    assert [node.ended is not None for node in lost] == [True, True, False]


@pytest.mark.parametrize("memory", [Memory.DISK])
def test_a_run_whose_master_and_one_peer_die_together_goes_on(memory: Memory) -> None:
    world = World(masters=1, memory=memory)
    nodes = [*world.join(0), *world.join(0, 0)]
    world.kill_master()
    world.kill(nodes[2])
    world.wait(4.0)
    world.restart_master()
    while world.now < 2 * MASTER_TIMEOUT_S and not world.hosts[0].is_leading:
        world.run()
        world.wait(0.5)
    world.run()
    assert {node.view.ring for node in nodes[:2]} == {(1, 2)}
    assert world.reduce(nodes[:2]) == [Result.SUCCESS] * 2


def test_one_lost_link_is_no_death_when_the_master_is_new() -> None:
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


def _led_by(world: World, seconds: float) -> None:
    end_at = world.now + seconds
    while world.now < end_at:
        world.run()
        world.wait(0.5)
    world.run()


def test_with_a_fence_the_few_who_are_left_go_on() -> None:
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


def test_with_a_fence_who_is_not_in_all_that_may_be_in_force_does_not_go_on() -> None:
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
def test_newcomers_found_a_run_when_nobody_of_the_last_one_comes(has_died: bool) -> None:
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
    assert world.master.accepted
    world.heal()
    _led_by(world, 3.0)
    assert all(node.ended is not None for node in nodes)
    world.admit_all()
    assert world.reduce(newcomers) == [Result.SUCCESS] * 2


def test_who_has_told_of_a_later_view_and_gone_is_not_forgotten() -> None:
    world, kept, lost = _left_with_two(Memory.NONE)
    world.kill_master()
    world.heal()
    world.cut(kept[1], MASTER)
    world.restart_master()
    world.run()
    world.kill(kept[0])
    while any(node.ended is None for node in lost):
        world.run()
        world.wait(2.0)
        assert not world.hosts[0].is_leading


def test_a_newcomer_founds_nothing_before_peers_of_a_run_have_missed_their_master() -> None:
    """They come as late as a silence takes to be noticed."""
    world = World(masters=1)
    nodes = [*world.join(0), *world.join(0, 0, 0)]
    world.cut(nodes[0], MASTER)
    for node in nodes[1:]:
        world.cut(node, MASTER)
    world.kill_master()
    world.restart_master()
    newcomer = world.add()
    for _ in range(5):
        world.run()
        world.wait(1.0)
    assert not world.hosts[0].is_leading
    world.heal()
    world.wait(1.0)
    world.run()
    assert world.master.accepted == [node.number for node in nodes]
    world.admit_all()
    assert newcomer.number in world.master.accepted


def test_a_fence_of_a_live_run_lets_nobody_found_another_and_one_that_is_over_does() -> None:
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
    assert world.master.accepted == [node.number for node in nodes]
    world.admit_all()
    for node in [*nodes, newcomer]:
        world.leave(node)
    world.run()
    world.kill_master()
    world.restart_master()
    founder = world.add()
    world.run()
    assert world.master.accepted == [founder.number]


@pytest.mark.parametrize("masters", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_schedules_with_mortal_masters(masters: int) -> None:
    for seed in range(SCHEDULES):
        play(Plan.of_seed(seed, masters))


def test_a_view_that_some_needed_not_answer_may_be_in_force() -> None:
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
    assert first.machine.master.accepted == [node.number for node in others]
    assert not second.is_leading
    assert {node.machine.term for node in nodes} == {1}
