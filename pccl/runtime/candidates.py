"""Which master to ask next: all of them in turn, again and again, with pauses between rounds.

Pure: time and chance come in as arguments. A search begins anew whenever a master is lost.

A round begins with the first address, so that all peers come to the same master when there is a choice. Rounds are at
most PAUSE_S_MAX apart, so a successor is found soon after it listens; the first pauses are short, for a master that is
started anew at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PAUSE_S_MIN = 0.05
PAUSE_S_MAX = 0.5
DIAL_S = 1.5
"""For one connection to be made. Short, since an address whose machine is gone does not answer at all."""

Address = tuple[str, int]


@dataclass(frozen=True)
class Attempt:
    address: Address
    pause_s: float
    """Before it."""
    is_first_round: bool


class Candidates:
    def __init__(self, masters: Sequence[Address]) -> None:
        assert masters
        self.masters = tuple(masters)
        self._asked = 0
        self._failures: dict[Address, str] = {}

    def next(self, chance: float) -> Attempt:
        """`chance`, within [0, 1), spreads the peers of a run."""
        asked_in_round = self._asked % len(self.masters)
        rounds = self._asked // len(self.masters)
        pause_s = 0.0
        if asked_in_round == 0 and rounds:
            pause_s = min(PAUSE_S_MIN * 2 ** min(rounds - 1, 10), PAUSE_S_MAX) * (0.5 + chance / 2)
        self._asked += 1
        return Attempt(self.masters[asked_in_round], pause_s, rounds == 0)

    def failed(self, address: Address, reason: str) -> None:
        self._failures[address] = reason

    @property
    def are_all_asked(self) -> bool:
        """Each once, at least."""
        return self._asked >= len(self.masters)

    def account(self) -> str:
        """What came of the last attempt at each that was asked, in their order."""
        return "; ".join(
            f"{host}:{port}: {self._failures[host, port]}"
            for host, port in self.masters
            if (host, port) in self._failures
        )
