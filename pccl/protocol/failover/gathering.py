"""Recovering peers: peers of one run that have lost their master and gather at another.

`Gathering` decides when to ask them for votes and when to lead them (rules 1 to 4 of `failover.machine`).

`KnownRuns` holds what this process knows about runs it does not lead. A record counts only if no other master can have
led its run since. Peers with several masters stay at each only briefly, so `unaccepted_since` judges from all peers
that connected in succession whether any peer of a run was ever accepted.
"""

from __future__ import annotations

from math import inf

from pccl.protocol import messages as m
from pccl.protocol.failover.durable_state import RunRecord
from pccl.protocol.failover.recovery import Quorum, RecoveringPeer, Summary, SummaryTally, Views, quorum_of
from pccl.protocol.names import peers_named
from pccl.types import Result

GATHER_TIMEOUTS = 3.0
"""The time, in peer timeouts, after which a waiting peer is dismissed. The peer may connect again."""
DOUBT_TIMEOUTS = 2.0
"""How many peer timeouts a master with a record waits for a majority."""
LOG_DELAY_S = 1.0


class Gathering:
    """The recovering peers of one run. The cost per message does not depend on the number of peers."""

    def __init__(self, run: str, term: int, peer_timeout_s: float) -> None:
        views = Views()
        self.run = run
        self.term = term
        self.majority_at: float | None = None
        """The time since which a majority of the last view has been connected, or None without a majority."""
        self.unaccepted_since = 0.0
        """The time since which all peers of the run that have connected know no installed view."""
        self.last_arrival_at = 0.0
        self.survivors: dict[int, RecoveringPeer] = {}
        self.here: SummaryTally[Summary] = SummaryTally(views)
        self.following: SummaryTally[m.RecoveryReport] = SummaryTally(views)
        self.known_term = 0
        self.record: RunRecord | None = None
        """The record of this run, if no other master can have led it since."""
        self.logs_at: float | None = None
        self._to_ask: dict[int, RecoveringPeer] = {}
        self._with_rivals = 0
        self._timeout_s = peer_timeout_s

    def enter(self, survivor: RecoveringPeer) -> None:
        self.survivors[survivor.peer] = survivor
        self._with_rivals += survivor.resume.masters > 1
        self.known_term = max(self.known_term, survivor.resume.term)

    def leave(self, survivor: RecoveringPeer) -> None:
        del self.survivors[survivor.peer]
        self._with_rivals -= survivor.resume.masters > 1
        self.here.discard(survivor.peer)
        self.following.discard(survivor.peer)
        self._to_ask.pop(survivor.peer, None)

    def report(self, survivor: RecoveringPeer, summary: Summary, is_following: bool, now: float) -> None:
        if survivor.peer not in (self.following if is_following else self.here).peers:
            self.last_arrival_at = now
        self.here.add(survivor.peer, summary)
        if is_following and isinstance(summary, m.RecoveryReport):
            self.following.add(survivor.peer, summary)
        else:
            self.following.discard(survivor.peer)
        if self.logs_at is None:
            self.logs_at = now + LOG_DELAY_S  # most peers connect at the same time
        if survivor.asked < self.term:
            self._to_ask[survivor.peer] = survivor

    def raise_term(self, term: int) -> None:
        self.term = term
        self.following = SummaryTally(self.here.views)
        self._to_ask = {peer: survivor for peer, survivor in self.survivors.items() if peer in self.here.peers}

    def to_ask(self) -> list[RecoveringPeer]:
        survivors, self._to_ask = list(self._to_ask.values()), {}
        return survivors

    @property
    def has_rivals(self) -> bool:
        return self._with_rivals > 0

    @property
    def since(self) -> float:
        return next(iter(self.survivors.values())).since

    def quorum(self, needs_majority: bool = True) -> Quorum:
        return quorum_of(self.here, self.has_rivals, self.record, needs_majority)

    def quorum_following(self, needs_majority: bool = True) -> Quorum:
        return quorum_of(self.following, self.has_rivals, self.record, needs_majority)

    # When a master may lead the run.

    def doubts_until(self) -> float:
        """Return when a master with a record no longer needs a majority: DOUBT_TIMEOUTS after the arrival of the first
        peer that can continue."""
        expected = self.quorum().expected
        since = next((survivor.since for survivor in self.survivors.values() if survivor.peer in expected), inf)
        return since + DOUBT_TIMEOUTS * self._timeout_s

    def needs_majority(self, now: float) -> bool:
        return self.record is None or now < self.doubts_until()

    def leads_at(self, majority_at: float) -> float:
        """Return the time when the run continues without the missing peers, or inf if there is no record and the last
        master may have evicted the connected peers."""
        if not (self.has_rivals or self.record is not None):
            return inf
        last_arrival_at = max(majority_at, self.last_arrival_at)
        return min(last_arrival_at + self._timeout_s, majority_at + GATHER_TIMEOUTS * self._timeout_s)

    def may_lead(self, needs_majority: bool) -> bool:
        """Return whether the votes suffice and no connected peer knows a later view."""
        here, following = self.quorum(needs_majority), self.quorum_following(needs_majority)
        return here.has_majority and following.has_majority and following.view == here.view

    def is_enough(self, needs_majority: bool) -> bool:
        """Return whether all peers that can continue (if no majority is needed, all that are connected) have voted."""
        following = self.quorum_following(needs_majority)
        all_follow = self.here.count(following.expected) == self.following.count(following.expected)
        return following.is_complete or (not needs_majority and all_follow)

    def stays_until(self, since: float) -> float:
        """Return the time until which a peer may stay. It is later if a majority is connected that may continue without
        the missing peers."""
        leads_at = inf if self.majority_at is None else self.leads_at(self.majority_at)
        return max(since, leads_at if leads_at < inf else since) + GATHER_TIMEOUTS * self._timeout_s

    def deadlines(self, now: float) -> list[float]:
        needs_majority = self.needs_majority(now)
        times = [self.stays_until(self.since)]
        if self.here.peers and not self.quorum().peers:
            times.append(self.unaccepted_since + self._timeout_s)
        elif self.majority_at is not None and self.may_lead(needs_majority):
            times.append(self.leads_at(self.majority_at))
        if self.logs_at is not None:
            times.append(self.logs_at)
        if self.record is not None and needs_majority:
            times.append(self.doubts_until())
        return times

    def progress(self, now: float) -> str:
        """Return how many peers are back, which are missing, and for how long this master waits for them."""
        needs_majority = self.needs_majority(now)
        here = self.quorum(needs_majority)
        if not here.peers:
            return "no peer of its last view is back"
        text = f"{here.here} of {len(here.peers)} peers are back"
        absent = sorted(frozenset().union(*here.quorum_views.values()) - self.here.peers)
        if not absent:
            return text
        names = self.record.names if self.record is not None else {}
        ends_at = self.leads_at(self.majority_at) if self.majority_at is not None else inf
        if self.majority_at is None and self.record is not None and needs_majority:
            ends_at = self.doubts_until()
        left = f", {max(0.0, ends_at - now):.0f} s left" if ends_at < inf else ""
        return f"{text}; waiting for {peers_named(absent, lambda peer: names.get(peer, ''))}{left}"


