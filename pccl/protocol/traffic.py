"""Traffic: what peers report of what they have done, added up to ops, bytes and connections of the whole run.

The master sees no payload, and need not be asked for every op, so both are counted where they happen. Each peer tells
every few seconds what its session has done since it began (`messages.Report`), and the master takes differences. A
report that never comes, because its peer was killed, costs the numbers of a few seconds and nothing else.

    1  Ops are told by epoch. All peers that live into the next epoch saw the same verdicts in this one. So the highest
       count that any of them tells is the group's, whichever of them tells it first, and no op is counted twice.
    2  Nothing is made up. The first report of a peer is what its later ones are compared with: a master that takes over
       a run counts from there on, and not what the last master has counted already.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from pccl.protocol.history import History
from pccl.protocol.messages import LinkReport, Report
from pccl.protocol.status import LinkTraffic, PeerTraffic, Totals

RATED_OVER_S = 1.9
"""Least time over which a rate is taken."""
EPOCHS_KEPT = 8
"""Number of epochs of each group that are kept. Reports of the last ones may still be on their way."""


@dataclass
class _Reported:
    """The last report of a peer, and its traffic so far."""

    group: int
    report: Report
    at: float
    traffic: PeerTraffic = field(default_factory=PeerTraffic)
    basis: Report | None = None
    """The report with which the next rates begin; None: `report`."""
    basis_at: float = 0.0


class Traffic:
    """The counts of one run. It tells a `History` what reports say. All moments are the master's `now`."""

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
            rates = {link.peer: link.tx_bytes_per_s for link in last.traffic.links}
            links = [LinkTraffic(link.peer, link.tx_bytes, rates.get(link.peer, 0.0)) for link in _used(report)]
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
                # Nobody else has told of it: it was before our time, or is too old to be told apart from that.
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
    known = {link.peer: link for link in before.links} if before is not None else {}

    def traffic(link: LinkReport) -> LinkTraffic:
        sent = max(0, link.tx_bytes - known[link.peer].tx_bytes) if link.peer in known else 0
        return LinkTraffic(link.peer, link.tx_bytes, sent / over_s if sent else 0.0)

    return [traffic(link) for link in _used(report)]


def _used(report: Report) -> list[LinkReport]:
    """Return the links over which the peer has sent something."""
    return [link for link in report.links if link.tx_bytes]
