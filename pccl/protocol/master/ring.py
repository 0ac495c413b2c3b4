"""Rings: where newcomers are inserted, and how optimize_topology reorders peers.

optimize_topology measures links in rounds, searches for a better ring for each group, and installs it in the same way
as a ring change after a loss. Groups of up to ALL_PAIRS_PEERS_MAX peers measure all pairs; in larger ones each peer
measures that many links per call. The dialing end of a link measures it. Rounds stop after MEASURING_S_MAX, and the
search uses the values known by then. A missing link counts as unreachable, and a ring that needs one is not adopted.

All other changes keep the order of a ring: a lost peer is removed, and newcomers are inserted where they cost least.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from pccl.protocol import messages as m
from pccl.protocol import topology
from pccl.protocol.link_metrics import LinkMetrics, Pair, direct_limit, is_outdated
from pccl.protocol.master.run_state import FindRings, Group, Member, RunState
from pccl.protocol.topology import RingProblem, ring_links, updated_ring


def with_newcomers(ring: Sequence[int], newcomers: Iterable[int], metrics: LinkMetrics) -> list[int]:
    """Insert newcomers in the order of their numbers: at the best position if metrics of their host are known, else
    after peers on the same host, else at the end. Other peers keep their order."""
    found = list(ring)
    rates = [metric.bytes_per_s for pair in ring_links(ring) if (metric := metrics.get(pair)) is not None]
    slowest = min(rates, default=float("inf"))
    for peer in sorted(newcomers):
        found.insert(_place(found, peer, metrics, slowest), peer)
    return found


def _place(ring: Sequence[int], peer: int, metrics: LinkMetrics, slowest: float) -> int:
    """Return the index at which to insert a newcomer. `slowest` is the rate of the ring's slowest link so far, in bytes
    per second."""
    if not metrics.knows_host_of(peer):
        hosts = metrics.hosts(peer)
        beside = [at for at, other in enumerate(ring) if metrics.hosts(other) == hosts]
        return beside[-1] + 1 if beside else len(ring)

    def harm(at: int) -> tuple[int, int, float, float, int]:
        """Return the cost of a position. A slow link counts only if it is slower than the ring's slowest link."""
        new = [(ring[at - 1], peer), (peer, ring[at % len(ring)])]
        unreachable = sum(metrics.is_unreachable(pair) for pair in new)
        known = [metric for pair in new if (metric := metrics.get(pair)) is not None]
        rate = min([slowest, *(metric.bytes_per_s for metric in known)])
        replaced = metrics.get((ring[at - 1], ring[at % len(ring)]))
        more_s = sum(metric.latency_s for metric in known) - (replaced.latency_s if replaced is not None else 0.0)
        return unreachable, 2 - len(known), -rate, more_s, -at

    return min(range(1, len(ring) + 1), key=harm, default=0)


ROUNDS_MAX = 64
ROUND_S_MAX = 8.0
"""Seconds that a round may take, longer than any failing measurement."""
MEASURING_S_MAX = 20.0
ALL_PAIRS_PEERS_MAX = 32
"""Largest group that measures all pairs. In a larger one each peer measures this many links per call."""
FASTER = 1.05
SHORTER = 0.9
"""Of two rings with equal numbers of reachable and known links, the new one is adopted if its slowest link is faster by
the factor FASTER, or if that link is as fast and the sum of latencies is smaller by the factor SHORTER. Smaller
differences may be measurement noise."""
LISTED_MAX = 24
MBIT = 1e6 / 8


def wanted(ring: Sequence[int], metrics: LinkMetrics, salt: int, now: float) -> Iterable[Pair]:
    """Yield the links that should be measured, the most useful first. `salt` selects the subset measured in a large
    group."""
    count = len(ring)
    steps: Sequence[int] = range(1, count)
    if count > ALL_PAIRS_PEERS_MAX:
        # Steps around the ring that differ between calls; the golden ratio spreads them evenly.
        spread = (int(count * ((salt * ALL_PAIRS_PEERS_MAX + each) * 0.6180339887 % 1)) for each in range(1, count))
        steps = [1, *dict.fromkeys(step for step in spread if step > 1)][:ALL_PAIRS_PEERS_MAX]
    for step in steps:
        for at, sender in enumerate(ring):
            pair = sender, ring[(at + step) % count]
            if metrics.is_due(pair, now):
                yield pair


