"""Counts what a session does, and says when there is something to tell the master of it.

A report goes out REPORT_S after the last one if anything has changed since, and REPEATS more times when nothing does
any longer, so that rates fall back to 0; and one goes out as soon as it is known what a path carries. In large runs
peers report less often: the master hears REPORTS_PER_S_MAX in all. From the same reports it tells who is slow or stuck
(`protocol.diagnosis`), which decides how often they come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from pccl.protocol.messages import LinkReport, PathTrial, Report
from pccl.runtime.data_plane.events import LinkCounters

REPORT_S = 0.5
"""Time between two reports. The diagnosis names who is slow after a few of them. With 16 peers that reduce five times a
second, they and their master on two busy cores, a master needs 2.9 % of a core and a peer 1.34 %, or 0.33 % when it
rests; at 2 s it is 2.0, 1.11 and 0.17 %, and at 1 s 2.4, 1.26 and 0.25 %."""
STUCK_MS = 700
WAITED_S = 1.5
"""Seconds without the end of an op after which the paths to those are tried for whom it waits."""
REPORTS_PER_S_MAX = 250
EPOCHS_REPORTED = 4
REPEATS = 10
"""Number of reports that say the same before there are no more: two stretches over which the master takes a rate end
meanwhile, of which the second is of nothing else."""


def interval_s(peers: int) -> float:
    """Return the time between two reports of each peer of a run."""
    return max(REPORT_S, peers / REPORTS_PER_S_MAX)


@dataclass(frozen=True)
class LinkWait:
    """What the oldest ops wait for from a peer: numbers of ops, and the time for which it has acknowledged nothing."""

    unheard_ops: int
    inbound_ops: int
    undone_ops: int
    stuck_ms: int


@dataclass
class _Link:
    peer: int
    threads: dict[int, LinkCounters] = field(default_factory=dict)
    trial: int = PathTrial.NONE
    is_tried: bool = False
    """Whether its path is being tried, or was since it has been stuck or waited for."""

    @property
    def is_waited_for(self) -> bool:
        """Whether ops wait for something from the peer."""
        return any(each.unheard_ops or each.inbound_ops or each.undone_ops for each in list(self.threads.values()))

    @property
    def stuck_ms(self) -> int:
        return max((thread.stuck_ms for thread in list(self.threads.values())), default=0)

    @property
    def is_used(self) -> bool:
        """Whether payload has gone over it, either way: who broadcasts hears nothing else of those who only receive."""
        return any(each.tx_bytes or each.rx_bytes for each in list(self.threads.values()))

    def wait(self) -> LinkWait:
        threads = list(self.threads.values())
        return LinkWait(
            sum(thread.unheard_ops for thread in threads),
            sum(thread.inbound_ops for thread in threads),
            sum(thread.undone_ops for thread in threads),
            self.stuck_ms,
        )

    def report(self) -> LinkReport:
        threads = self.threads.values()
        return LinkReport(
            self.peer,
            sum(thread.tx_bytes for thread in threads),
            max((thread.full_ms for thread in threads), default=0),
            sum(thread.full_bytes for thread in threads),
            max((thread.busy_ms for thread in threads), default=0),
            max((thread.receiver_ms for thread in threads), default=0),
            self.stuck_ms,
            sum(thread.delivered for thread in threads),
            sum(thread.resent for thread in threads),
            sum(thread.received for thread in threads),
            max((thread.round_trip_us for thread in threads), default=0),
            self.trial,
            sum(thread.lying_byte_s for thread in threads),
        )


class WorkCounters:
    """Counts of what a session has done."""

    def __init__(self) -> None:
        self._ops: dict[int, list[int]] = {}
        """Numbers of committed and aborted ops by epoch."""
        self._state_rx_bytes = 0
        self._reconnects = 0
        self._in_ops_us = 0
        self._links: dict[int, _Link] = {}
        self._term = 0
        self._last_report: Report | None = None
        self._repeats = 0
        """Number of reports since the last that was new."""

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

    def waits(self) -> dict[int, LinkWait]:
        """Return what ops wait for from each peer with a link, as last counted. Any thread."""
        return {link.peer: link.wait() for link in list(self._links.values())}

    def to_try(self, group_wait_s: float) -> list[int]:
        """Return the links whose path is to be tried: nothing has been acknowledged on them for STUCK_MS, or ops wait
        for the peer, and no op of the group has ended for WAITED_S: its process may stand still, or its machine be
        down, and who has sent it nothing cannot tell these apart. `group_wait_s` says for how long none has ended."""
        found = []
        for number, link in self._links.items():
            if link.stuck_ms < STUCK_MS and not (group_wait_s >= WAITED_S and link.is_waited_for):
                link.is_tried, link.trial = False, PathTrial.NONE
            elif not link.is_tried:
                found.append(number)
        return found

    def path_tried(self, link: int, trial: int) -> bool:
        """Note that the path of a link is being tried, or what was found. Return whether there is such a link."""
        found = self._links.get(link)
        if found is not None:
            found.is_tried, found.trial = True, trial
        return found is not None

    def link_closed(self, link: int) -> None:
        self._links.pop(link, None)

    def report(self, stats: Mapping[str, int], term: int = 1, now: float = 0.0) -> Report | None:
        """Return what there is to tell the master of this term, with the engine's counters. None: nothing new."""
        self._in_ops_us = max(self._in_ops_us, stats["in_ops_us"])
        if term != self._term:
            self._term = term
            self._last_report = None
        used = [link for link in self._links.values() if link.is_used]
        made = Report(
            ops=[(epoch, committed, aborted) for epoch, (committed, aborted) in sorted(self._ops.items())],
            tx_bytes=stats["tx_payload_bytes"],
            rx_bytes=stats["rx_payload_bytes"],
            state_rx_bytes=self._state_rx_bytes,
            reconnects=self._reconnects,
            links=sorted((link.report() for link in used), key=lambda link: link.peer),
            in_ops_ms=self._in_ops_us // 1000,
            op_wait_ms=stats["op_wait_us"] // 1000,
            late_ms=stats["late_ms"],
        )
        self._repeats = self._repeats + 1 if made == self._last_report else 0
        if self._repeats > REPEATS:
            return None
        self._last_report = made
        return msgspec.structs.replace(made, at_ms=round(now * 1000))
