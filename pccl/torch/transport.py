"""Executes a process group's ops. No other module of this package uses private parts of a communicator.

`Transport` launches ops on a communicator. `LocalTransport` executes the ops of a group of one rank as copies,
because a communicator rejects ops with a single peer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

from pccl._session_holder import SessionErrors
from pccl.communicator import Communicator
from pccl.errors import PCCLError
from pccl.handle import CANCEL_GRACE_S, delivered, gave_up, require_outcome
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.types import Collective, Result

Ring = tuple[int, ...]

LEFT = "left"
"""The first word of the loss reason for a peer that left on purpose."""
LOCAL_RING: Ring = (0,)


def be_of_rank(communicator: Communicator, rank: int) -> None:
    """Add the global rank to the peer's name in logs, and log the normal end of a group at INFO: errors report what its
    calls lose. Call this before `connect`."""
    options = communicator._inner._options
    communicator._inner._options = replace(options, is_quiet=True, name=f"{options.name}, rank {rank}")


class LocalOp:
    """A copy that is over when the launch returns."""

    is_over = True

    def join_started(self) -> None:
        return


Op = PendingOp | LocalOp


class Transport:
    """Executes a group's ops on a communicator. Thread-safe."""

    ring: Ring
    """The group's peers, in the run's order when the group was formed."""

    def __init__(self, communicator: Communicator, ring: Ring) -> None:
        self.communicator = communicator
        self.ring = ring

    def present_ring(self) -> Ring | None:
        """Return the peers that are now in the run, or None if the session has ended."""
        session = self.communicator._inner._session
        return session.view.ring if session is not None and session.view is not None else None

    def run(self, spec: OpSpec, title: str, timeout_s: float) -> Op:
        """Execute an op and wait for it. Raises PCCLError."""
        return self.communicator._run(spec, timeout_s, title, lambda op, _: op)

    def launch(self, spec: OpSpec, title: str, started: Callable[[Op], None], over: Callable[[], None]) -> None:
        """Launch an op. `started(op)` is called before the launch, and `over()` in any thread after the op.

        Raises PCCLError if the op cannot be launched; `over` is then not called.
        """
        session = self.communicator._inner.session(title)
        op = session.ops.new(spec)
        started(op)
        with SessionErrors(title):
            if spec.pair is not None:
                session.ops.start(op)
            else:
                session.ops.launch(op)
        op.when_over(over)

    def check(self, op: Op, title: str) -> None:
        """Raise PCCLError if a completed op has failed or did not include the whole group."""
        assert isinstance(op, PendingOp)
        delivered(op, title)
        if op.ring != self.ring and op.name[1] is None:
            text = f"only peers {list(op.ring)} took part: the others are lost"
            raise PCCLError(Result.RANK_CONNECTION_LOST, title, text)

    def cancel(self, op: Op, title: str, timeout_s: float) -> None:
        """Abort an op on all ranks and wait until it is over. Raises OUTCOME_UNKNOWN if no verdict arrives."""
        assert isinstance(op, PendingOp)
        session = self.communicator._inner.session(title)
        if op.is_over:
            return
        session.ops.cancel(op, Result.TIMEOUT, gave_up(session, timeout_s, op))
        op.wait(CANCEL_GRACE_S)
        op.reclaim()
        require_outcome(session, [op], title)

    def losses(self) -> dict[int, str]:
        """Return why each missing peer left the run, by peer number. Never fails, even after the communicator's end."""
        session = self.communicator._inner._session
        return {} if session is None else dict(session.losses)

    def left_in(self, peer: int) -> int:
        """Return the epoch that excluded a missing peer, or 0 if it is unknown."""
        session = self.communicator._inner._session
        return 0 if session is None else session.left_out_by.get(peer, 0)

    def require_alive(self) -> None:
        """Raise PCCLError if the session has ended."""
        self.communicator._inner.view("membership")


class LocalTransport(Transport):
    """Executes the ops of a group of one rank."""

    def __init__(self) -> None:
        self.ring = LOCAL_RING

    def present_ring(self) -> Ring:
        return self.ring

    def run(self, spec: OpSpec, title: str, timeout_s: float) -> Op:
        if spec.collective is Collective.SEND:
            raise PCCLError(Result.INVALID_ARGUMENT, title, "there is no other rank in this group")
        placed = spec.placed(0, 1).buffers
        assert isinstance(placed, Buffers)
        if placed.send != placed.recv and placed.count:
            ctypes.memmove(placed.recv, placed.send, placed.count * spec.dtype.itemsize)
        if spec.written is not None:
            spec.written()
        return LocalOp()

    def launch(self, spec: OpSpec, title: str, started: Callable[[Op], None], over: Callable[[], None]) -> None:
        started(self.run(spec, title, 0.0))
        over()

    def check(self, op: Op, title: str) -> None:
        return

    def cancel(self, op: Op, title: str, timeout_s: float) -> None:
        return

    def losses(self) -> dict[int, str]:
        return {}

    def left_in(self, peer: int) -> int:
        return 0

    def require_alive(self) -> None:
        return
