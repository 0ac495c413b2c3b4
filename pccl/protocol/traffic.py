"""Traffic: what peers report of their ops and links, added up for the status of the run.

Each peer counts its own ops, bytes and reconnects and reports the totals every few seconds (`messages.Report`); the
master takes differences. A report that never comes, because its peer was killed, loses the counts of a few seconds.

    1  Ops are counted by epoch. All peers that live into the next epoch saw the same verdicts in this one, so the
       highest count that any of them reports is the group's, and no op is counted twice.
    2  The first report of a peer is only compared with later ones: a master that takes over a run does not count again
       what the last master has counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from pccl.protocol.history import History
from pccl.protocol.messages import LinkReport, Report
from pccl.protocol.status import LinkTraffic, PeerTraffic, Totals

RATED_OVER_S = 1.9
"""Least time over which a rate is taken."""
EPOCHS_KEPT = 8
"""Number of epochs of each group that are kept for late reports."""
FULL_MS_MIN = 500
"""Milliseconds as the limit of the ops that make a measurement of a link."""


@dataclass
class _Reported:
    """The last report of a peer, and its traffic."""

    group: int
    report: Report
    at: float
    traffic: PeerTraffic = field(default_factory=PeerTraffic)
    basis: Report | None = None
    """The report at the beginning of the next rates; None: `report`."""
    basis_at: float = 0.0


class Traffic:
    """The counts of one run. All moments are the master's `now`."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._peers: dict[int, _Reported] = {}
        self._ops: dict[int, dict[int, tuple[int, int]]] = {}
        """Numbers of ops committed and aborted, by group and epoch."""

    def reported(self, peer: int, group: int, report: Report, now: float) -> None:
        """Take in the report of a peer."""
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
        """Forget a peer that is gone, and its group if it was the last one."""
        gone = self._peers.pop(peer, None)
        if gone is not None and all(each.group != gone.group for each in self._peers.values()):
            del self._ops[gone.group]

    def of(self, peer: int) -> PeerTraffic:
        """Return the traffic of a peer since its first report."""
        found = self._peers.get(peer)
        return found.traffic if found is not None else NOTHING

    def _count_ops(self, group: int, report: Report, is_first: bool) -> tuple[int, int]:
        """Return how many more ops were committed and aborted than was known."""
        epochs = self._ops.setdefault(group, {})
        more_committed = more_aborted = 0
        for epoch, committed, aborted in report.ops:
            if epoch not in epochs and (is_first or epoch < max(epochs, default=0)):
                # Counted by an earlier master, or too old to be told apart from that.
                epochs[epoch] = committed, aborted
                continue
            known = epochs.get(epoch, (0, 0))
            epochs[epoch] = max(known[0], committed), max(known[1], aborted)
            more_committed += epochs[epoch][0] - known[0]
            more_aborted += epochs[epoch][1] - known[1]
        for epoch in sorted(epochs)[:-EPOCHS_KEPT]:
            del epochs[epoch]
        return more_committed, more_aborted


NOTHING = PeerTraffic()


def _links(report: Report, before: Report | None, over_s: float) -> list[LinkTraffic]:
    """Return the figures of each direction, with rates and shares since the report `before`."""
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
    """Return the rates with the counts and gauges of a report."""
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
    """Return the links over which the peer has sent payload."""
    return [link for link in report.links if link.tx_bytes]


class Throughput:
    """Measurements of links by the ops themselves.

    What a link carries says little of what it could carry: a ring waits for its slowest link, and small ops wait for
    answers. So time counts only while the link limited the ops: for half a second, at each look of the engine, all
    its connections had more to send than TCP let them, and no other link of the peer had.
    """

    def __init__(self) -> None:
        self._used: dict[int, dict[int, tuple[int, int]]] = {}
        """Milliseconds and bytes that are in a measurement already, by peer and the peer at the other end."""
        self._inherited: set[int] = set()

    def inherit(self, peers: Iterable[int]) -> None:
        """Take the first reports of these peers for a time before this master."""
        self._inherited.update(peers)

    def reported(self, peer: int, report: Report) -> list[tuple[int, float]]:
        """Return new measurements: the peer at the other end, and bytes per second."""
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
