"""The search for a master in one call of `connect`: how often it is tried, how long it may take, what is said of it.

1. Attempts are ATTEMPT_INTERVAL_S apart, and go on for REACH_S or the caller's timeout: the master's machine may be
   started after this one. A caller who gives a number of attempts gets no more than these.
2. Together they end after a time that is known before the first: a port that drops packets answers nothing, and the
   system would go on dialling it for minutes.
3. Each of a given number of attempts gets an equal share of the time that is left, any other ATTEMPT_S; and within it
   each of several addresses, so that one that does not answer takes no time from those after it.
4. A search that lasts is warned of after FIRST_S and then every EVERY_S (`protocol.long_wait`).

The bound ends with the first word of a master. What follows is a wait for the peers of its run, which let newcomers in
when their program comes to it.
"""

from __future__ import annotations

import trio

from pccl.protocol.long_wait import LongWait
from pccl.runtime.network.addresses import DIAL_S
from pccl.runtime.session.options import SessionError
from pccl.runtime.session.peer_session import NO_ANSWER_MEANS
from pccl.types import Result

REACH_S = 300.0
"""Seconds for which `connect` looks for a master, unless its caller gives a time or a number of attempts."""
ATTEMPTS_REACH_S = 30.0
"""The same for a caller who gives a number of attempts, unless more are wanted than fit: each counts for two
intervals."""
ATTEMPT_INTERVAL_S = 1.0
ATTEMPT_S = 5.0
"""Seconds in which each attempt of an open number must have a connection: enough to send a lost packet twice again."""
FIRST_S = 2.0
EVERY_S = 30.0
TAKEN_ONLY = "a connection is taken there, and nothing is answered"


def reach_s(attempts: int | None) -> float:
    """Return the seconds for which `connect` looks for a master where its caller gives no time."""
    return REACH_S if attempts is None else max(ATTEMPTS_REACH_S, 2 * attempts * ATTEMPT_INTERVAL_S)


class SearchWait(LongWait):
    """The schedule by which a search is warned of."""

    def __init__(self) -> None:
        super().__init__("connect", trio.current_time(), FIRST_S, EVERY_S)

    def ending(self, now: float) -> str:
        return f"{self.what} has ended its search for a master after {now - self.since:.1f} s"


class MasterSearch:
    """One search. Only for one trio task."""

    def __init__(
        self, address: str, masters: int, attempts_max: int | None, reach_s: float | None, is_bound: bool
    ) -> None:
        """`address` has so many `masters`. `attempts_max` None: there is no bound but time. `reach_s` is the time that
        the attempts share, and the end of the search where it `is_bound` by that; None: as long as it takes."""
        self.attempts = 0
        """Number of attempts that have been begun."""
        self._address = address
        self._masters = masters
        self._attempts_max = None if attempts_max is None else max(1, attempts_max)
        self._began_at = trio.current_time()
        self._shared_until = self._began_at + (float("inf") if reach_s is None else reach_s)
        self.ends_at = self._shared_until if is_bound else float("inf")
        """The time at which a master must have answered."""
        self._standing = f"no answer to a connection so far: {NO_ANSWER_MEANS}"
        """How far the present attempt has come, or how the last one has ended."""

    def begin(self) -> float:
        """Begin an attempt. Return the seconds in which each address must take a connection."""
        left_s = self.left_s
        share_s = ATTEMPT_S
        if self._attempts_max is not None:
            attempts_left = self._attempts_max - self.attempts
            share_s = (left_s - (attempts_left - 1) * ATTEMPT_INTERVAL_S) / attempts_left
        self.attempts += 1
        return min(left_s, max(DIAL_S, share_s / self._masters))

    @property
    def left_s(self) -> float:
        """Seconds that are left to the attempts."""
        return max(0.0, self._shared_until - trio.current_time())

    @property
    def seek_s(self) -> float:
        """Seconds for which a newcomer that a master has sent elsewhere looks for one that leads a run. A number of
        attempts says nothing about that."""
        return self.left_s if self._attempts_max is None else 0.0

    def has_failed(self, reason: str) -> None:
        """Note how an attempt has ended."""
        self._standing = reason

    def has_connected(self) -> None:
        """Note that something has taken a connection."""
        self._standing = TAKEN_ONLY

    def is_held(self, reason: str) -> None:
        """Note that the master which has taken the connection lets nobody in yet."""
        self._standing = f"it holds newcomers: it waits for {reason}"

    @property
    def is_over(self) -> bool:
        """Whether no further attempt is to be made."""
        is_last = self._attempts_max is not None and self.attempts >= self._attempts_max
        return is_last or trio.current_time() + ATTEMPT_INTERVAL_S >= self.ends_at

    def account(self) -> str:
        """Return in words how it stands."""
        of = "" if self._attempts_max is None else f" of {self._attempts_max}"
        return f"the master at {self._address}, attempt {self.attempts}{of}: {self._standing}"

    def failure(self, reason: str) -> SessionError:
        """Return the error for a search that is over: what was tried, how often, and what to do."""
        how_often = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        seconds = trio.current_time() - self._began_at
        text = f"{reason} ({how_often}) in {seconds:.1f} s; `pccl doctor {self._address}` looks for the reason"
        return SessionError(Result.MASTER_CONNECTION_FAILED, text)
