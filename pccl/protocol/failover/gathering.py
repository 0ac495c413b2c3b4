"""Gathering: peers of one run that have lost its master and come to the same other one, and when it may lead them on.

The danger is a few peers that are cut off: asked at once, they would vote in a higher term, and disturb a master that
leads the others well. So there are two rounds, as with Raft's pre-vote:

    1  Each peer says which views it knows and promises nothing.
    2  Only when those who are here hold a majority of the run's last view are they asked to vote, in a term that is
       higher than any that has been heard of. A vote carries what the peer knows of the run, from which that is
       rebuilt.
    3  The run is led when those who follow are a majority of the last view that anybody here tells of. All who can go
       on are waited for, for a time: a peer that comes too late is lost to the run.

Known runs: the record of this process, and the last views of runs that it does not lead, as peers have told of them.

Peers of one run come to a master in any order and may leave again, so what it may conclude must not depend on who
happens to be here:

    1  A peer that a view in force has left out must not go on from an earlier one, even when those who told of that
       view are gone again. So the newest view in force that was told of is remembered for each run.
    2  Where nobody can have led a run since this process wrote its record, the record counts instead: see `record`.
    3  Peers that know several masters stay at each for a moment only. Whether any of them was ever accepted is judged
       by all that have come one after the other (`unaccepted_since`).
    4  A peer that the record's run has left out is put out, and peers of other runs are sent away while that run may
       come.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pccl.protocol import messages as m
from pccl.protocol.failover.durable_state import RunRecord, bounded_s
from pccl.protocol.failover.recovery import Quorum, quorum_of
from pccl.protocol.master.run_state import NAMED_MAX
from pccl.protocol.summary_tally import Summary, SummaryTally, Views
from pccl.types import Result

GATHER_TIMEOUTS = 3.0
"""Number of peer timeouts for which a peer waits here for others of its run. Then it is sent away, and may come
again."""
DOUBT_TIMEOUTS = 2.0
"""Number of peer timeouts for which a master that knows that nobody else has led the run waits for a majority with
those who are here."""
TELL_S = 1.0
"""Seconds after somebody has come after which the log says who is still waited for."""


@dataclass
class RecoveringPeer:
    """A peer of a run that has lost its master."""

    connection: int
    """The control connection over which it has come."""
    host: str
    peer: int
    run: str
    term: int
    """The highest term that it had followed when it came."""
    masters: int
    """Number of master addresses that it knows."""
    is_accepted: bool
    since: float
    master_timeout_s: float
    asked: int = 0
    """The last term that it was asked to follow in."""

    @classmethod
    def of(cls, connection: int, host: str, message: m.Resume, now: float) -> RecoveringPeer:
        """Return the claim of a peer that has said this."""
        return cls(
            connection,
            host,
            message.peer,
            message.run,
            message.term,
            message.masters,
            message.is_accepted,
            now,
            bounded_s(message.master_timeout_s, m.MASTER_TIMEOUT_S),
        )


class Gathering:
    """The peers of one run that have come. The work for what one of them says does not depend on how many are here.

    Where a method takes `is_fenced`, it says whether nobody can have led the run since this process wrote its record.
    """

    def __init__(self, run: str, term: int, peer_timeout_s: float) -> None:
        views = Views()
        self.run = run
        self.term = term
        """The term in which this master would lead the run."""
        self.majority_at: float | None = None
        """The time since which a majority of its last view is here without a break; None: there is none."""
        self.unaccepted_since = 0.0
        """The time since which peers of the run have come, and none of them told of a view in force."""
        self.heard_at = 0.0
        """The time when somebody came or followed last."""
        self.claims: dict[int, RecoveringPeer] = {}
        """Claims by peer, the one that has waited longest first."""
        self.here: SummaryTally[Summary] = SummaryTally(views)
        """Summaries of all who have come, whether they follow or not."""
        self.following: SummaryTally[m.RecoveryReport] = SummaryTally(views)
        """Reports of those who follow in `term`."""
        self.term_heard = 0
        """The highest term that one of them had followed."""
        self.record: RunRecord | None = None
        """The record of the run's last view besides the word of those who are here."""
        self.tells_at: float | None = None
        """The time when the log is to say who is waited for."""
        self._to_ask: dict[int, RecoveringPeer] = {}
        self._with_rivals = 0
        self._timeout_s = peer_timeout_s

    def enter(self, claim: RecoveringPeer) -> None:
        self.claims[claim.peer] = claim
        self._with_rivals += claim.masters > 1
        self.term_heard = max(self.term_heard, claim.term)

    def leave(self, claim: RecoveringPeer) -> None:
        del self.claims[claim.peer]
        self._with_rivals -= claim.masters > 1
        self.here.discard(claim.peer)
        self.following.discard(claim.peer)
        self._to_ask.pop(claim.peer, None)

    def said(self, claim: RecoveringPeer, summary: Summary, is_following: bool, now: float) -> None:
        """Take in a summary or a report of a peer that is here."""
        if claim.peer not in (self.following if is_following else self.here).heard:
            self.heard_at = now
        self.here.add(claim.peer, summary)
        if is_following and isinstance(summary, m.RecoveryReport):
            self.following.add(claim.peer, summary)
        else:
            self.following.discard(claim.peer)
        if self.tells_at is None:
            self.tells_at = now + TELL_S  # most come at once
        if claim.asked < self.term:
            self._to_ask[claim.peer] = claim

    def raise_term(self, term: int) -> None:
        """Ask in this term from now on. All who are here have to be asked again."""
        self.term = term
        self.following = SummaryTally(self.here.views)
        self._to_ask = {peer: claim for peer, claim in self.claims.items() if peer in self.here.heard}

    def to_ask(self) -> list[RecoveringPeer]:
        """Take the peers that are to be asked to follow now."""
        claims, self._to_ask = list(self._to_ask.values()), {}
        return claims

    @property
    def has_rivals(self) -> bool:
        return self._with_rivals > 0

    @property
    def since(self) -> float:
        """The time since which the first of them has waited."""
        return next(iter(self.claims.values())).since

    def quorum(self, needs_majority: bool = True) -> Quorum:
        """Judge those who have come, whether they follow or not."""
        return quorum_of(self.here, self.has_rivals, self.record, needs_majority)

    def quorum_following(self, needs_majority: bool = True) -> Quorum:
        return quorum_of(self.following, self.has_rivals, self.record, needs_majority)

    # When it may be led.

    def doubts_until(self) -> float:
        """Return the time until which a majority is needed in any case: those who can go on wait for each other. Who
        was left out and has waited for longer hurries nobody. inf: none of those who can go on is here."""
        expected = self.quorum().expected
        since = next((claim.since for claim in self.claims.values() if claim.peer in expected), inf)
        return since + DOUBT_TIMEOUTS * self._timeout_s

    def needs_majority(self, now: float) -> bool:
        return self.record is None or now < self.doubts_until()

    def leads_at(self, majority_at: float) -> float:
        """Return the time when the run continues without the missing peers. inf: never, because the last master may
        have evicted the peers that are here, and there is no record of it."""
        if not (self.has_rivals or self.record is not None):
            return inf
        heard_at = max(majority_at, self.heard_at)
        return min(heard_at + self._timeout_s, majority_at + GATHER_TIMEOUTS * self._timeout_s)

    def may_lead(self, needs_majority: bool) -> bool:
        """Whether those who follow are enough, and nobody here tells of a later view."""
        here, following = self.quorum(needs_majority), self.quorum_following(needs_majority)
        return here.has_majority and following.has_majority and following.view == here.view

    def is_enough(self, needs_majority: bool) -> bool:
        """Whether all who can go on follow, or, where no majority is needed, all of those who are here."""
        following = self.quorum_following(needs_majority)
        all_follow = self.here.count(following.expected) == self.following.count(following.expected)
        return following.is_complete or (not needs_majority and all_follow)

    def stays_until(self, since: float) -> float:
        """Return the time until which a peer that came at `since` is kept waiting. It is later while a majority is
        here, which may lead on without the rest before that."""
        leads_at = inf if self.majority_at is None else self.leads_at(self.majority_at)
        return max(since, leads_at if leads_at < inf else since) + GATHER_TIMEOUTS * self._timeout_s

    def deadlines(self, now: float) -> list[float]:
        """Return the times at which something is due."""
        needs_majority = self.needs_majority(now)
        times = [self.stays_until(self.since)]
        if self.here.heard and not self.quorum().peers:
            times.append(self.unaccepted_since + self._timeout_s)
        elif self.majority_at is not None and self.may_lead(needs_majority):
            times.append(self.leads_at(self.majority_at))
        if self.tells_at is not None:
            times.append(self.tells_at)
        if self.record is not None and needs_majority:
            times.append(self.doubts_until())
        return times

    def account(self, here: Quorum, now: float) -> str:
        """Return a line for the log: who has come, and who is waited for."""
        absent = sorted(frozenset().union(*here.quorum_views.values()) - self.here.heard)
        text = f"run {self.run}: {here}"
        if absent:
            text += f"; it waits for peers {absent[:NAMED_MAX]}"
        if absent and self.majority_at is not None:
            left_s = self.leads_at(self.majority_at) - now
            text += f" and continues without them in {max(0.0, left_s):.1f} s" if left_s < inf else ""
        return text


