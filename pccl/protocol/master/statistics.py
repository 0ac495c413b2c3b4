"""What has happened in a run, in bounded memory: totals, recent minutes, losses and log lines; traffic and throughput.

Each peer reports its session's totals every few seconds (`messages.Report`), and the master adds the differences:

    1  Ops are counted per epoch. The highest count of any peer is the group's, so no op counts twice.
    2  The first report of a peer is the base of its later ones; a new master counts from there.

Throughput counts only time when a link limited the ops: for half a second all its connections had more to send than
TCP accepted, and no other link of the peer did, as BBR ignores application-limited samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import add, sub

import msgspec

from pccl.protocol.messages import LinkReport, Report
from pccl.protocol.status import Course, Event, LinkTraffic, Loss, PeerTraffic, Totals

STEP_S = 2.0
STEPS_MAX = 300
LOSSES_MAX = 50
EVENTS_MAX = 200
TEXT_CHARACTERS_MAX = 300


class History:
    def __init__(self) -> None:
        self.totals = Totals()
        self._steps: dict[int, Totals] = {}
        self._losses: deque[tuple[float, Loss]] = deque(maxlen=LOSSES_MAX)
        self._events: deque[tuple[float, str, str]] = deque(maxlen=EVENTS_MAX)

    def happened(self, since: float, now: float, more: Totals) -> None:
        """Note what happened at some time between two moments: at an even rate, as far as the steps go."""
        last = int(now // STEP_S)
        first = max(int(since // STEP_S), last - STEPS_MAX + 1)
        left = more
        for number in range(first, last):
            share = _fraction(left, (number + 1) * STEP_S - max(since, number * STEP_S), now - since)
            self._add(number, share)
            left, since = _minus(left, share), (number + 1) * STEP_S
        self._add(last, left)
        self.totals = _sum(self.totals, more)

    def joined(self, now: float) -> None:
        self._count(now, Totals(joins=1))

    def left(self, now: float) -> None:
        self._count(now, Totals(leaves=1))

    def lost(self, now: float, peer: int, name: str, group: int, reason: str) -> None:
        self._count(now, Totals(losses=1))
        self._losses.append((now, Loss(0.0, peer, name, group, _short(reason))))

    def logged(self, now: float, level: str, text: str) -> None:
        self._events.append((now, level, _short(text)))

    def course(self, now: float) -> Course:
        current = int(now // STEP_S)
        first = max(min(self._steps, default=current), current - STEPS_MAX + 1)
        return Course(STEP_S, [self._steps.get(number, NOTHING) for number in range(first, current + 1)])

    def losses(self, now: float) -> list[Loss]:
        return [msgspec.structs.replace(loss, age_s=now - at) for at, loss in self._losses]

    def events(self, now: float) -> list[Event]:
        return [Event(now - at, level, text) for at, level, text in self._events]

    def _count(self, now: float, more: Totals) -> None:
        self.totals = _sum(self.totals, more)
        self._add(int(now // STEP_S), more)

    def _add(self, number: int, more: Totals) -> None:
        if more == NOTHING:
            return
        self._steps[number] = _sum(self._steps.get(number, NOTHING), more)
        if len(self._steps) > STEPS_MAX:
            del self._steps[min(self._steps)]


NOTHING = Totals()


def _sum(a: Totals, b: Totals) -> Totals:
    return Totals(*map(add, msgspec.structs.astuple(a), msgspec.structs.astuple(b)))


def _minus(a: Totals, b: Totals) -> Totals:
    return Totals(*map(sub, msgspec.structs.astuple(a), msgspec.structs.astuple(b)))


def _fraction(of: Totals, part_s: float, whole_s: float) -> Totals:
    share = min(1.0, max(0.0, part_s / whole_s)) if whole_s > 0 else 0.0
    return Totals(*(int(share * count) for count in msgspec.structs.astuple(of)))


def _short(text: str) -> str:
    text = text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[:TEXT_CHARACTERS_MAX]}..."
    return text if text.isprintable() else text.encode("unicode_escape").decode()


RATED_OVER_S = 1.9
"""Least time over which a rate is taken."""
EPOCHS_KEPT = 8
"""Number of epochs of each group that are kept. Reports of the last ones may still be on their way."""


@dataclass
class _Reported:
    group: int
    report: Report
    at: float
    traffic: PeerTraffic = field(default_factory=PeerTraffic)
    basis: Report | None = None
    basis_at: float = 0.0


class Traffic:
    """The counts of one run. It tells a `History` what reports say. All moments are the master's `now`."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._peers: dict[int, _Reported] = {}
        self._ops: dict[int, dict[int, tuple[int, int]]] = {}

    def reported(self, peer: int, group: int, report: Report, now: float) -> None:
        last = self._peers.get(peer)
        if last is None:
            self._peers[peer] = _Reported(group, report, now, PeerTraffic(links=_links(report, None, 0.0)))
            self._count_ops(group, report, is_first=True)
            return
        committed, aborted = self._count_ops(group, report, is_first=False)
        before = last.report
        tx_bytes = max(0, report.tx_bytes - before.tx_bytes)
        rx_bytes = max(0, report.rx_bytes - before.rx_bytes)
        more = Totals(
            ops_committed=committed,
            ops_aborted=aborted,
            tx_bytes=tx_bytes,
            state_bytes=max(0, report.state_rx_bytes - before.state_rx_bytes),
            reconnects=max(0, report.reconnects - before.reconnects),
        )
        self._history.happened(last.at, now, more)
        basis, basis_at = (before, last.at) if last.basis is None else (last.basis, last.basis_at)
        over_s = now - basis_at
        totals = last.traffic.tx_bytes + tx_bytes, last.traffic.rx_bytes + rx_bytes
        if over_s < RATED_OVER_S:
            known = {link.peer: link for link in last.traffic.links}
            links = [_figures(link, known.get(link.peer, LinkTraffic(link.peer, 0, 0.0))) for link in _used(report)]
            traffic = msgspec.structs.replace(last.traffic, tx_bytes=totals[0], rx_bytes=totals[1], links=links)
            self._peers[peer] = _Reported(group, report, now, traffic, basis, basis_at)
            return
        traffic = PeerTraffic(
            *totals,
            max(0, report.tx_bytes - basis.tx_bytes) / over_s,
            max(0, report.rx_bytes - basis.rx_bytes) / over_s,
            _links(report, basis, over_s),
        )
        self._peers[peer] = _Reported(group, report, now, traffic)

    def forget(self, peer: int) -> None:
        gone = self._peers.pop(peer, None)
        if gone is not None and all(each.group != gone.group for each in self._peers.values()):
            del self._ops[gone.group]

    def of(self, peer: int) -> PeerTraffic:
        found = self._peers.get(peer)
        return found.traffic if found is not None else NO_TRAFFIC

    def _count_ops(self, group: int, report: Report, is_first: bool) -> tuple[int, int]:
        epochs = self._ops.setdefault(group, {})
        more_committed = more_aborted = 0
        for epoch, committed, aborted in report.ops:
            if epoch not in epochs and (is_first or epoch < max(epochs, default=0)):
                # No other report of it: it is from before this master, or too old.
                epochs[epoch] = committed, aborted
                continue
            known = epochs.get(epoch, (0, 0))
            epochs[epoch] = max(known[0], committed), max(known[1], aborted)
            more_committed += epochs[epoch][0] - known[0]
            more_aborted += epochs[epoch][1] - known[1]
        for epoch in sorted(epochs)[:-EPOCHS_KEPT]:
            del epochs[epoch]
        return more_committed, more_aborted