def rounds(pairs: Iterable[Pair], metrics: LinkMetrics) -> list[list[Pair]]:
    """Divide links into rounds that measure them concurrently: each goes to the first round without a conflict.

    Links that do not fit into ROUNDS_MAX rounds are left out.
    """
    found: list[list[Pair]] = []
    taken: defaultdict[object, int] = defaultdict(int)
    """For each resource that a round may use only once, a bit mask of the rounds that use it."""
    known_hosts: set[object] = set()
    for sender, receiver in pairs:
        hosts = metrics.hosts(sender), metrics.hosts(receiver)
        if hosts in known_hosts:
            continue  # one pair's metric applies to all pairs between these hosts
        uses: list[object] = [("from", sender), ("to", receiver), frozenset((sender, receiver))]
        if hosts[0] != hosts[1]:
            uses += [("from", hosts[0]), ("to", hosts[1]), frozenset(hosts)]
        rounds_taken = reduce(or_, (taken[use] for use in uses))
        at = (~rounds_taken & (rounds_taken + 1)).bit_length() - 1  # the lowest bit that is not set
        if at == ROUNDS_MAX:
            continue
        if at == len(found):
            found.append([])
        known_hosts.add(hosts)
        found[at].append((sender, receiver))
        for use in uses:
            taken[use] |= 1 << at
    return found


class Optimization:
    """The state of one optimize_topology. The caller numbers rounds and searches, and drops answers to earlier ones."""

    def __init__(self, metrics: LinkMetrics, rings: Mapping[int, Sequence[int]], salt: int, now: float) -> None:
        pairs = [pair for ring in rings.values() for pair in wanted(ring, metrics, salt, now)]
        self.begun_at = now
        self.number = 0
        self.is_searching = False
        self.rings: Mapping[int, Sequence[int]] | None = None
        self.is_decided = False
        self.measured = self.failed = 0
        self._metrics = metrics
        self._rounds = deque(rounds(pairs, metrics))
        self._asked: dict[int, list[Pair]] = {}
        self._mute: set[int] = set()
        self._round_ends_at = 0.0

    @property
    def is_waiting(self) -> bool:
        return bool(self._asked) or self.is_searching

    def deadline(self) -> float | None:
        return self._round_ends_at if self._asked else None

    def next_round(self, number: int, now: float) -> dict[int, list[Pair]]:
        assert not self.is_waiting
        while self._rounds and now < self.begun_at + MEASURING_S_MAX:
            for pair in self._rounds.popleft():
                if max(pair) not in self._mute:
                    self._asked.setdefault(max(pair), []).append(pair)
            if self._asked:
                self.number = number
                self._round_ends_at = now + ROUND_S_MAX
                return {peer: list(pairs) for peer, pairs in self._asked.items()}
        return {}

    def is_asked(self, number: int, peer: int) -> bool:
        return number == self.number and peer in self._asked

    def answered(self, peer: int, found: Mapping[Pair, tuple[float, float]], now: float) -> list[Pair]:
        """Record a peer's measurements of rates (bytes per second) and round trips (seconds). Return the links that
        could not be measured."""
        failed = []
        for pair in self._asked.pop(peer):
            if pair in found:
                self._metrics.measured(pair, *found[pair], now)
            if pair not in found or self._metrics.is_unreachable(pair):
                self._metrics.failed(pair, now)
                failed.append(pair)
            else:
                self.measured += 1
        self.failed += len(failed)
        return failed

    def expire(self, now: float) -> list[Pair]:
        if not self._asked or now < self._round_ends_at:
            return []
        late = [pair for pairs in self._asked.values() for pair in pairs]
        for pair in late:
            self._metrics.failed(pair, now)
        self.failed += len(late)
        self._mute |= set(self._asked)
        self._asked.clear()
        return late

    def lost(self, peer: int) -> None:
        self._asked.pop(peer, None)
        for links in [*self._asked.values(), *self._rounds]:
            links[:] = [pair for pair in links if peer not in pair]

    def search(self, number: int, rings: Mapping[int, Sequence[int]]) -> dict[int, RingProblem]:
        assert not self.is_waiting
        self.number = number
        self.is_searching = True
        return {group: self._metrics.problem(ring) for group, ring in rings.items()}


@dataclass(frozen=True)
class Outlook:
    unreachable: int
    unknown: int
    slowest: Pair | None
    bytes_per_s: float
    latency_s: float
    """Sum of the latencies of the ring's known links."""

    def is_better(self, other: Outlook) -> bool:
        bad, others = (self.unreachable, self.unknown), (other.unreachable, other.unknown)
        if bad != others:
            return bad < others
        if self.bytes_per_s > FASTER * other.bytes_per_s:
            return True
        return self.bytes_per_s * FASTER >= other.bytes_per_s and self.latency_s < SHORTER * other.latency_s

    def __str__(self) -> str:
        if self.slowest is None:
            return "its links were not measured"
        text = (
            f"slowest link {self.slowest[0]}->{self.slowest[1]} at {self.bytes_per_s / MBIT:.4g} Mbit/s, "
            f"{self.latency_s * 1e3:.4g} ms around the ring"
        )
        text += f", {self.unknown} links unknown" if self.unknown else ""
        return text + (f", {self.unreachable} unreachable" if self.unreachable else "")


