"""Counts what a session does, and says when there is something to tell the master of it.

A report goes out REPORT_S after the last one if anything has changed since, and once more when nothing does any longer,
so that rates fall back to 0. In large runs peers report less often: the master hears REPORTS_PER_S_MAX in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pccl.protocol.messages import LinkReport, Report
from pccl.runtime.data_plane.events import LinkCounters

REPORT_S = 2.0
REPORTS_PER_S_MAX = 250
EPOCHS_REPORTED = 4


def interval_s(peers: int) -> float:
    """Return the time between two reports of each peer of a run."""
    return max(REPORT_S, peers / REPORTS_PER_S_MAX)


@dataclass
class _Link:
    peer: int
    threads: dict[int, LinkCounters] = field(default_factory=dict)

    def report(self) -> LinkReport:
        threads = self.threads.values()
        return LinkReport(
            self.peer,
            sum(thread.tx_bytes for thread in threads),
            max((thread.full_ms for thread in threads), default=0),
            sum(thread.full_bytes for thread in threads),
        )


class WorkCounters:
    """Counts of what a session has done."""

    def __init__(self) -> None:
        self._ops: dict[int, list[int]] = {}
        """Numbers of committed and aborted ops by epoch."""
        self._state_rx_bytes = 0
        self._reconnects = 0
        self._links: dict[int, _Link] = {}
        self._term = 0
        self._last_report: Report | None = None
        self._is_quiet = False
        """Whether two reports have said the same."""

    def op_ended(self, epoch: int, is_committed: bool) -> None:
        counts = self._ops.setdefault(epoch, [0, 0])
        counts[0 if is_committed else 1] += 1
        while len(self._ops) > EPOCHS_REPORTED:
            del self._ops[min(self._ops)]

    def state_fetched(self, rx_bytes: int) -> None:
        self._state_rx_bytes += rx_bytes

    def reconnected(self) -> None:
        self._reconnects += 1

    @property
    def links(self) -> list[int]:
        """The links that there are, or that are being made."""
        return list(self._links)

    def link_made(self, link: int, peer: int) -> None:
        self._links[link] = _Link(peer)

    def link_counted(self, counted: LinkCounters) -> None:
        if counted.link in self._links:
            self._links[counted.link].threads[counted.thread] = counted

    def link_closed(self, link: int) -> None:
        self._links.pop(link, None)

    def report(self, stats: Mapping[str, int], term: int = 1) -> Report | None:
        """Return what there is to tell the master of this term, with the engine's counters. None: nothing new."""
        if term != self._term:
            self._term = term
            self._last_report = None
        links = sorted((link.report() for link in self._links.values()), key=lambda link: link.peer)
        made = Report(
            ops=[(epoch, committed, aborted) for epoch, (committed, aborted) in sorted(self._ops.items())],
            tx_bytes=stats["tx_payload_bytes"],
            rx_bytes=stats["rx_payload_bytes"],
            state_rx_bytes=self._state_rx_bytes,
            reconnects=self._reconnects,
            links=[link for link in links if link.tx_bytes],
        )
        is_same = made == self._last_report
        if is_same and self._is_quiet:
            return None
        self._is_quiet = is_same
        self._last_report = made
        return made
