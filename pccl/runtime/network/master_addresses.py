"""Chooses which master to ask next: all of them in turn, again and again, with pauses between rounds.

Pure: time and chance come in as arguments. A search begins anew whenever a master is lost. Its rules:

1. A round begins with the first address, so that all peers come to the same master when there is a choice. For that a
   search goes through them in an order of its own, which is the same whatever order they were given in.
2. Still some masters may be out of reach for some peers, and a majority would wait at different masters for each other.
   So peers stay longest at the first master of a round that gathers them, and look at the others for a moment, which is
   enough to be asked to follow where a majority is.
3. Where all machines answer, a round takes no longer than a majority waits for the rest.
4. Rounds are at most PAUSE_S_MAX apart, so the next master is found soon after it listens; the first pauses are short,
   for a master that is started anew at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PAUSE_S_MIN = 0.05
PAUSE_S_MAX = 0.5
FIRST_SHARE = 0.6
"""Time to wait at the first of several masters that gathers peers, in peer timeouts."""
OTHER_SHARE = 0.1
"""Time to wait at each other one, in peer timeouts."""
OTHER_S_MIN = 0.5
"""Least time to wait there, since it may be far away, unless OTHERS_SHARE is less."""
OTHERS_SHARE = 0.3
"""Time to wait at all others together, at most, in peer timeouts."""
PAUSE_SHARE = 0.1
"""Pause between rounds in which a master gathers peers, at most, in peer timeouts, unless PAUSE_S_MIN is more."""
LEAD_TIMEOUTS = 3.5
"""Time to wait at a master that has a majority, in peer timeouts: longer than it takes to lead, at most
(`gathering.GATHER_TIMEOUTS`). Who leaves in the moment in which it begins to lead would be taken for lost."""
DIAL_S = 1.5
"""Time in which a connection has to be made. Short, since an address whose machine is gone does not answer at all."""

Address = tuple[str, int]


@dataclass(frozen=True)
class Attempt:
    address: Address
    pause_s: float
    """The pause before this attempt."""
    is_first_round: bool


class MasterAddresses:
    def __init__(self, masters: Sequence[Address]) -> None:
        assert masters
        self.addresses = tuple(masters)
        self._asked = 0
        self._failures: dict[Address, str] = {}
        self._waited_in_round = -1
        """The number of the last round in which some master was waited at."""
        self._pause_s_max = PAUSE_S_MAX
        """The longest pause after that round."""

    def anew(self) -> MasterAddresses:
        """Return the same addresses for a new search, none of which has been asked."""
        return MasterAddresses(sorted(self.addresses))

    def next(self, chance: float) -> Attempt:
        """Return the next attempt. `chance`, within [0, 1), spreads the peers of a run."""
        asked_in_round = self._asked % len(self.addresses)
        rounds = self._asked // len(self.addresses)
        pause_s = 0.0
        if asked_in_round == 0 and rounds:
            most_s = self._pause_s_max if self._waited_in_round == rounds - 1 else PAUSE_S_MAX
            pause_s = min(PAUSE_S_MIN * 2 ** min(rounds - 1, 10), most_s) * (0.5 + chance / 2)
        self._asked += 1
        return Attempt(self.addresses[asked_in_round], pause_s, rounds == 0)

    def patience_s(self, peer_timeout_s: float, is_majority_there: bool) -> float:
        """Return how long to wait at the master that was asked last, which gathers peers."""
        if len(self.addresses) == 1:
            return float("inf")
        if is_majority_there:
            return LEAD_TIMEOUTS * peer_timeout_s
        self._pause_s_max = min(PAUSE_S_MAX, max(PAUSE_S_MIN, PAUSE_SHARE * peer_timeout_s))
        current_round = (self._asked - 1) // len(self.addresses)
        if current_round != self._waited_in_round:
            self._waited_in_round = current_round
            return FIRST_SHARE * peer_timeout_s
        at_most_s = OTHERS_SHARE * peer_timeout_s / (len(self.addresses) - 1)
        return min(max(OTHER_S_MIN, OTHER_SHARE * peer_timeout_s), at_most_s)

    @property
    def are_all_asked_again(self) -> bool:
        """Whether a refusal counts as final: all others were asked before, or there is no other."""
        return self._asked > len(self.addresses) or len(self.addresses) == 1

    def failed(self, address: Address, reason: str) -> None:
        self._failures[address] = reason

    @property
    def are_all_asked(self) -> bool:
        """Whether each was asked once, at least."""
        return self._asked >= len(self.addresses)

    def account(self) -> str:
        """Return what came of the last attempt at each that was asked, in their order."""
        return "; ".join(
            f"{host}:{port}: {self._failures[host, port]}"
            for host, port in self.addresses
            if (host, port) in self._failures
        )
