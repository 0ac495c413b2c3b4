"""`Lateness`: which peer of a group the others wait for, op after op.

A round of ops tells for which share of its time each peer was in ops. Who was there least launches last, and the others
wait for it. A streak is a number of rounds in a row in which that is the same peer, by LATE_FACTOR and LATE_SHARE.

    1  One round does not tell by how much. It may hold a single op, and its edges cut that at another place for each
       peer. So a streak is judged as a whole, by SLOW_FACTOR and LOST_SHARE, and so are its last rounds. A round that
       shows nothing belongs to it if it does so together with the one before.
    2  It takes ROUNDS_MIN rounds; a little fewer if they are long, or if they show more.
    3  Pauses do not make a peer slow. One shows in two rounds at most: that in which it begins, and that which ends
       with the op that was late. So a streak has to say nearly the same without the two that say most, and without
       those that are far longer than others.
    4  Where steps vary, some peer is last several times in a row by chance. So a streak has to be twice as long as any
       that has ended by itself not long ago, of whatever peer. Of another peer's only the rounds count over which it
       was slow, and one more, as edges cut it at both ends: a peer that is always a little slower has long streaks,
       which say nothing of how steps vary, and must not hide one that becomes slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LATE_FACTOR, LATE_SHARE = 1.3, 0.1
SLOW_FACTOR, LOST_SHARE = 2.0, 0.2
SLOW_FACTOR_STILL, LOST_SHARE_STILL = 1.4, 0.1
"""Those at which a peer that was named remains so."""
REST_FACTOR, REST_SHARE = 1.7, 0.15
"""Those for what is left of a streak without pauses, and for a round that shows nothing and the one before."""
PAUSE_ROUNDS = 2
PAUSE_FACTOR = 3.0
"""Rounds that are so many times as long as the shortest one of a streak are pauses."""
ROUNDS_MIN = 5
LONG_ROUNDS_MIN, LONG_ROUNDS_S = 4, 3.0
"""Fewer rounds will do if they are so long together."""
CLEAR_FACTOR = 3.0
CLEAR_ROUNDS_MIN, CLEAR_ROUNDS_S = 3, 2.4
CLEAR_ROUND_S_MAX = 2.0
"""The same where the streak shows CLEAR_FACTOR, and each round as much as a streak has to. Longer ones may be pauses in
a row."""
ROUNDS_KEPT = 16
"""More are never asked for."""
CHANCE_FACTOR = 2
CHANCE_S = 300.0
"""How many times as long a streak has to be as what counts of one that ended by itself, and how long it does."""


@dataclass(frozen=True)
class OpRound:
    """Time that peers have spent in ops and between them."""

    ended_at: float
    seconds: float
    ops: int
    shares: Mapping[int, float]
    """Shares of the time that each peer has spent in ops."""


class Lateness:
    """The rounds of ops of one group in one epoch."""

    def __init__(self) -> None:
        self.rounds: deque[OpRound] = deque(maxlen=ROUNDS_KEPT)
        self.peer: int | None = None
        """Whom the others wait for since `length` rounds."""
        self.length = 0
        self._is_named = False
        self._is_joined = False
        """Whether the last round belongs to the streak by the one before."""
        self._slow_rounds = 0
        """The largest number of rounds of the streak, in a row, over which its peer was slow."""
        self._ended: list[tuple[float, int, int, int]] = []
        """When streaks ended that nobody was named for, whose they were, and how many rounds count for this peer, and
        how many for others."""

    def add(self, ended: OpRound) -> None:
        """Take in the next round."""
        assert ended.seconds > 0
        assert not self.rounds or ended.shares.keys() == self.rounds[-1].shares.keys()
        before = list(self.rounds)[-1:]
        self.rounds.append(ended)
        if len(ended.shares) < 2:
            return
        last = min(ended.shares, key=lambda peer: ended.shares[peer])
        peer = last if is_late([ended], last, LATE_FACTOR, LATE_SHARE) else None
        was_joined, self._is_joined = self._is_joined, False
        if peer is None and self.peer is not None and not was_joined:
            self._is_joined = is_late([*before, ended], self.peer, REST_FACTOR, REST_SHARE)
        if self._is_joined or (peer is not None and peer == self.peer):
            self.length += 1
        else:
            if self.peer is not None and not self._is_named:
                for_others = min(self.length, self._slow_rounds + 1)
                self._ended.append((ended.ended_at, self.peer, self.length, for_others))
            self._ended = [each for each in self._ended if ended.ended_at - each[0] < CHANCE_S]
            self.peer, self.length, self._slow_rounds, self._is_named = peer, int(peer is not None), 0, False
        if self.peer is not None:
            streak = self._streak()
            for count in range(self._slow_rounds + 1, len(streak) + 1):
                if is_late(streak[:count], self.peer, SLOW_FACTOR, LOST_SHARE):
                    self._slow_rounds = count

    def slow(self, is_named: bool) -> Sequence[OpRound]:
        """Return the rounds that show that `peer` is slow, if they do, the newest first."""
        peer = self.peer
        if peer is None:
            return []
        streak = self._streak()
        if is_named:
            self._is_named = True
            recent = streak[:ROUNDS_MIN]
            return recent if is_late(recent, peer, SLOW_FACTOR_STILL, LOST_SHARE_STILL) else []
        by_chance = max((own if whose == peer else other for _, whose, own, other in self._ended), default=0)
        least = max(CLEAR_ROUNDS_MIN, min(ROUNDS_KEPT, CHANCE_FACTOR * by_chance))
        if len(streak) > ROUNDS_MIN and not is_late(streak, peer, SLOW_FACTOR, LOST_SHARE):
            return []
        for count in range(least, len(streak) + 1):
            if _shows(streak[:count], peer) or _shows_clearly(streak[:count], peer):
                return streak[:count]
        return []

    def _streak(self) -> Sequence[OpRound]:
        """Return the rounds of the streak that are kept, the newest first."""
        return list(self.rounds)[::-1][: self.length]


def total_s(rounds: Sequence[OpRound]) -> float:
    """Return how long rounds were together."""
    return sum(each.seconds for each in rounds)


def between_ops(rounds: Sequence[OpRound], peer: int) -> tuple[float, float]:
    """Return the share of the time of rounds that a peer has spent between ops, and that of the next slowest."""
    whole = total_s(rounds)
    shares = {each: sum(one.seconds * (1 - one.shares[each]) for one in rounds) / whole for each in rounds[0].shares}
    return shares.pop(peer), max(shares.values())


def is_late(rounds: Sequence[OpRound], peer: int, factor: float, lost: float) -> bool:
    """Whether a peer was between ops `factor` times as long as the next slowest, and others have lost this share of
    the time by that."""
    own, next_slowest = between_ops(rounds, peer)
    return own - next_slowest >= lost and own >= factor * next_slowest


def _shows(rounds: Sequence[OpRound], peer: int) -> bool:
    if len(rounds) < ROUNDS_MIN and (len(rounds) < LONG_ROUNDS_MIN or total_s(rounds) < LONG_ROUNDS_S):
        return False

    def lost_s(each: OpRound) -> float:
        own, next_slowest = between_ops([each], peer)
        return (own - next_slowest) * each.seconds

    usual_s = PAUSE_FACTOR * min(each.seconds for each in rounds)
    rest = sorted((each for each in rounds if each.seconds <= usual_s), key=lost_s)[:-PAUSE_ROUNDS]
    return (
        len(rest) >= LONG_ROUNDS_MIN - PAUSE_ROUNDS
        and is_late(rest, peer, REST_FACTOR, REST_SHARE)
        and is_late(rounds, peer, SLOW_FACTOR, LOST_SHARE)
    )


def _shows_clearly(rounds: Sequence[OpRound], peer: int) -> bool:
    each_shows = all(
        each.seconds <= CLEAR_ROUND_S_MAX and is_late([each], peer, SLOW_FACTOR, LOST_SHARE) for each in rounds
    )
    return each_shows and total_s(rounds) >= CLEAR_ROUNDS_S and is_late(rounds, peer, CLEAR_FACTOR, LOST_SHARE)
