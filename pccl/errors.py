"""The exceptions of the public API."""

from __future__ import annotations

from typing import Any

from pccl._integers import as_int
from pccl.protocol.messages import KICKED_OUT
from pccl.types import Result

RETURN = "; this communicator can connect() again, and then synchronize its state (docs/failures.md, Coming back)"


class PCCLError(Exception):
    """A call that did not succeed. The constructor returns the subclass for the given `Result`.

    Attributes:
        result: The kind of failure, a `Result`.
        func_name: The call that failed.
        message: What went wrong, which peer it concerns, and what to do.
    """

    def __new__(cls, result: Result, func_name: str = "", message: str = "") -> PCCLError:
        kind = _CLASSES.get(result, cls) if cls is PCCLError else cls
        if kind is not cls:
            return kind.__new__(kind, result, func_name, message)
        return super().__new__(cls, result, func_name, message)

    def __init__(self, result: Result, func_name: str = "", message: str = "") -> None:
        super().__init__()
        self.result = result
        self.func_name = func_name
        self.message = message
        self.args = (result, func_name, message)

    def __str__(self) -> str:
        head = f"{self.func_name}: {self.result.name}" if self.func_name else self.result.name
        text = f"{head}: {self.message}" if self.message else head
        return text + RETURN if self.message.startswith("evicted: ") else text


class UsageError(PCCLError):
    """The caller made a mistake: INVALID_ARGUMENT, INVALID_USAGE, PENDING_ASYNC_OPS or NOT_INITIALIZED."""


class MismatchError(UsageError):
    """The calls of several peers do not match: INVALID_ARGUMENT or INVALID_USAGE, on all of them."""


class TooFewPeersError(PCCLError):
    """This peer is alone in its group: TOO_FEW_PEERS."""


class PeerLostError(PCCLError):
    """A peer was lost and the op was aborted on all others, or a link failed: RANK_CONNECTION_LOST or _FAILED."""


class MasterLostError(PCCLError):
    """The master cannot be reached, or it refused or evicted this peer: MASTER_CONNECTION_FAILED."""


class OpTimeoutError(PCCLError, TimeoutError):
    """The caller's timeout has passed, or its op was cancelled: TIMEOUT."""


class OutcomeUnknownError(PCCLError):
    """Other peers may have committed an op that this one gave up: OUTCOME_UNKNOWN."""


class StateUnavailableError(PCCLError):
    """No peer can provide the shared state: NO_SHARED_STATE_AVAILABLE."""


class InternalError(PCCLError):
    """A bug in pccl, or a device failure: INTERNAL_ERROR."""


_CLASSES: dict[Result, type[PCCLError]] = {
    Result.NOT_INITIALIZED: UsageError,
    Result.INTERNAL_ERROR: InternalError,
    Result.INVALID_ARGUMENT: UsageError,
    Result.INVALID_USAGE: UsageError,
    Result.TOO_FEW_PEERS: TooFewPeersError,
    Result.MASTER_CONNECTION_FAILED: MasterLostError,
    Result.RANK_CONNECTION_FAILED: PeerLostError,
    Result.RANK_CONNECTION_LOST: PeerLostError,
    Result.NO_SHARED_STATE_AVAILABLE: StateUnavailableError,
    Result.PENDING_ASYNC_OPS: UsageError,
    Result.TIMEOUT: OpTimeoutError,
    Result.OUTCOME_UNKNOWN: OutcomeUnknownError,
}


def op_error(result: Result, func_name: str, message: str) -> PCCLError:
    """Return the error for an op that ended with `result` on all peers."""
    is_mismatch = result in (Result.INVALID_ARGUMENT, Result.INVALID_USAGE) and message != KICKED_OUT
    return (MismatchError if is_mismatch else PCCLError)(result, func_name, message)


def invalid(func_name: str, message: str) -> PCCLError:
    """Return the error for a wrong argument."""
    return PCCLError(Result.INVALID_ARGUMENT, func_name, message)


def integer_argument(name: str, given: Any, func_name: str, least: int | None = None, most: int | None = None) -> int:
    """Return `given` as an int. Raise INVALID_ARGUMENT if it is not an integer in [least, most]."""
    try:
        return as_int(name, given, least, most)
    except ValueError as error:
        raise invalid(func_name, str(error)) from None
