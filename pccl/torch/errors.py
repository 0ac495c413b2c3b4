"""The backend's exceptions, and the conversion of pccl's errors, which name peers, to errors that name ranks.

The exceptions derive from RuntimeError, which torch's own backends raise. ArgumentError also derives from ValueError,
which some of those backends raise for invalid arguments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.distributed import DistBackendError

from pccl.errors import PCCLError
from pccl.types import Result

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
"""Results after which a process group is unusable because a rank is lost or may have different results."""

ADVICE = {
    Result.RANK_CONNECTION_LOST: (
        "the operation was aborted on all survivors and its tensors are unchanged. This process group can no longer be "
        "used: reconfigure it with the remaining ranks, or destroy it and create another one"
    ),
    Result.MASTER_CONNECTION_FAILED: (
        "this process group can no longer be used: reconfigure it, or destroy it and create another one"
    ),
    Result.TIMEOUT: (
        "the operation timed out. It was aborted on all ranks that had called it, and its tensors are unchanged; "
        "find out why a rank is late or missing, or set a longer timeout"
    ),
}

_PEER = r"\d+\b(?: \([^()]*\))?"
_PEERS = re.compile(rf"\b(?:peer (?P<one>{_PEER})|peers (?P<all>{_PEER}(?:(?:, | and ){_PEER})*))")
"""One peer, or a list of peers, each optionally followed by its process in parentheses."""
_OWN_LIMIT = re.compile(r"\. master_timeout is less than .* outlive masters")
"""Advice about a limit that the backend sets itself."""
_OWN_RANK = re.compile(r", rank \d+(?=\)$)")
"""The end of a process's name (`transport.be_of_rank`)."""
_ONE_OF = re.compile(r"(?:^|(?<=, )|(?<= and ))(\d+)( \([^()]*\))?")


class ArgumentError(RuntimeError, ValueError):
    """An argument of a collective is invalid. The call was not started, so no other rank is affected."""


class BackendError(DistBackendError):  # type: ignore[misc]
    """An operation of a process group failed on this rank and on all others that called it.

    Attributes:
        result: The kind of failure, a `pccl.Result`.
        lost: The global ranks that are lost, the same on all survivors. A rank that left on purpose is included only
            if no other rank was missing before.
    """

    def __init__(self, message: str, result: Result, lost: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.result = result
        self.lost = tuple(lost)


class Names:
    """The names of a group's ranks in messages."""

    def __init__(self, group: str, rank: int, global_ranks: Sequence[int], processes: Sequence[str] = ()) -> None:
        """Args:
        global_ranks: The global rank of each rank of the group.
        processes: The process name of each rank, if known.
        """
        self.group = group
        self.rank = rank
        self.global_ranks = tuple(global_ranks)
        self._processes = tuple(processes)
        self._rank_of: dict[int, int] = {}
        self.is_first_rank_master = False
        """Whether a lost master means that the first rank is lost, as in a group of two."""

    def number(self, peers: Sequence[int]) -> None:
        """Set the peer number of each rank."""
        self._rank_of = {peer: rank for rank, peer in enumerate(peers)}

    def of(self, rank: int) -> str:
        """Return the name of a rank of the group."""
        process = f" ({self._processes[rank]})" if self._processes else ""
        return f"rank {self.global_ranks[rank]}{process}"

    def ranks_in(self, text: str) -> str:
        """Return the text with rank names in place of peer numbers."""

        def name(match: re.Match[str]) -> str:
            rank, process = self._rank_of.get(int(match[1])), _OWN_RANK.sub("", match[2] or "")
            if rank is None:
                return f"peer {match[0]}"
            return self.of(rank) if self._processes else self.of(rank) + process

        return _PEERS.sub(lambda found: _ONE_OF.sub(name, found["one"] or found["all"]), text)

    def lost(self, ring: Sequence[int]) -> list[int]:
        """Return the ranks whose peers are not in a ring."""
        return [rank for peer, rank in self._rank_of.items() if peer not in ring]

    def failure(self, what: str, error: PCCLError, lost: Sequence[int] = ()) -> BackendError:
        """Return the exception for an operation that failed with a PCCLError."""
        reason = _OWN_LIMIT.sub("", self.ranks_in(error.message))
        if error.result is Result.MASTER_CONNECTION_FAILED and self.is_first_rank_master:
            reason = f"{self.of(0)} is lost or cannot be reached; its process ran the group's master: {reason}"
            lost = lost or [0]
        is_local = error.result is Result.TIMEOUT and "aborted on all" not in error.message
        advice = "" if is_local else ADVICE.get(error.result, "")
        gone = f" ({', '.join(self.of(rank) for rank in lost)} lost)" if lost else ""
        # Programs recognize a timeout of c10d's backends by these words.
        kind = "TIMEOUT: Timed out after waiting" if error.result is Result.TIMEOUT else error.result.name
        text = f"{what} of {self.group} failed on {self.of(self.rank)}: {kind}{gone}: {reason}"
        return BackendError(f"{text}; {advice}" if advice else text, error.result, [self.global_ranks[r] for r in lost])