RUNS_MAX = 16
"""Number of runs that are remembered."""
BREAK_TIMEOUTS = 3.0
"""Number of peer timeouts within which peers that go from master to master are back at each."""


class KnownRuns:
    """The record of this process and the last views of other runs."""

    def __init__(self, record: RunRecord | None) -> None:
        self.record = record
        """The record of the run that this process, or one before it with the same state, has led last."""
        self._unaccepted: dict[str, tuple[float, float]] = {}
        """Runs whose peers have told of no view in force: the times when one came first, and last."""

    def record_of(self, gathering: Gathering) -> RunRecord | None:
        """Return the record of a gathering's run. None: somebody else may have led that run since, for all that is known
        here."""
        record = self.record
        if record is None or record.run != gathering.run or gathering.has_rivals or gathering.term_heard > record.term:
            return None
        return record

    def unaccepted_since(self, run: str, now: float, peer_timeout_s: float) -> float:
        """Note that a peer of this run has come. Return the time since which its peers have, with short breaks at most,
        and none told of a view in force."""
        since, last = self._unaccepted.pop(run, (now, now))
        if now >= last + BREAK_TIMEOUTS * peer_timeout_s:
            since = now
        self._unaccepted[run] = since, now
        for oldest in list(self._unaccepted)[:-RUNS_MAX]:
            del self._unaccepted[oldest]
        return since

    def forget(self, run: str) -> None:
        """Forget when peers of a run came: a view of it was in force."""
        self._unaccepted.pop(run, None)

    def refusal(self, message: m.Resume, is_waiting: bool) -> m.FromMaster | None:
        """Return what a peer is told that is known not to be in the run that this master waits for; None: it may be in
        it. `is_waiting`: nobody may found another run yet."""
        record = self.record
        if record is None or message.masters > 1:
            return None
        if message.run != record.run:
            if record.is_over or not is_waiting:
                return None
            text = f"it waits for {record}, and not for run {message.run!r}"
            return m.Elsewhere(text) if message.is_accepted else m.StartOver(text)
        views = [record.installed, *record.prepared] if record.installed is not None else record.prepared
        if message.term > record.term or any(message.peer in view.peers for view in views if view is not None):
            return None
        if not message.is_accepted:
            return m.StartOver("the run has gone on without the view that was to accept it")
        how = "has ended" if record.is_over else "has gone on"
        text = f"evicted: run {message.run!r} {how} without peer {message.peer}; connect again"
        return m.Goodbye(Result.MASTER_CONNECTION_FAILED, text, record.secret)
