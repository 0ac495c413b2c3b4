"""Silent, absent and straggling peers are named; pauses and uneven steps are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

import pytest

from pccl.protocol.completion import PAIR_BIT
from pccl.protocol.messages import OpRef, Report
from pccl.protocol.status import Finding
from pccl.protocol.stragglers import ABSENT_S, CLEAR_S, STALE_S, GroupScene, Stragglers

EPOCH = 3
REPORT_S = 0.5


class World:
    """Peers 1 to n, which report every REPORT_S by clocks of their own. The time between ops is a share per peer."""

    def __init__(self, peers: int = 3, step_s: float = 0.1) -> None:
        self.now = 100.0
        self.ring = list(range(1, peers + 1))
        self.stragglers = Stragglers()
        self.found: list[Finding] = []
        self.over: list[Finding] = []
        self.silent: dict[int, float] = {}
        self.waits: dict[str, tuple[float, int, list[int]]] = {}
        self.stalled: dict[OpRef, set[int]] = {}
        self.op_wait_s: Mapping[int, float] = {}
        self.ops = 0.0
        self._step_s = step_s
        self._in_ops = dict.fromkeys(self.ring, 0.0)

    def run(self, seconds: float, between: Callable[[int], float] = lambda peer: 0.2) -> None:
        """Let time pass, in which each peer spends a share of the time between ops."""
        for _ in range(round(seconds / REPORT_S)):
            self.now += REPORT_S
            self.ops += REPORT_S / self._step_s
            for peer in self.ring:
                self._in_ops[peer] += REPORT_S * (1 - between(peer))
                if peer not in self.silent:
                    self.report(peer)
            self.judge()

    def report(self, peer: int) -> None:
        report = Report(
            [(EPOCH, int(self.ops), 0)],
            0,
            0,
            in_ops_ms=round(1e3 * self._in_ops[peer]),
            op_wait_ms=round(1e3 * self.op_wait_s.get(peer, 0.0)),
            at_ms=round(1e3 * (self.now + 50 * peer)),
        )
        self.stragglers.reported(peer, 0, report, self.now)

    def judge(self) -> None:
        scene = GroupScene(0, self.ring, EPOCH, True, self.waits, self.stalled)
        begun, over = self.stragglers.judge([scene], self.silent, self.now)
        self.found += begun
        self.over += over

    @property
    def begun(self) -> list[tuple[str, int]]:
        """Everything that was named so far, in order."""
        return [(each.kind, each.peer) for each in self.found]

    @property
    def named(self) -> list[tuple[str, int]]:
        """The findings now."""
        return [(each.kind, each.peer) for each in self.stragglers.findings(self.now)]


def test_straggler_is_named_until_it_is_as_fast_as_the_others() -> None:
    world = World()
    world.run(20)
    assert not world.begun
    world.run(8, lambda peer: 0.8 if peer == 2 else 0.2)
    assert world.begun == [("straggler", 2)]
    assert "peer 2 straggles: it spends 80% of the time between ops, the next slowest peer 20%" in (world.found[0].text)
    world.run(8)
    world.run(CLEAR_S)
    assert world.named == []
    assert [each.peer for each in world.over] == [2]


@pytest.mark.parametrize(("own", "rest"), [(0.38, 0.2), (0.15, 0.06), (0.9, 0.9)])
def test_small_differences_are_not_named(own: float, rest: float) -> None:
    world = World()
    world.run(60, lambda peer: own if peer == 2 else rest)
    assert not world.begun


def test_pauses_are_not_named() -> None:
    world = World()
    for _ in range(5):
        world.run(4)
        world.run(1, lambda peer: 1.0 if peer == 1 else 0.0)
    assert not world.begun


@pytest.mark.parametrize("seed", range(5))
def test_uneven_steps_are_not_named(seed: int) -> None:
    world, chance = World(), Random(seed)
    for _ in range(100):
        shares = {peer: chance.uniform(0.1, 0.9) for peer in world.ring}
        world.run(1, shares.__getitem__)
    assert not world.begun


def test_straggler_between_outer_steps_that_are_minutes_apart() -> None:
    world = World(step_s=60.0)
    world.run(420, lambda peer: 0.9 if peer == 3 else 0.4)
    assert world.named == [("straggler", 3)]


def test_no_straggler_without_ops() -> None:
    world = World()
    world.run(20, lambda peer: 0.8 if peer == 2 else 0.2)
    assert world.named == [("straggler", 2)]
    world.now += STALE_S
    world.judge()
    world.now += CLEAR_S
    world.judge()
    assert world.named == []


def test_time_in_ops_shows_nothing_while_a_thread_waits_in_an_op_all_the_time() -> None:
    world = World()
    world.op_wait_s = {1: 100.0}
    world.run(20, lambda peer: 0.0 if peer == 1 else 0.5)
    assert not world.begun


def test_silent_peer_is_named_alone() -> None:
    world = World()
    world.run(20, lambda peer: 0.8 if peer == 2 else 0.2)
    world.silent = {3: 2.6}
    world.run(CLEAR_S + 1)
    assert world.named == [("silent", 3)]
    world.silent = {}
    world.stragglers.gone(3)
    assert world.named == []


def test_peer_absent_from_a_group_call() -> None:
    world = World()
    world.waits = {"update_topology": (ABSENT_S - 1, 2, [3])}
    world.run(1)
    assert not world.begun
    world.waits = {"update_topology": (ABSENT_S, 2, [3])}
    world.run(1)
    assert world.begun == [("absent", 3)]
    assert world.found[0].text == ("peer 3 has not called update_topology; 2 other peers have waited in it for 30 s")
    world.waits = {"update_topology": (ABSENT_S, 1, [2, 3])}  # most are missing: not an absent peer
    world.run(CLEAR_S + 1)
    assert world.named == []


def test_peer_absent_from_an_op() -> None:
    world = World()
    op = OpRef(7, 0)
    world.stalled = {op: {1, 2}}
    world.op_wait_s = {1: ABSENT_S - 2, 2: ABSENT_S}
    world.run(1)
    assert not world.begun
    world.op_wait_s = {1: ABSENT_S, 2: ABSENT_S + 1}
    world.run(1)
    assert world.begun == [("absent", 3)]
    assert "has not called the op with tag 7; 2 other peers have waited in it for 30 s" in (world.found[0].text)
    world.op_wait_s = {1: ABSENT_S, 2: ABSENT_S + 1, 3: 0.1}  # it has called it, and the op runs
    world.run(CLEAR_S + 1)
    assert world.named == []


def test_peer_that_waits_in_another_op() -> None:
    world = World()
    world.stalled = {OpRef(7, 0): {1, 2}, OpRef(8, 0): {3}, OpRef(PAIR_BIT, 0): {1, 2, 3}}
    world.op_wait_s = dict.fromkeys(world.ring, ABSENT_S)
    world.run(1)
    assert world.begun == [("absent", 3)]
    assert "; it waits in the op with tag 8: do all peers call the same ops in the same order?" in (world.found[0].text)
