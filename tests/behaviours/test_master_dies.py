"""The master dies at any moment of a run, and another one follows it, or none.

It dies before every twelfth delivery. `python -m tests.simulation --masters 2` tries random moments.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count

import pytest

from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.master_host import Memory
from tests.simulation.plan import Plan
from tests.simulation.schedule import play
from tests.simulation.world import MASTER, MASTER_TIMEOUT_S, World

LATER = 15
"""Deliveries until the next master begins, if not at once."""
EVERY = 12
"""Deliveries between two moments of death."""
SCHEDULES = 20


class _Mortal(World):
    """Something happens before the n-th delivery, and something that follows from it `LATER` deliveries after that, or
    when all is delivered."""

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
        """Deliver until no peer waits for a master."""
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
        if world.master.state.pending:
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
        world.group_call(node, kind)
    world.run()


def _close(world: World) -> None:
    """The survivors go on."""
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
    "restarted at once": (1, _replace, _nothing),
    "restarted later": (1, lambda world: world.kill_master(lost=2), lambda world: world.restart_master()),
    "restarted twice": (1, _replace_twice, _nothing),
    "followed by a standby": (2, _kill_once_accepted, _nothing),
    "followed by a standby, and back as a stale one": (2, lambda world: world.freeze_master(), _thaw_stale),
    "stopped for long": (1, lambda world: world.freeze_master(), _thaw_stale),
}


@pytest.mark.parametrize("name", FAULTS)
def test_death_of_the_master_at_any_time_loses_nothing(name: str) -> None:
    """All peers are alive: no op fails, no call fails, no peer is lost."""

    def close(world: World) -> None:
        results = [result.code for node in world.nodes for result in node.results.values()]
        calls = [result.code for node in world.nodes for result in node.calls.values()]
        _close(world)
        assert set(results) <= {Result.SUCCESS}
        assert set(calls) <= {Result.SUCCESS}
        assert [node.ended for node in world.nodes] == [None] * 3

    _try_all(name, close)


@pytest.mark.parametrize("memory", [Memory.DISK])
def test_death_of_master_and_peer_at_any_time(memory: Memory) -> None:
    def close(world: World) -> None:
        _close(world)
        assert len(world.accepted) >= 2

    FAULTS["with a peer"] = 1, _replace_and_lose, _nothing
    _try_all("with a peer", close, memory)


def _try_all(name: str, close: Callable[[World], None], memory: Memory = Memory.NONE) -> None:
    masters, fault, relief = FAULTS[name]
    for at in count(1, EVERY):
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


def test_peers_fail_after_the_master_timeout() -> None:
    world = World(masters=1)
    nodes = [*world.join(0), *world.join(0, 0)]
    op = world.launch(nodes[0], 1)
    call = world.group_call(nodes[1], Kind.SYNC)
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


def test_peer_lost_during_a_sync_gets_no_success() -> None:
    """Its connection breaks, the others go on, and the master dies before any view has left it out."""
    world = World(masters=1)
    nodes = [*world.join(0), *world.join(0, 0)]
    behind = nodes[2]
    for node in nodes[:2]:
        node.root, node.revision = b"new", 3
    calls = [world.group_call(node, Kind.SYNC) for node in nodes]
    world.run_until(lambda: behind.plans)
    world.sever(behind)
    world.freeze(behind)
    world.run_until(lambda: world.master.liveness.absent_until)
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


def test_newcomer_waits_for_peers_of_an_earlier_run() -> None:
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
    assert world.master.state.accepted == [node.number for node in nodes]
    world.admit_all()
    assert newcomer.number in world.master.state.accepted


@pytest.mark.parametrize("masters", [1, 2])
def test_random_schedules_in_which_masters_die(masters: int) -> None:
    for seed in range(SCHEDULES):
        play(Plan.of_seed(seed, masters))
