"""Evidence: what the peers of a group have reported, in rounds.

A round is a stretch of time for which there are two reports of every peer. It is measured by each peer's own clock, so
that a report that comes late tells nothing wrong. There are two series of rounds: those of ops end with an op, however
long that takes, and those of links go by time.

A new epoch begins with nothing: links are new, and newcomers have to find their pace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from pccl.protocol.diagnosis.lateness import Lateness, OpRound
from pccl.protocol.messages import LinkReport, Report

ROUND_S_MIN = 0.45
"""Least length of a round. Peers of small runs report a little less often."""
ROUNDS_KEPT = 8
OUTLASTED = 3.0
"""Where an op has been in flight for so many times as long as it took others to end, a thread waits in it while others
go on. All of that peer's time is time in ops then, which tells nothing of who is late."""
LOAD_FACTOR = 1.5
"""Ways whose payload differs by more than this do not have the same to do."""
FRESH_S = 2.0
"""Age up to which a report tells how things are now, in small runs."""

Direction = tuple[int, int]
"""The sender and the receiver."""


@dataclass(frozen=True)
class Sample:
    """One report of a peer."""

    heard_at: float
    own_s: float
    """The peer's own time."""
    ops: int
    """Number of ops of the epoch that have ended, and of those that were committed."""
    committed: int
    in_ops_s: float
    op_wait_s: float
    late_s: float
    links: Mapping[int, LinkReport]


@dataclass(frozen=True)
class LinkRound:
    """What a direction of a link that carries payload has done in a round."""

    seconds: float
    busy: float
    """Share of the time for which something was under way."""
    receiver: float
    """Share of the time for which the other end did not read."""
    full_ms: int
    delivered: int
    resent: int
    tx_bytes: int
    lying_byte_s: int
    """Bytes that were under way, summed up over seconds."""
    stuck_ms: int
    """Time for which nothing had been acknowledged at its end."""
    round_trip_ms: float
    least_round_trip_ms: float
    """The shortest that was seen in this epoch."""


