"""Peers of one run that have lost its master and come to the same other one, and when it may lead them on.

The first round is what Raft calls pre-vote: each peer says which views it knows of and promises nothing. Only when
those who are here hold a majority of the run's last view are they asked to vote, in a term that is higher than any that
has been heard of. So a few peers that are cut off raise nobody's term. A vote carries what the peer knows of the run,
from which that is rebuilt.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pccl.protocol import messages as m
from pccl.protocol.fence import Fence
from pccl.protocol.master.options import NAMED_MAX
from pccl.protocol.recovery_report import Quorum, quorum_of
from pccl.protocol.summary_tally import Summary, SummaryTally, Views

GATHER_TIMEOUTS = 3.0
"""For so many peer timeouts a peer waits here for others of its run. Then it is sent away, and may come again."""
DOUBT_TIMEOUTS = 2.0
"""For so many peer timeouts one that knows that nobody else has led the run waits for a majority with those who are
here."""
TELL_S = 1.0
"""So long after somebody has come, the log says who is still waited for."""


@dataclass
class Claim:
    """A peer of a run that has lost its master."""

    connection: int
    host: str
    peer: int
    run: str
    term: int
    """The highest that it had followed when it came."""
    masters: int
    is_accepted: bool
    since: float
    master_timeout_s: float
    gives_up_at: float
    """When its patience ends."""
    asked: int = 0
    """The term that it was asked to follow in."""


class Gathering:
    """The peers of one run that have come. The work for what one of them says does not depend on how many are here.

    Where a method takes `is_fenced`, it is whether nobody can have led the run since this process wrote its fence.
    """

    def __init__(self, run: str, term: int, peer_timeout_s: float, resumes_any: bool) -> None:
        views = Views()
        self.run = run
        self.term = term
        """In which this master would lead it."""
        self.majority_at: float | None = None
        """Since when a majority of its last view is here, without a break."""
        self.heard_at = 0.0
        """When somebody came or followed last."""
        self.claims: dict[int, Claim] = {}
        """By peer, who has waited longest first."""
        self.here: SummaryTally[Summary] = SummaryTally(views)
        """What those who have come have said, whether they follow or not."""
        self.following: SummaryTally[m.RecoveryReport] = SummaryTally(views)
        """Of those who follow in `term`."""
        self.term_heard = 0
        """The highest that one of them had followed."""
        self.fence: Fence | None = None
        """What is known here of the run's last view, besides what those say who are here."""
        self.tells_at: float | None = None
        """When the log is to say who is waited for."""
        self._patience: tuple[frozenset[int], float] | None = None
        """Some of them, and when the first of those who are here gives up."""
        self._to_ask: dict[int, Claim] = {}
        """Who has come and was not asked to follow in `term`."""
        self._with_rivals = 0
        self._timeout_s = peer_timeout_s
        self._resumes_any = resumes_any

    def enter(self, claim: Claim) -> None:
        self.claims[claim.peer] = claim
        self._with_rivals += claim.masters > 1
        self.term_heard = max(self.term_heard, claim.term)
        if self._patience is not None and claim.peer in self._patience[0]:
            self._patience = self._patience[0], min(self._patience[1], claim.gives_up_at)

    def leave(self, claim: Claim) -> None:
        del self.claims[claim.peer]
        self._with_rivals -= claim.masters > 1
        self.here.discard(claim.peer)
        self.following.discard(claim.peer)
        self._to_ask.pop(claim.peer, None)
        self._patience = None

    def gives_up_at(self, peers: frozenset[int]) -> float:
        """When the first of these does who are here."""
        if self._patience is None or self._patience[0] != peers:
            ends = [claim.gives_up_at for claim in self.claims.values() if claim.peer in peers]
            self._patience = peers, min(ends, default=inf)
        return self._patience[1]

    def said(self, claim: Claim, summary: Summary, is_following: bool, now: float) -> None:
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
        self.term = term
        self.following = SummaryTally(self.here.views)
        self._to_ask = {peer: claim for peer, claim in self.claims.items() if peer in self.here.heard}

    def to_ask(self) -> list[Claim]:
        """Who is to be asked to follow now, and was not asked before."""
        claims, self._to_ask = list(self._to_ask.values()), {}
        return claims

    @property
    def has_rivals(self) -> bool:
        """Its peers know of other masters."""
        return self._with_rivals > 0

    @property
    def since(self) -> float:
        return next(iter(self.claims.values())).since

    def quorum(self, needs_majority: bool = True) -> Quorum:
        """How many have come, whether they follow or not."""
        return quorum_of(self.here, self.has_rivals, self.fence, needs_majority)

    def quorum_following(self, needs_majority: bool = True) -> Quorum:
        """How many of them follow."""
        return quorum_of(self.following, self.has_rivals, self.fence, needs_majority)

    # When it may be led.

    def doubts_until(self) -> float:
        return self.since + DOUBT_TIMEOUTS * self._timeout_s

    def needs_majority(self, now: float, is_fenced: bool) -> bool:
        return not is_fenced or now < self.doubts_until()

    def leads_at(self, majority_at: float, is_fenced: bool) -> float:
        """When the run goes on with those who follow. As long as they go on coming, they are not late, but this master
        busy."""
        heard_at = max(majority_at, self.heard_at)
        at = min(heard_at + self._timeout_s, majority_at + GATHER_TIMEOUTS * self._timeout_s)
        if not (self._resumes_any or self.has_rivals or is_fenced):
            # Others may have gone on without those who are here.
            gives_up_at = self.gives_up_at(self.quorum().expected)
            at = max(at, gives_up_at - self._timeout_s) if gives_up_at < inf else at
        return at

    def may_lead(self, needs_majority: bool) -> bool:
        """Those who follow are enough, and nobody here tells of a later view."""
        here, following = self.quorum(needs_majority), self.quorum_following(needs_majority)
        return here.has_majority and following.has_majority and following.view == here.view

    def is_enough(self, needs_majority: bool) -> bool:
        """All who can go on follow, or all of those who are here where no majority is needed."""
        following = self.quorum_following(needs_majority)
        all_follow = self.here.count(following.expected) == self.following.count(following.expected)
        return following.is_complete or (not needs_majority and all_follow)

    def stays_until(self, since: float, is_fenced: bool) -> float:
        """How long a peer that came at `since` is kept waiting: longer while a majority is here, which may lead on
        without the rest before that."""
        leads_at = since
        if self.majority_at is not None:
            leads_at = self.leads_at(self.majority_at, is_fenced)
        return max(since, leads_at) + GATHER_TIMEOUTS * self._timeout_s

    def deadlines(self, now: float, is_fenced: bool) -> list[float]:
        needs_majority = self.needs_majority(now, is_fenced)
        times = [self.stays_until(self.since, is_fenced)]
        if self.here.heard and not self.quorum().peers:
            times.append(self.since + self._timeout_s)
        elif self.majority_at is not None and self.may_lead(needs_majority):
            times.append(self.leads_at(self.majority_at, is_fenced))
        if self.tells_at is not None:
            times.append(self.tells_at)
        if is_fenced and needs_majority:
            times.append(self.doubts_until())
        return times

    def account(self, here: Quorum, now: float, is_fenced: bool) -> str:
        """Who has come, and who is waited for, for the log."""
        absent = sorted(frozenset().union(*here.quorum_views.values()) - self.here.heard)
        text = f"of run {self.run} {here}"
        if absent:
            text += f"; it waits for peers {absent[:NAMED_MAX]}"
        if absent and self.majority_at is not None:
            left_s = self.leads_at(self.majority_at, is_fenced) - now
            text += f", and goes on without them in {max(0.0, left_s):.1f} s"
        return text