NO_TRAFFIC = PeerTraffic()


def _links(report: Report, before: Report | None, over_s: float) -> list[LinkTraffic]:
    known = {link.peer: link for link in before.links} if before is not None else {}
    return [_figures(link, _rates(link, known.get(link.peer), over_s)) for link in _used(report)]


def _rates(link: LinkReport, before: LinkReport | None, over_s: float) -> LinkTraffic:
    if before is None or link.tx_bytes < before.tx_bytes:  # a new link to the same peer
        return LinkTraffic(link.peer, 0, 0.0)
    resent = max(0, link.resent - before.resent)
    sent = resent + max(0, link.delivered - before.delivered)
    return LinkTraffic(
        link.peer,
        0,
        (link.tx_bytes - before.tx_bytes) / over_s,
        resent_share=resent / sent if sent else 0.0,
        sender_limited=_share(link.sender_ms - before.sender_ms, over_s),
        receiver_limited=_share(link.receiver_ms - before.receiver_ms, over_s),
    )


def _figures(link: LinkReport, rates: LinkTraffic) -> LinkTraffic:
    return msgspec.structs.replace(
        rates,
        tx_bytes=link.tx_bytes,
        round_trip_s=link.round_trip_us / 1e6,
        round_trip_s_min=link.round_trip_us_min / 1e6,
        unacked_bytes=link.unacked_bytes,
    )


def _share(ms: int, over_s: float) -> float:
    return min(1.0, max(0.0, ms / 1e3 / over_s))


def _used(report: Report) -> list[LinkReport]:
    return [link for link in report.links if link.tx_bytes]


FULL_MS_MIN = 500


class Throughput:
    def __init__(self) -> None:
        self._used: dict[int, dict[int, tuple[int, int]]] = {}
        """Milliseconds and bytes that are in a metric already, by peer and the peer at the other end."""
        self._inherited: set[int] = set()

    def inherit(self, peers: Iterable[int]) -> None:
        """Take what these peers report first for a time before this master."""
        self._inherited.update(peers)

    def reported(self, peer: int, report: Report) -> list[tuple[int, float]]:
        """Return the links that have a new metric, each as the peer at the other end and bytes per second."""
        if peer in self._inherited:
            self._inherited.discard(peer)
            self._used[peer] = {link.peer: (link.full_ms, link.full_bytes) for link in report.links}
            return []
        used = self._used.setdefault(peer, {})
        found = []
        for link in report.links:
            before_ms, before_bytes = used.get(link.peer, (0, 0))
            if link.full_ms < before_ms or link.full_bytes < before_bytes:
                before_ms = before_bytes = 0  # another link to the same peer
            over_ms, moved_bytes = link.full_ms - before_ms, link.full_bytes - before_bytes
            if over_ms >= FULL_MS_MIN:
                used[link.peer] = link.full_ms, link.full_bytes
                found.append((link.peer, moved_bytes / over_ms * 1e3))
        for gone in used.keys() - {link.peer for link in report.links}:
            del used[gone]
        return found

    def forget(self, peer: int) -> None:
        self._used.pop(peer, None)
        self._inherited.discard(peer)
