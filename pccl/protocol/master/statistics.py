"""A run's traffic, and its history in bounded memory: totals, the last minutes, losses and log lines.

Each peer reports its session's totals every few seconds (`messages.Report`), and the master adds the differences:

    1  Ops are counted per epoch. A group's count is the highest that any peer reports, so no op counts twice.
    2  A peer's first report is the baseline for its later ones, so a new master counts only from then on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import isfinite
from operator import add

import msgspec

from pccl.protocol.codec import harmless
from pccl.protocol.messages import LinkReport, Report
from pccl.protocol.names import is_name
from pccl.protocol.status import Course, Event, LinkTraffic, Loss, PeerTraffic, Totals

STEP_S = 2.0
STEPS_MAX = 300
HOUR_STEP_S = 20.0
HOUR_STEPS_MAX = 180
LOSSES_MAX = 50
EVENTS_MAX = 200
TEXT_CHARACTERS_MAX = 300


class History:
    def __init__(self) -> None:
        self.totals = Totals()
        self._steps = _Steps(STEP_S, STEPS_MAX)
        self._hour = _Steps(HOUR_STEP_S, HOUR_STEPS_MAX)
        self._losses: deque[tuple[float, Loss]] = deque(maxlen=LOSSES_MAX)
        self._events: deque[tuple[float, str, str]] = deque(maxlen=EVENTS_MAX)

    def happened(self, now: float, more: Totals) -> None:
        self.totals = _sum(self.totals, more)
        self._steps.add(now, more)
        self._hour.add(now, more)

    def reported(self, now: float, loss: float) -> None:
        """Add the `loss` figure of a peer's report."""
        if isfinite(loss):
            self._steps.add_loss(now, loss)
            self._hour.add_loss(now, loss)

    def lost(self, now: float, peer: int, name: str, group: int, reason: str) -> None:
        self.happened(now, Totals(losses=1))
        self._losses.append((now, Loss(0.0, peer, name, group, harmless(reason, TEXT_CHARACTERS_MAX))))

    def logged(self, now: float, level: str, text: str) -> None:
        self._events.append((now, level, harmless(text, TEXT_CHARACTERS_MAX)))

    def course(self, now: float) -> Course:
        return self._steps.course(now)

    def hour(self, now: float) -> Course:
        return self._hour.course(now)

    def losses(self, now: float) -> list[Loss]:
        return [msgspec.structs.replace(loss, age_s=now - at) for at, loss in self._losses]

    def events(self, now: float) -> list[Event]:
        return [Event(now - at, level, text) for at, level, text in self._events]


class _Steps:
    """Totals and losses per time step, for the last `steps_max` steps."""

    def __init__(self, step_s: float, steps_max: int) -> None:
        self._step_s = step_s
        self._max = steps_max
        self._steps: dict[int, Totals] = {}
        self._losses: dict[int, tuple[float, int]] = {}
        """The sum and the number of the reported losses."""

    def add(self, now: float, more: Totals) -> None:
        number = int(now // self._step_s)
        self._steps[number] = _sum(self._steps.get(number, NOTHING), more)
        if len(self._steps) > self._max:
            del self._steps[min(self._steps)]

    def add_loss(self, now: float, loss: float) -> None:
        number = int(now // self._step_s)
        total, count = self._losses.get(number, (0.0, 0))
        self._losses[number] = total + loss, count + 1
        if len(self._losses) > self._max:
            del self._losses[min(self._losses)]

    def course(self, now: float) -> Course:
        current = int(now // self._step_s)
        first = max(min([*self._steps, *self._losses], default=current), current - self._max + 1)
        steps = range(first, current + 1)
        losses = [self._losses.get(number, (0.0, 0)) for number in steps] if self._losses else []
        return Course(
            self._step_s,
            [self._steps.get(number, NOTHING) for number in steps],
            [total / count if count else None for total, count in losses],
        )


NOTHING = Totals()


def _sum(a: Totals, b: Totals) -> Totals:
    return Totals(*map(add, msgspec.structs.astuple(a), msgspec.structs.astuple(b)))


RATED_OVER_S = 1.9
"""Shortest time over which a rate is computed."""
EPOCHS_KEPT = 8
"""Number of epochs kept for each group, because reports for the most recent ones may still be in transit."""


@dataclass
class _Reported:
    group: int
    report: Report
    at: float
    traffic: PeerTraffic = field(default_factory=PeerTraffic)
    basis: Report | None = None
    basis_at: float = 0.0


class Traffic:
    """The traffic of one run. Adds the contents of reports to a `History`. All times are the master's `now`."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._peers: dict[int, _Reported] = {}
        self._ops: dict[int, dict[int, tuple[int, int]]] = {}

    def reported(self, peer: int, group: int, report: Report, now: float) -> None:
        for name, value in report.figures:
            if name == "loss":
                self._history.reported(now, value)
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
        if more != NOTHING:
            self._history.happened(now, more)
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
            _share(report.in_ops_ms - basis.in_ops_ms, max(1, report.at_ms - basis.at_ms) / 1e3),
        )
        self._peers[peer] = _Reported(group, report, now, traffic)

    def forget(self, peer: int) -> None:
        gone = self._peers.pop(peer, None)
        if gone is not None and all(each.group != gone.group for each in self._peers.values()):
            del self._ops[gone.group]

    def of(self, peer: int) -> PeerTraffic:
        found = self._peers.get(peer)
        return found.traffic if found is not None else NO_TRAFFIC

    def figures(self, peer: int) -> dict[str, float]:
        found = self._peers.get(peer)
        return {} if found is None else {name: each for name, each in found.report.figures if is_name(name)}

    def _count_ops(self, group: int, report: Report, is_first: bool) -> tuple[int, int]:
        epochs = self._ops.setdefault(group, {})
        more_committed = more_aborted = 0
        for epoch, committed, aborted in report.ops:
            if epoch not in epochs and (is_first or epoch < max(epochs, default=0)):
                # No peer has reported this epoch: it began before this master or is too old.
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
        is_udp=link.is_udp,
    )


def _share(ms: int, over_s: float) -> float:
    return min(1.0, max(0.0, ms / 1e3 / over_s))


def _used(report: Report) -> list[LinkReport]:
    return [link for link in report.links if link.tx_bytes]