def outlook(ring: Sequence[int], metrics: LinkMetrics) -> Outlook:
    links = ring_links(ring)
    reachable = [pair for pair in links if not metrics.is_unreachable(pair)]
    known = {pair: metric for pair in reachable if (metric := metrics.get(pair)) is not None}
    slowest = min(known, key=lambda pair: known[pair].bytes_per_s, default=None)
    return Outlook(
        len(links) - len(reachable),
        len(reachable) - len(known),
        slowest,
        known[slowest].bytes_per_s if slowest is not None else 0.0,
        sum(metric.latency_s for metric in known.values()),
    )


def decide(present: Sequence[int], found: Sequence[int], metrics: LinkMetrics) -> tuple[list[int], str]:
    """Return the ring to use from now on, and the reason to log. `found` may contain peers that are gone."""
    kept = updated_ring(found, present)
    before, after = outlook(present, metrics), outlook(kept, metrics)
    if len(present) < 2:
        return list(present), "alone"
    if not after.is_better(before):
        return list(present), f"the ring stays: {before}; {_listed(present)}"
    return kept, f"the ring changes: {after}; before: {before}; {_listed(present)} becomes {_listed(kept)}"


def _listed(ring: Sequence[int]) -> str:
    if len(ring) <= LISTED_MAX:
        return str(list(ring))
    return f"[{', '.join(map(str, ring[:LISTED_MAX]))} and {len(ring) - LISTED_MAX} more]"


class RingChange:
    def __init__(self, state: RunState) -> None:
        self._state = state
        self._course: Optimization | None = None

    @property
    def is_under_way(self) -> bool:
        return self._course is not None

    def forget_all(self) -> None:
        self._course = None

    def step(self) -> bool | None:
        """Take the next step. Return None if it must wait for answers, True if the call has ended, else False."""
        state, course = self._state, self._course
        rings = {group.number: group.ring for group in state.groups.values()}
        if course is None:
            self._course = Optimization(state.link_metrics, rings, state.view, state.now)
            return False
        if course.is_waiting:
            return None
        if course.is_decided:
            self._course = None
            return True
        if course.rings is not None:
            self._decide(course, course.rings)
            return False
        number = state.number()
        asked = course.next_round(number, state.now)
        for peer, links in asked.items():
            told = [(receiver, False) if sender == peer else (sender, True) for sender, receiver in links]
            state.send_to(peer, m.Probe(number, told))
        if not asked:
            problems = course.search(number, rings)
            state.outbox.append(FindRings(number, {at: self._with_linkless(at, each) for at, each in problems.items()}))
        return False

    def _with_linkless(self, group: int, problem: RingProblem) -> RingProblem:
        pairs = _kept_apart(self._state.groups[group])
        return replace(problem, unreachable=problem.unreachable | pairs | {(high, low) for low, high in pairs})

    def _decide(self, course: Optimization, rings: Mapping[int, Sequence[int]]) -> None:
        state = self._state
        course.is_decided = True
        seconds = state.now - course.begun_at
        cost = f"{course.measured} links measured, {course.failed} failed, {seconds:.1f} s"
        for group in state.groups.values():
            found = rings.get(group.number, group.ring)
            if topology.ring_pairs(found) & _kept_apart(group):
                found = group.ring
            ring, group.decision = decide(group.ring, found, state.link_metrics)
            state.log("info", f"group {group.number}: {group.decision}; {cost}", {"group": group.number})
            limit = direct_limit(ring, state.link_metrics)
            if ring != group.ring or (group.is_meshed and is_outdated(group.direct_limit, limit, len(ring))):
                state.stop(group)
                group.ring = ring

    def probed(self, member: Member, message: m.Probes) -> None:
        course = self._course
        if course is None or not course.is_asked(message.probe, member.peer):
            return
        found = {link.link_of(member.peer): (link.bytes_per_s, link.round_trip_us / 1e6) for link in message.found}
        self._log_unmeasured(course.answered(member.peer, found, self._state.now))

    def found(self, search: int, rings: Mapping[int, Sequence[int]]) -> bool:
        course = self._course
        if course is None or not course.is_searching or course.number != search:
            return False
        course.is_searching, course.rings = False, rings
        return True

    def expire(self) -> None:
        if self._course is not None:
            self._log_unmeasured(self._course.expire(self._state.now))

    def _log_unmeasured(self, links: list[tuple[int, int]]) -> None:
        for sender, receiver in links:
            self._state.log("warning", f"the link {sender}->{receiver} could not be measured")

    def deadlines(self) -> list[float]:
        ends_at = self._course.deadline() if self._course is not None else None
        return [ends_at] if ends_at is not None else []

    def forget(self, peer: int) -> None:
        if self._course is not None:
            self._course.lost(peer)


def _kept_apart(group: Group) -> set[Pair]:
    return group.linkless - topology.ring_pairs(group.ring)
