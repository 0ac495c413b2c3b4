"""What callers may rely on, judged by what they were told, and only that.

Arrays describe themselves: the first PEERS_MAX elements count the contributions of each caller, the next PEERS_MAX sum
up the numbers of their calls, the rest is random. So a result tells which calls it is made of.

    1  A result is the sum of exactly one call of each of `world_size` callers, its own among them.
    2  Of the calls that a result is made of, none has been told that it was aborted, and all that have a result have
       the same bytes.
    3  A peer that gets no result has its arrays as they were.
    4  Those that end a sync of one run with one revision at the same time hold the same content. Peers that were cut
       off from all masters but one that leads no run may found a second run, which never becomes one with the first.
    5  Calls raise PCCLError, and none with INTERNAL_ERROR; no error is logged.

What a caller hears while its killed process is unwound does not count: a real one is gone at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pccl import PCCLError, Result

PEERS_MAX = 24
Array = np.ndarray[Any, np.dtype[np.int64]]

UNKNOWN = frozenset(
    {
        Result.OUTCOME_UNKNOWN,
        Result.MASTER_CONNECTION_FAILED,
        Result.RANK_CONNECTION_FAILED,
        Result.NOT_INITIALIZED,
    }
)
"""Results of a caller that does not know what became of its op, or takes no part in the run any more."""
EXPECTED = UNKNOWN | {
    Result.RANK_CONNECTION_LOST,
    Result.TIMEOUT,
    Result.TOO_FEW_PEERS,
    Result.INVALID_USAGE,
    Result.INVALID_ARGUMENT,
    Result.NO_SHARED_STATE_AVAILABLE,
    Result.PENDING_ASYNC_OPS,
}


class CheckError(AssertionError):
    """Something that callers may rely on does not hold."""


@dataclass
class Call:
    """One call of an op, as its caller sees it."""

    caller: int
    number: int
    given: Array
    result: bytes | None = None
    code: Result | None = None
    """The reason for a missing result; None while it is not known, and if the caller was interrupted."""


@dataclass
class Synced:
    caller: int
    start_s: float
    end_s: float
    revision: int
    content: bytes
    run: str


class Checker:
    def __init__(self, is_alive: Callable[[int], bool] = lambda caller: True) -> None:
        """`is_alive` says whether the process of a caller lives."""
        self._is_alive = is_alive
        self._calls: dict[tuple[int, int], Call] = {}
        self._synced: list[Synced] = []
        self._next_call = 1
        self.commits = self.aborts = self.syncs = 0

    def call(self, caller: int, rest: Array) -> Call:
        """Note a call that is about to be made, with arrays of its own."""
        number = self._next_call
        self._next_call += 1
        given = np.zeros(2 * PEERS_MAX + len(rest), np.int64)
        given[caller], given[PEERS_MAX + caller] = 1, number
        given[2 * PEERS_MAX :] = rest
        call = self._calls[caller, number] = Call(caller, number, given)
        return call

    def committed(self, call: Call, result: Array, world_size: int) -> None:
        if not self._is_alive(call.caller):
            return
        self.commits += 1
        call.result = result.tobytes()
        counts, numbers = result[:PEERS_MAX], result[PEERS_MAX : 2 * PEERS_MAX]
        callers = [int(caller) for caller in np.flatnonzero(counts)]
        _require(
            bool((counts[callers] == 1).all()) and len(callers) == world_size and call.caller in callers,
            f"call {call.number} of caller {call.caller} got {counts[callers]} contributions of callers {callers} "
            f"in a world of {world_size}",
        )
        total = np.zeros_like(result)
        for caller in callers:
            other = self._calls.get((caller, int(numbers[caller])))
            _require(other is not None, f"no peer has made call {numbers[caller]} of caller {caller}")
            assert other is not None
            total += other.given
        _require(bool((total == result).all()), f"call {call.number} of caller {call.caller} got a wrong sum")

    def failed(self, call: Call, error: PCCLError | Result) -> None:
        if not self._is_alive(call.caller):
            return
        self.aborts += 1
        call.code = error if isinstance(error, Result) else error.result
        self.raised(call.caller, error)

    def unharmed(self, call: Call, array: Array) -> None:
        """Check the caller's array after a call that brought no result."""
        _require(
            not self._is_alive(call.caller) or bool((array == call.given).all()),
            f"call {call.number} of caller {call.caller} failed and its array differs",
        )

    def raised(self, caller: int, error: PCCLError | Result) -> None:
        code = error if isinstance(error, Result) else error.result
        _require(code in EXPECTED or not self._is_alive(caller), f"an unexpected error: {error!r}")

    def synced(self, done: Synced) -> None:
        if not self._is_alive(done.caller):
            return
        self.syncs += 1
        for other in self._synced[-2 * PEERS_MAX :]:
            is_alike = other.run == done.run and other.revision == done.revision
            if is_alike and other.end_s > done.start_s and other.start_s < done.end_s:
                _require(
                    other.content == done.content,
                    f"callers {other.caller} and {done.caller} hold different contents of revision {done.revision}",
                )
        self._synced.append(done)

    def finish(self) -> None:
        """Check what can be checked when all is over: each result with those of the other callers."""
        for call in self._calls.values():
            if call.result is None:
                continue
            result = np.frombuffer(call.result, np.int64)
            for caller in np.flatnonzero(result[:PEERS_MAX]):
                other = self._calls[int(caller), int(result[PEERS_MAX + caller])]
                what = f"caller {call.caller} has committed call {call.number} with call {other.number} of {caller}"
                if other.result is not None:
                    _require(other.result == call.result, f"{what}, which has other bytes")
                else:
                    _require(other.code is None or other.code in UNKNOWN, f"{what}, which was told {other.code!r}")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise CheckError(what)
