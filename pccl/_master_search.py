"""The search for a master in one call of `connect`: how often it is tried, how long it may take, what is said of it.

1. Attempts are ATTEMPT_INTERVAL_S apart, and there are as many as the caller wants at most.
2. Together they end after a time that is known before the first: a port that drops packets answers nothing, and the
   system would go on dialling it for minutes.
3. Each attempt gets an equal share of the time that is left, and within it each of several addresses, so that one that
   does not answer takes no time from those after it.

The bound ends with the first word of a master. What follows is a wait for the peers of its run, which let newcomers in
when their program comes to it.
"""

from __future__ import annotations

import trio

from pccl.runtime.network.master_addresses import DIAL_S
from pccl.runtime.session.options import SessionError
from pccl.runtime.session.peer_session import NO_ANSWER_MEANS
from pccl.types import Result

REACH_S = 30.0
"""Seconds for which `connect` looks for a master, unless its caller gives a time, or wants more attempts than fit: each
counts for two intervals."""
ATTEMPT_INTERVAL_S = 1.0
TAKEN_ONLY = "a connection is taken there, and nothing is answered"


class MasterSearch:
    """One search. Only for one trio task."""

    def __init__(self, address: str, masters: int, attempts_max: int, reach_s: float | None, is_bound: bool) -> None:
        """`address` has so many `masters`. `reach_s` is the time that the attempts share, and the end of the search
        where it `is_bound` by that; None: as long as it takes."""
        self.attempts = 0
        """Number of attempts that have been begun."""
        self._address = address
        self._masters = masters
        self._attempts_max = max(1, attempts_max)
        self._began_at = trio.current_time()
        self._shared_until = self._began_at + (float("inf") if reach_s is None else reach_s)
        self.ends_at = self._shared_until if is_bound else float("inf")
        """The time at which a master must have answered."""
        self._standing = f"no answer to a connection so far: {NO_ANSWER_MEANS}"
        """How far the present attempt has come, or how the last one has ended."""

    def begin(self) -> float:
        """Begin an attempt. Return the seconds in which each address must take a connection."""
        left_s = self._shared_until - trio.current_time()
        attempts_left = self._attempts_max - self.attempts
        self.attempts += 1
        share_s = (left_s - (attempts_left - 1) * ATTEMPT_INTERVAL_S) / attempts_left / self._masters
        return max(0.0, min(left_s, max(DIAL_S, share_s)))

    def has_failed(self, reason: str) -> None:
        """Note how an attempt has ended."""
        self._standing = reason

    def has_connected(self) -> None:
        """Note that something has taken a connection."""
        self._standing = TAKEN_ONLY

    @property
    def is_over(self) -> bool:
        """Whether no further attempt is to be made."""
        return self.attempts >= self._attempts_max or trio.current_time() + ATTEMPT_INTERVAL_S >= self.ends_at

    def account(self) -> str:
        """Return in words how it stands."""
        return f"the master at {self._address}, attempt {self.attempts} of {self._attempts_max}: {self._standing}"

    def failure(self, reason: str) -> SessionError:
        """Return the error for a search that is over: what was tried, how often, and what to do."""
        how_often = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        seconds = trio.current_time() - self._began_at
        text = f"{reason} ({how_often}) in {seconds:.1f} s; `pccl doctor {self._address}` looks for the reason"
        return SessionError(Result.MASTER_CONNECTION_FAILED, text)
