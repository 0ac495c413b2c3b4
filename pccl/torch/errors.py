"""The exceptions of the backend, and how a failure of pccl becomes one that names ranks.

torch's own backends raise RuntimeError for nearly everything, some of them ValueError for wrong arguments, so both
kinds derive from what callers of torch.distributed catch.

pccl names processes by peer numbers. A process group knows which rank has which number, so its texts name ranks.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed import DistBackendError

from pccl.errors import PCCLError
from pccl.types import Result

if TYPE_CHECKING:
    ErrorType = Any
else:
    try:
        from torch._C._distributed_c10d import ErrorType
    except ImportError:  # torch 2.6

        class ErrorType(enum.Enum):
            """What has happened to a group, as later versions of torch call it."""

            SUCCESS = 0
            TIMEOUT = 1
            COMM_ERROR = 2
            REMOTE_ERROR = 3


FATAL = frozenset(
    {
        Result.RANK_CONNECTION_LOST,
        Result.MASTER_CONNECTION_FAILED,
        Result.RANK_CONNECTION_FAILED,
        Result.NOT_INITIALIZED,
        Result.TOO_FEW_PEERS,
        Result.OUTCOME_UNKNOWN,
        Result.INTERNAL_ERROR,
    }
)
"""The results after which a process group can do nothing more: somebody is lost, or may have other results."""

ADVICE = {
    Result.RANK_CONNECTION_LOST: (
        "the operation was aborted on all survivors and its tensors are as they were. This process group cannot be "
        "used any more: reconfigure it with the ranks that are left (torch 2.15), or destroy it and make another one"
    ),
    Result.MASTER_CONNECTION_FAILED: (
        "this process group cannot be used any more: reconfigure it (torch 2.15), or destroy it and make another one"
    ),
    Result.TIMEOUT: (
        "the operation timed out. It was aborted on all ranks that had called it and its tensors are as they were; see "
        "why a rank comes late or not at all, or give a longer timeout"
    ),
}

_PEER = r"\d+\b(?: \([^()]*\))?"
_PEERS = re.compile(rf"\b(?:peer (?P<one>{_PEER})|peers (?P<all>{_PEER}(?:(?:, | and ){_PEER})*))")
"""One peer, or a list of peers, each perhaps with its process behind it in parentheses."""
_OWN_LIMIT = re.compile(r"\. master_timeout is less than .* outlive masters")
"""What is said of a limit that the backend sets, and no caller of torch.distributed."""
_ONE_OF = re.compile(r"(?:^|(?<=, )|(?<= and ))(\d+)( \([^()]*\))?")


class ArgumentError(RuntimeError, ValueError):
    """An argument with which a collective cannot be called. No other rank has heard of the call."""


class BackendError(DistBackendError):  # type: ignore[misc]
    """An operation of a process group that did not succeed, on this rank and on all others that called it.

    `result` is the kind of failure, a `pccl.Result`, and `lost` has the global ranks that are known to be lost: on all
    ranks the same, where one after the other hears of it and leaves the group. A rank that left on purpose is among
    them if nobody was lost before.
    """

    def __init__(self, message: str, result: Result, lost: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.result = result
        self.lost = tuple(lost)


class Names:
    """The names of a group's ranks, for texts."""

    def __init__(self, group: str, rank: int, global_ranks: Sequence[int], processes: Sequence[str] = ()) -> None:
        """`global_ranks` has the global rank of each rank of the group, and `processes` the names of their processes,
        where they are known."""
        self.group = group
        self.rank = rank
        self.global_ranks = tuple(global_ranks)
        self._processes = tuple(processes)
        self._rank_of: dict[int, int] = {}
        self.is_first_rank_master = False
        """Whether a lost master means that the first rank, which runs it, is lost: in a group of two."""

    def number(self, peers: Sequence[int]) -> None:
        """Note the peer number of each rank of the group."""
        self._rank_of = {peer: rank for rank, peer in enumerate(peers)}

    def of(self, rank: int) -> str:
        """Return the name of a rank of the group."""
        process = f" ({self._processes[rank]})" if self._processes else ""
        return f"rank {self.global_ranks[rank]}{process}"

    def ranks_in(self, text: str) -> str:
        """Return the text with the names of ranks where it has numbers of peers."""

        def name(match: re.Match[str]) -> str:
            rank, process = self._rank_of.get(int(match[1])), match[2] or ""
            if rank is None:
                return f"peer {match[0]}"
            return self.of(rank) if self._processes else self.of(rank) + process

        return _PEERS.sub(lambda found: _ONE_OF.sub(name, found["one"] or found["all"]), text)

    def lost(self, ring: Sequence[int]) -> list[int]:
        """Return the ranks of the group whose peers are not in a ring."""
        return [rank for peer, rank in self._rank_of.items() if peer not in ring]

    def failure(self, what: str, error: PCCLError, lost: Sequence[int] = ()) -> BackendError:
        """Return what the caller of an operation is to get for a failure of pccl."""
        reason = _OWN_LIMIT.sub("", self.ranks_in(error.message))
        if error.result is Result.MASTER_CONNECTION_FAILED and self.is_first_rank_master:
            reason = f"{self.of(0)} is lost or cannot be reached, in whose process the group's master ran: {reason}"
            lost = lost or [0]
        advice = ADVICE.get(error.result, "")
        gone = f" ({', '.join(self.of(rank) for rank in lost)} lost)" if lost else ""
        # Programs tell a timeout of c10d's backends by these words.
        kind = "TIMEOUT: Timed out after waiting" if error.result is Result.TIMEOUT else error.result.name
        text = f"{what} of {self.group} failed on {self.of(self.rank)}: {kind}{gone}: {reason}"
        return BackendError(f"{text}; {advice}" if advice else text, error.result, [self.global_ranks[r] for r in lost])