@dataclass
class GroupEvidence:
    """Evidence of one group in one epoch."""

    ring: tuple[int, ...]
    epoch: int
    begun_at: float
    samples: dict[int, deque[Sample]] = field(default_factory=dict)
    """The last reports of each peer, the newest last."""
    lateness: Lateness = field(default_factory=Lateness)
    link_rounds: deque[Mapping[Direction, LinkRound]] = field(default_factory=lambda: deque(maxlen=ROUNDS_KEPT))
    late_rounds: deque[Mapping[int, float]] = field(default_factory=lambda: deque(maxlen=ROUNDS_KEPT))
    """Shares of the time of a round of links by which the engine of each peer came too late."""
    longest_wait_s: float = 0.0
    """The longest wait in an op that came to an end by itself."""
    _members: frozenset[int] = field(init=False)
    _op_edge: dict[int, Sample] = field(default_factory=dict)
    _link_edge: dict[int, Sample] = field(default_factory=dict)
    _least_ms: dict[Direction, float] = field(default_factory=dict)
    _sent: deque[Mapping[Direction, int]] = field(default_factory=lambda: deque(maxlen=ROUNDS_KEPT))
    """Payload that each way had carried by the ends of the last rounds of ops, the newest last."""

    def __post_init__(self) -> None:
        self._members = frozenset(self.ring)

    def reported(self, peer: int, report: Report, now: float) -> None:
        """Take in a report. What it says of links to others than the group's peers does not count."""
        if peer not in self._members:
            return
        committed, aborted = next((counts for epoch, *counts in report.ops if epoch == self.epoch), (0, 0))
        links = {link.peer: link for link in report.links if link.peer in self._members}
        wait_s = report.op_wait_ms / 1e3
        sample = Sample(
            now,
            report.at_ms / 1e3,
            committed + aborted,
            committed,
            report.in_ops_ms / 1e3,
            wait_s,
            report.late_ms / 1e3,
            links,
        )
        known = self.samples.setdefault(peer, deque(maxlen=ROUNDS_KEPT))
        is_committed = bool(known) and committed > known[-1].committed
        if is_committed and known[-1].op_wait_s > wait_s and self.begun_at < now - FRESH_S:
            self.longest_wait_s = max(self.longest_wait_s, known[-1].op_wait_s)
        for other, link in links.items():
            if link.round_trip_us:
                way = peer, other
                self._least_ms[way] = min(self._least_ms.get(way, float("inf")), link.round_trip_us / 1e3)
        known.append(sample)

    def last(self, peer: int) -> Sample | None:
        known = self.samples.get(peer)
        return known[-1] if known else None

    def carried(self, way: Direction) -> int:
        """Return how much payload a way has carried in the last rounds of ops, each of which has its share of both
        directions, however long an op takes."""
        sample = self.last(way[0])
        link = sample.links.get(way[1]) if sample is not None else None
        if link is None or not self._sent:
            return 0
        return max(0, link.tx_bytes - self._sent[0].get(way, 0))

    def is_paced(self, way: Direction) -> bool:
        """Whether the sender takes in about as much as it sends on a way, so that the ways to it set its pace."""
        taken_in = sum(self.carried((peer, way[0])) for peer in self.ring)
        return self.carried(way) <= LOAD_FACTOR * taken_in

    def is_comparable(self, way: Direction, other: Direction) -> bool:
        """Whether a way has about as much to do as another one, and what lies on it can be held against it."""
        less, more = sorted((self.carried(way), self.carried(other)))
        return more <= LOAD_FACTOR * less and (self.is_paced(way) or not self.is_paced(other))

    @property
    def ops(self) -> int:
        """Number of ops of this epoch that all peers have ended."""
        return min((sample.ops if (sample := self.last(peer)) else 0 for peer in self.ring), default=0)

    def advance(self, now: float) -> None:
        """End the rounds that can be ended."""
        last = {peer: sample for peer in self.ring if (sample := self.last(peer)) is not None}
        if len(last) < len(self.ring):
            return
        if not self._op_edge:
            self._op_edge = self._link_edge = last
            self._sent.append(_sent_by(last))
            return
        if self._has_passed(self._op_edge, last) and (ended := self._op_round(last, now)).ops > 0:
            oldest_s = max(sample.op_wait_s for sample in last.values())
            if oldest_s < OUTLASTED * ended.seconds:
                self.lateness.add(ended)
            self._op_edge = last
            self._sent.append(_sent_by(last))
        if self._has_passed(self._link_edge, last):
            self.link_rounds.append(self._link_round(last))
            self.late_rounds.append(
                {
                    peer: min(1.0, max(0.0, last[peer].late_s - edge.late_s) / (last[peer].own_s - edge.own_s))
                    for peer, edge in self._link_edge.items()
                }
            )
            self._link_edge = last

    @staticmethod
    def _has_passed(edge: Mapping[int, Sample], last: Mapping[int, Sample]) -> bool:
        return all(last[peer].own_s - edge[peer].own_s >= ROUND_S_MIN for peer in last)

    def _op_round(self, last: Mapping[int, Sample], now: float) -> OpRound:
        spans = {peer: last[peer].own_s - self._op_edge[peer].own_s for peer in last}
        shares = {
            peer: min(1.0, max(0.0, last[peer].in_ops_s - self._op_edge[peer].in_ops_s) / spans[peer]) for peer in last
        }
        ops = min(last[peer].ops - self._op_edge[peer].ops for peer in last)
        return OpRound(now, min(spans.values()), max(0, ops), shares)

    def _link_round(self, last: Mapping[int, Sample]) -> dict[Direction, LinkRound]:
        found: dict[Direction, LinkRound] = {}
        for peer, sample in last.items():
            before = self._link_edge[peer]
            span = sample.own_s - before.own_s
            for other, link in sample.links.items():
                known = before.links.get(other)
                if known is None or not known.tx_bytes or link.delivered < known.delivered:
                    continue
                found[peer, other] = LinkRound(
                    span,
                    min(1.0, max(0, link.busy_ms - known.busy_ms) / 1e3 / span),
                    min(1.0, max(0, link.receiver_ms - known.receiver_ms) / 1e3 / span),
                    max(0, link.full_ms - known.full_ms),
                    link.delivered - known.delivered,
                    max(0, link.resent - known.resent),
                    max(0, link.tx_bytes - known.tx_bytes),
                    max(0, link.lying_byte_s - known.lying_byte_s),
                    link.stuck_ms,
                    link.round_trip_us / 1e3,
                    self._least_ms.get((peer, other), 0.0),
                )
        return found


def total(rounds: Collection[LinkRound]) -> LinkRound:
    """Return several rounds of one direction as one."""
    seconds = sum(each.seconds for each in rounds)
    return LinkRound(
        seconds,
        sum(each.busy * each.seconds for each in rounds) / seconds,
        sum(each.receiver * each.seconds for each in rounds) / seconds,
        sum(each.full_ms for each in rounds),
        sum(each.delivered for each in rounds),
        sum(each.resent for each in rounds),
        sum(each.tx_bytes for each in rounds),
        sum(each.lying_byte_s for each in rounds),
        max(each.stuck_ms for each in rounds),
        max(each.round_trip_ms for each in rounds),
        min(each.least_round_trip_ms for each in rounds),
    )


def _sent_by(last: Mapping[int, Sample]) -> dict[Direction, int]:
    return {(peer, other): link.tx_bytes for peer, sample in last.items() for other, link in sample.links.items()}