RUNS_MAX = 16
BREAK_TIMEOUTS = 3.0
"""Number of peer timeouts within which a peer that tries the masters in turn returns to each."""


class KnownRuns:
    """This process's record, and what it knows about other runs."""

    def __init__(self, record: RunRecord | None) -> None:
        self.record = record
        """The record of the last run led by this process, or by an earlier one with the same directory."""
        self._unaccepted: dict[str, tuple[float, float]] = {}

    def record_of(self, gathering: Gathering) -> RunRecord | None:
        """Return the record of a gathering's run, or None if another master may have led that run since."""
        record = self.record
        if record is None or record.run != gathering.run or gathering.has_rivals or gathering.known_term > record.term:
            return None
        return record

    def unaccepted_since(self, run: str, now: float, peer_timeout_s: float) -> float:
        """Record that a peer of a run has connected. Return the time since when the run's peers have been connected,
        apart from short breaks, without one that was ever accepted."""
        since, last = self._unaccepted.pop(run, (now, now))
        if now >= last + BREAK_TIMEOUTS * peer_timeout_s:
            since = now
        self._unaccepted[run] = since, now
        for oldest in list(self._unaccepted)[:-RUNS_MAX]:
            del self._unaccepted[oldest]
        return since

    def forget(self, run: str) -> None:
        self._unaccepted.pop(run, None)

    def refusal(self, message: m.Resume, is_waiting: bool) -> m.FromMaster | None:
        """Return the rejection of a peer that does not belong to the awaited run, or None. `is_waiting` means that no
        run may start yet."""
        record = self.record
        if record is None or message.masters > 1:
            return None
        if message.run != record.run:
            if record.is_over or not is_waiting:
                return None
            text = f"it waits for {record}, not for run {message.run!r}"
            return m.Elsewhere(text) if message.is_accepted else m.StartOver(text)
        views = [record.installed, *record.prepared] if record.installed is not None else record.prepared
        if message.term > record.term or any(message.peer in view.peers for view in views if view is not None):
            return None
        if not message.is_accepted:
            return m.StartOver("the run has continued without the view that was to accept it")
        how = "has ended" if record.is_over else "has continued"
        text = f"evicted: run {message.run!r} {how} without peer {message.peer}; connect again"
        return m.Goodbye(Result.MASTER_CONNECTION_FAILED, text, record.secret)
