"""Counts a session's work and creates its reports to the master.

A report is sent REPORT_S after the last one if a count has changed, and then REPEATS more times without a change, so
that rates fall to 0. In large runs peers report less often, so that the master receives REPORTS_PER_S_MAX in total.
The run's status and the search for stragglers (`protocol.stragglers`) use these reports.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from pccl.protocol.completion import tag_named
from pccl.protocol.messages import FIGURES_MAX, LinkReport, Report
from pccl.protocol.names import NameOf, peer_named, peers_named
from pccl.protocol.peer.ops import OpWait
from pccl.protocol.wait_reasons import (
    UNKNOWN,
    LinkWait,
    LongWait,
    explain_op,
    explain_pair,
    where_to_look,
)
from pccl.runtime.data_plane.events import LinkCounters

REPORT_S = 0.5
"""Time between reports. On a two-core host with 16 peers, the master uses 2.9 % of a core (2.0 % with 2 s)."""
REPORTS_PER_S_MAX = 250
EPOCHS_REPORTED = 4
REPEATS = 10
"""Number of unchanged reports before reporting pauses. In that time the master computes two rates; the second is 0."""


def interval_s(peers: int) -> float:
    """Return the time between a peer's reports in a run of this size."""
    return max(REPORT_S, peers / REPORTS_PER_S_MAX)


@dataclass
class _Link:
    peer: int
    threads: dict[int, LinkCounters] = field(default_factory=dict)

    @property
    def is_used(self) -> bool:
        """Whether the link has carried payload in either direction."""
        return any(each.tx_bytes or each.rx_bytes for each in list(self.threads.values()))

    def wait(self) -> LinkWait:
        threads = list(self.threads.values())
        return LinkWait(
            sum(thread.unheard_ops for thread in threads),
            sum(thread.inbound_ops for thread in threads),
            sum(thread.undone_ops for thread in threads),
            max((thread.stuck_ms for thread in threads), default=0),
        )

    def report(self) -> LinkReport:
        threads = self.threads.values()
        return LinkReport(
            self.peer,
            sum(thread.tx_bytes for thread in threads),
            max((thread.busy_ms for thread in threads), default=0),
            max((thread.sender_ms for thread in threads), default=0),
            max((thread.receiver_ms for thread in threads), default=0),
            sum(thread.delivered for thread in threads),
            sum(thread.resent for thread in threads),
            sum(thread.unacked_bytes for thread in threads),
            max((thread.round_trip_us for thread in threads), default=0),
            min((thread.round_trip_us_min for thread in threads if thread.round_trip_us_min), default=0),
            any(thread.is_udp for thread in threads),
        )


class WorkCounters:
    """Counters of a session's work."""

    def __init__(self) -> None:
        self._ops: dict[int, list[int]] = {}
        """Numbers of committed and aborted ops, by epoch."""
        self._state_rx_bytes = 0
        self._reconnects = 0
        self._in_ops_us = 0
        self._links: dict[int, _Link] = {}
        self._figures: list[tuple[str, float]] = []
        self._step: tuple[float, float] | None = None
        self._term = 0
        self._last_report: Report | None = None
        self._repeats = 0
        """Number of reports since the last one that changed."""

    def op_ended(self, epoch: int, is_committed: bool) -> None:
        counts = self._ops.setdefault(epoch, [0, 0])
        counts[0 if is_committed else 1] += 1
        while len(self._ops) > EPOCHS_REPORTED:
            del self._ops[min(self._ops)]

    def note_figures(self, figures: Mapping[str, float], now: float) -> None:
        """Add figures from the program to the reports; from `step` also the time per step. Thread-safe."""
        step, last = figures.get("step"), self._step
        added: dict[str, float] = {}
        if step is not None:
            self._step = step, now
            if last is not None and step > last[0]:
                added["step_s"] = (now - last[1]) / (step - last[0])
        self._figures = list({**dict(self._figures), **added, **figures}.items())[:FIGURES_MAX]

    @property
    def has_ops(self) -> bool:
        """Whether an op has ended."""
        return bool(self._ops)

    def state_fetched(self, rx_bytes: int) -> None:
        self._state_rx_bytes += rx_bytes

    def reconnected(self) -> None:
        self._reconnects += 1

    @property
    def links(self) -> list[int]:
        """The links that exist or are being made."""
        return list(self._links)

    def link_made(self, link: int, peer: int) -> None:
        self._links[link] = _Link(peer)

    def link_counted(self, counted: LinkCounters) -> None:
        if counted.link in self._links:
            self._links[counted.link].threads[counted.thread] = counted

    def link_closed(self, link: int) -> None:
        self._links.pop(link, None)

    def waits(self) -> dict[int, LinkWait]:
        """Return what ops wait for from each linked peer, based on the latest counters. Thread-safe."""
        return {link.peer: link.wait() for link in list(self._links.values())}

    def report(self, stats: Mapping[str, int], term: int = 1, now: float = 0.0) -> Report | None:
        """Return the report to this term's master, with the engine's counters; None after REPEATS unchanged reports."""
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
            figures=self._figures,
        )
        self._repeats = self._repeats + 1 if made == self._last_report else 0
        if self._repeats > REPEATS:
            return None
        self._last_report = made
        return msgspec.structs.replace(made, at_ms=round(now * 1000))


