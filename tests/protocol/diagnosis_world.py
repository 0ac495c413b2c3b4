"""A group of peers on paper, which tells a diagnosis what such peers would report.

All peers launch an op a step after the last one has ended, each after a time of its own, and it ends for all a little
after the last launch. Reports are taken from that course at the moments, and by the clock, of each peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

from hypothesis import settings
from hypothesis import strategies as st

from pccl.protocol.diagnosis import Change, Diagnosis, GroupScene, Scene
from pccl.protocol.diagnosis.findings import CLEAR_S
from pccl.protocol.messages import LinkReport, OpRef, Report

REPORT_S = 0.5
JUDGE_S = 0.25
BEGINS_AT_S = 100.0
EPOCH = 3
QUEUE_US = 50_000
"""A round trip where a way is slow."""
SEGMENTS = 100
"""Number of packets that an op sends on each way."""
SETTLED_S = 8.0
NAMED_WITHIN_S = 5.0
Direction = tuple[int, int]


@dataclass
class World:
    """The group. What may be changed while it runs is read at each step."""

    peers: int
    seed: int = 0
    step_s: float = 0.1
    op_s: float = 0.02
    noise: float = 0.1
    """Share by which each step of each peer varies."""
    uneven: tuple[float, ...] = ()
    """Factors of which each step of each peer has one, by chance."""
    factors: dict[int, float] = field(default_factory=dict)
    """Factors of the time between ops, by peer."""
    slow_way: Direction | None = None
    way_factor: float = 10.0
    """Factor of the time of an op while there is a slow way."""
    losses: dict[Direction, float] = field(default_factory=dict)
    starved: dict[int, float] = field(default_factory=dict)
    """Shares of the time by which the threads of peers come late."""
    stuck: dict[Direction, int] = field(default_factory=dict)
    """Ways that carry nothing, and how a trial of the path goes. No op ends meanwhile."""
    silent: set[int] = field(default_factory=set)
    tried: dict[Direction, int] = field(default_factory=dict)
    """How trials of further paths have gone, on which something may get through."""
    pauses: dict[int, float] = field(default_factory=dict)
    """Seconds by which a peer's next launch is late."""
    named: list[tuple[float, Change]] = field(default_factory=list)
    waits: Mapping[str, tuple[float, int, list[int]]] = field(default_factory=dict)
    stalled: Mapping[OpRef, set[int]] = field(default_factory=dict)
    """Ops that peers wait in, and who does. No op ends meanwhile."""
    beside: set[int] = field(default_factory=set)
    """Peers of which another thread waits from the beginning in an op that nobody else calls."""

    def __post_init__(self) -> None:
        self.now = BEGINS_AT_S
        self.diagnosis = Diagnosis()
        self._chance = Random(self.seed)
        self._ring = list(range(1, self.peers + 1))
        self._in_ops = dict.fromkeys(self._ring, 0.0)
        self._ops = 0
        self._clocks = {peer: self._chance.uniform(0, 1000) for peer in self._ring}
        self._report_at = {peer: self.now + self._chance.uniform(0, REPORT_S) for peer in self._ring}
        self._judge_at = self.now
        self._silent_since: dict[int, float] = {}
        self._stuck_since: dict[Direction, float] = {}
        self._links: dict[Direction, list[float]] = {
            (a, b): [0.0, 0.0, 0.0, 0.0] for a in self._ring for b in self._ring if a != b
        }
        """Seconds busy, segments delivered and sent again, bytes."""
        self._launched: dict[int, float] = {}
        self._late_s = dict.fromkeys(self._ring, 0.0)
        self._begin_step()

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self.now < end and not until():
            at = min([*self._report_at.values(), self._judge_at, *self._own_events()])
            for peer, share in self.starved.items():
                self._late_s[peer] += share * (min(at, end) - self.now)
            self.now = min(at, end)
            self._go_on()

    def names(self) -> list[tuple[str, int, int | None]]:
        """Return who was named so far, in order."""
        return [change.suspect.key for _, change in self.named if not change.is_over]

    # The course of ops.

    def _begin_step(self) -> None:
        self._launched = {
            peer: self.now
            + self.step_s
            * (self._chance.choice(self.uneven) if len(self.uneven) > 1 else 1.0)
            * self.factors.get(peer, 1.0)
            * (1 + self._chance.uniform(-self.noise, self.noise))
            + self.pauses.pop(peer, 0.0)
            for peer in self._ring
        }

    def _op_end(self) -> float:
        if self.stuck or self.silent or self.stalled:
            return float("inf")
        factor = self.way_factor if self.slow_way is not None else 1.0
        return max(self._launched.values()) + self.op_s * factor

    def _own_events(self) -> Iterator[float]:
        yield self._op_end()

    def _go_on(self) -> None:
        if self.now >= self._op_end():
            self._end_op()
        for peer in self._ring:
            if self.now >= self._report_at[peer]:
                self._report_at[peer] += REPORT_S * self._chance.uniform(1.0, 1.05)
                if peer not in self.silent:
                    self._report(peer)
        if self.now >= self._judge_at:
            self._judge_at += JUDGE_S
            self._judge()

    def _end_op(self) -> None:
        for peer in self._ring:
            self._in_ops[peer] += self.now - self._launched[peer]
        self._ops += 1
        for way, counts in self._links.items():
            counts[0] += self._busy_s(way)
            loss = self.losses.get(way, 0.0)
            lost = int(SEGMENTS * loss + self._chance.random()) if loss else 0
            counts[1] += SEGMENTS
            counts[2] += lost
            counts[3] += 100_000
        self._begin_step()

    def _busy_s(self, way: Direction) -> float:
        """Return for how long something of the present op has been under way."""
        moved_s = max(0.0, self.now - max(self._launched.values()))
        return min(moved_s, self._way_s(way))

    def _way_s(self, way: Direction) -> float:
        """Return how long an op keeps a way busy."""
        return self.op_s * (self.way_factor if way == self.slow_way else 1.0)

    # What is told.

    def _report(self, peer: int) -> None:
        open_s = max(0.0, self.now - self._launched[peer])
        in_ops_s = self._in_ops[peer] + open_s
        if peer in self.beside:
            open_s = in_ops_s = self.now - BEGINS_AT_S
        links = []
        for other in self._ring:
            if other == peer:
                continue
            busy_s, delivered, resent, sent_bytes = self._links[peer, other]
            own_s = self._busy_s((peer, other))
            busy_s, delivered = busy_s + own_s, delivered + SEGMENTS * min(1.0, own_s / self._way_s((peer, other)))
            stuck_s = 0.0
            if (peer, other) in self.stuck:
                stuck_s = self.now - self._stuck_since.setdefault((peer, other), self.now)
            trial = self.stuck.get((peer, other), 0) if stuck_s > 1.0 else self.tried.get((peer, other), 0)
            links.append(
                LinkReport(
                    other,
                    int(sent_bytes),
                    busy_ms=int(1000 * busy_s),
                    stuck_ms=int(1000 * stuck_s),
                    delivered=int(delivered),
                    resent=int(resent),
                    round_trip_us=QUEUE_US if (peer, other) == self.slow_way else 1000,
                    trial=trial,
                )
            )
        report = Report(
            [(EPOCH, self._ops, 0)],
            0,
            0,
            links=links,
            in_ops_ms=int(1000 * in_ops_s),
            op_wait_ms=int(1000 * open_s),
            at_ms=int(1000 * (self.now + self._clocks[peer])),
            late_ms=int(1000 * self._late_s[peer]),
        )
        self.diagnosis.reported(peer, 0, report, self.now)

    def _judge(self) -> None:
        for peer in self.silent:
            self._silent_since.setdefault(peer, self.now)
        silent_s = {peer: self.now - since for peer, since in self._silent_since.items() if peer in self.silent}
        scene = Scene(
            [GroupScene(0, self._ring, EPOCH, True, self.waits, self.stalled)],
            {peer: seconds for peer, seconds in silent_s.items() if seconds >= 2.5},
            frozenset(peer for peer, seconds in silent_s.items() if seconds >= 1.5),
        )
        self.named += [(self.now, change) for change in self.diagnosis.judge(scene, self.now)]


few = settings(max_examples=8, deadline=None, derandomize=True)

worlds = st.builds(
    World,
    peers=st.integers(2, 6),
    seed=st.integers(0, 2**32),
    step_s=st.sampled_from([0.05, 0.1, 0.2]),
    op_s=st.sampled_from([0.001, 0.02, 0.1]),
    noise=st.floats(0, 0.3),
)


def named_within(world: World, key: tuple[str, int, int | None]) -> None:
    """Check that this one is named in time, and nobody else."""
    assert world.names() == []
    begun = world.now
    world.run(NAMED_WITHIN_S, until=lambda: key in world.names())
    assert world.names() == [key], f"after {world.now - begun:.1f} s"
    world.run(2 * CLEAR_S)
    assert world.names() == [key]
