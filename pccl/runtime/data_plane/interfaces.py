"""The interfaces between the data plane's parts, and between it and the session.

    OpEngine        ops whose arrays are in memory: `EngineThreads`, as `StagedOps` needs it
    Links           connections to other peers: `EngineThreads`, as the session's `Outbound` needs it
    SessionEngine   all of `EngineThreads`, as the session itself needs it
    Ops             all ops: `StagedOps`, as the session's `EngineBridge` and `Reclaims` need it

All of them are for one thread at a time.
"""

from __future__ import annotations

from typing import Protocol

from pccl.protocol.auth import Keys
from pccl.protocol.peer import SubmitOp
from pccl.runtime.data_plane.engine import EngineFastPath, Verdict
from pccl.runtime.data_plane.events import EngineEvent
from pccl.runtime.data_plane.op_records import Row
from pccl.runtime.data_plane.op_request import OpRequest
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec


class OpLifecycle(Protocol):
    """Ops from their launch to their end. Every call that is followed by an event says so."""

    @property
    def event_fds(self) -> list[int]:
        """Descriptors, one of which is readable while `events` has something to return."""

    @property
    def is_closed(self) -> bool: ...

    def submit(self, launch: SubmitOp, spec: OpSpec) -> None:
        """Start an op. ValueError for arguments that cannot be had, RootLostError, MemoryError."""

    def end(self, op: int, verdict: Verdict) -> None:
        """Carry a verdict out. OpEnded follows, unless it is COMMIT_BY_ALL, or an OpRefused that is on its way
        already."""

    def freeze(self, epoch: int) -> None:
        """Stop all ops up to this epoch. GroupFrozen follows."""

    def freeze_op(self, op: int) -> None:
        """Stop an op. OpFrozen follows, or an OpRefused that is on its way already."""

    def forget_ops(self, epoch: int, tag: int, uses: range) -> None:
        """Drop what has come for these uses of a tag, which will not be submitted here."""

    def events(self) -> list[EngineEvent]:
        """Return what has happened since the last call; for each op and for each link in order."""

    def close(self) -> None:
        """Stop all threads; open ops are aborted and their buffers restored."""

    def forget_after_fork(self) -> None:
        """Close the copies in a forked child."""


class OpEngine(OpLifecycle, Protocol):
    """Ops whose arrays are in memory."""

    def check(self, launch: SubmitOp, spec: OpSpec) -> None:
        """Raise what `submit` would raise for the arguments, without submitting anything."""

    def detach(self, op: int, private: Buffers | None) -> bool:
        """Take the caller's arrays from an op, which goes on with this memory, or stops. OpDetached follows. False:
        there is no such op, and no event follows."""


class Ops(OpLifecycle, Protocol):
    """Ops whose arrays may come piece by piece."""

    def detach_from(self, op: int) -> None:
        """Stop an op and restore its caller's arrays. OpDetached follows, also if the op is unknown."""


class Links(Protocol):
    """Connections to other peers."""

    def link_add(self, link: int, index: int, fd: int, keys: Keys | None = None) -> None:
        """Take ownership of a connected socket, the link's connection of this index. `keys`: all that travels on it is
        encrypted."""

    def link_close(self, link: int) -> None: ...


class SessionEngine(OpEngine, Links, Protocol):
    """The engine of a session, which may have several threads."""

    def divide(self, threads: int) -> None:
        """Set the number of threads, before there are links and ops. OSError if the system denies them."""

    def new_fast_paths(self) -> list[EngineFastPath]:
        """Return a fast path into each thread. After `divide`."""

    def new_request(self) -> OpRequest:
        """Return a request to fill, for ops of this engine's group."""

    def set_link_timeout(self, seconds: float) -> None:
        """Set how long bytes may lie on a link and none get across before it is lost; 0: for ever."""

    def count_link(self, link: int) -> None:
        """Ask for the counters of a link. LinkCounters follow."""

    def records(self, since_ns: int) -> list[Row]:
        """Return the records of ops that have ended since then, as `Engine.records`. From any thread."""

    def stats(self) -> dict[str, int]:
        """Return the counters; after `close` those at the end. From any thread."""