# Warnings about ops that take a long time.

TAGS_NAMED_MAX = 4
SINGLE_MAX = 16
"""Maximum number of ops that are watched individually."""


class LongWaits:
    """Watches a session's ops and logs long waits. `look` is only for the trio thread."""

    def __init__(
        self,
        counters: WorkCounters,
        logger: logging.LoggerAdapter[logging.Logger],
        name_of: NameOf,
        masters: str,
    ) -> None:
        self._counters = counters
        self._logger = logger
        self._name_of = name_of
        self._where = where_to_look(masters)
        self._group: LongWait | None = None
        self._single: dict[int, LongWait] = {}

    def look(
        self, now: float, group_wait_s: float, tags: Callable[[], Sequence[int]], single: Iterable[OpWait]
    ) -> None:
        """Log the warnings that are due. For `group_wait_s`, no op of the group has ended, and ops with these `tags`
        were open. `single` are the other waiting ops."""
        since = now - group_wait_s
        if self._group is not None and (not group_wait_s or since > self._group.since + 1.0):
            self._end(self._group, now, may_be_open=not group_wait_s and bool(tags()))
            self._group = None
        if group_wait_s:
            self._group = self._group or LongWait("", since)
            if self._group.is_due(now):
                self._group.what = _ops_with(tags())
                self._warn(self._group, now, explain_op(self._counters.waits(), self._name_of))
        self._look_at_each(now, {wait.op: wait for wait in single})

    def _look_at_each(self, now: float, waits: Mapping[int, OpWait]) -> None:
        for op in [op for op in self._single if op not in waits]:
            self._end(self._single.pop(op), now)
        for op, wait in waits.items():
            if op not in self._single and len(self._single) < SINGLE_MAX:
                self._single[op] = LongWait(named(wait, self._name_of), wait.since)
            known = self._single.get(op)
            if known is not None and known.is_due(now):
                self._warn(known, now, self._explain_single(wait))

    def _explain_single(self, wait: OpWait) -> str:
        if wait.is_queued or wait.pair is None:
            return "the ring to be formed or a group call to end: the op has not begun"
        return explain_pair(*wait.pair, self._counters.waits(), self._name_of)

    def whom(self, pair: tuple[int, bool] | None, others: Sequence[int], awaited: Collection[int] | None) -> str:
        """Describe the peers that an op waits for, from the latest counters. `awaited` are participants that have not
        launched the op; with None, the counters of all ops are used. Thread-safe."""
        waits = self._counters.waits()
        if pair is not None:
            return explain_pair(*pair, waits, self._name_of)
        if awaited is not None:
            waits = {peer: _of_one(wait, peer in awaited, bool(awaited)) for peer, wait in waits.items()}
        found = explain_op(waits, self._name_of)
        if found == UNKNOWN and others:
            return peers_named(others, self._name_of) + (", or one of them" if len(others) > 1 else "")
        return found

    def _warn(self, wait: LongWait, now: float, text: str) -> None:
        self._logger.warning("%s", wait.warning(now, text, self._where))

    def _end(self, wait: LongWait, now: float, may_be_open: bool = False) -> None:
        if wait.is_told:
            self._logger.warning("%s", wait.over(now) if may_be_open else wait.ending(now))


def _ops_with(tags: Sequence[int]) -> str:
    if len(tags) == 1:
        return f"the op with {tag_named(tags[0])}"
    shown = ", ".join(map(str, tags[:TAGS_NAMED_MAX])) + (" ..." if len(tags) > TAGS_NAMED_MAX else "")
    return f"the first of the ops with tags {shown}" if tags else "an op"


def named(wait: OpWait, name_of: NameOf) -> str:
    """Return the name of a single op for use in a sentence."""
    if wait.pair is None:
        return f"the op with {tag_named(wait.tag)}"
    peer, is_sender = wait.pair
    verb, direction = ("send", "to") if is_sender else ("recv", "from")
    return f"{verb} with tag {wait.tag} {direction} {peer_named(peer, name_of(peer))}"


def _of_one(wait: LinkWait, is_awaited: bool, is_known: bool) -> LinkWait:
    """Return what one op waits for from a peer. `is_known` if the peers that have not launched it are known."""
    if is_known and not is_awaited:
        return replace(wait, unheard_ops=0, inbound_ops=0, undone_ops=0)
    return replace(wait, unheard_ops=int(is_awaited))
