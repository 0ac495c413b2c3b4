"""A group of one rank: its ops are copies.

pccl reduces among peers and refuses an op of a peer that is alone. c10d allows groups of one, in which a collective
leaves things as they are, or copies what is given to where the result goes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from pccl.errors import PCCLError
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.torch.errors import BackendError, Names
from pccl.torch.memory_use import Use
from pccl.torch.specs import Fixed
from pccl.torch.work import PCCLWork, Script
from pccl.types import Collective, Result


class Alone:
    """The calls of a group of one rank. Each is over at once. Thread-safe."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self.calls = 0
        self.failed: BackendError | None = None

    def next_lane(self) -> int:
        if self.failed is not None:
            raise self.failed
        self.calls += 1
        return 0

    def enter(self, work: PCCLWork, after: Sequence[object] = ()) -> None:
        return

    def go(self, work: PCCLWork, waits: bool, after: Sequence[object] = ()) -> None:
        work.run()

    def claim(self, call: object, is_collective: bool = False) -> bool:
        return False

    def leave_lane(self, who: object) -> None:
        return

    def run_op(self, spec: OpSpec, title: str, timeout_s: float) -> None:
        raise AssertionError("there is no lane to be claimed")

    def run_script(self, script: Script, title: str, timeout_s: float) -> None:
        raise AssertionError("there is no lane to be claimed")

    def watch(self, work: PCCLWork) -> None:
        return

    def open_collectives(self) -> list[PCCLWork]:
        return []

    def is_idle(self) -> bool:
        return True

    def users(self, use: Use) -> list[PCCLWork]:
        return []

    def fail(self, error: BackendError) -> None:
        self.failed = self.failed or error

    def leave(self, error: BackendError) -> None:
        """Let all later calls raise `error`: this rank has left the group."""
        self.failed = error

    def trouble(self) -> BackendError | None:
        """Return what has happened to the group, as `Scheduler.trouble`."""
        return self.failed

    @property
    def heard(self) -> BackendError | None:
        """The first failure that a call has met."""
        return self.failed

    def require_pair(self, other: int) -> None:
        if self.failed is not None:
            raise self.failed

    def may_repeat(self, batch: Sequence[OpSpec], error: PCCLError) -> bool:
        return False

    def stop(self) -> None:
        return

    # What works need: `work.Driver`.

    def run(self, spec: OpSpec, title: str, timeout_s: float) -> PendingOp:
        if spec.collective is Collective.SEND:
            raise PCCLError(Result.INVALID_ARGUMENT, title, "there is no other rank in this group")
        buffers = spec.buffers
        placed = buffers.place(0, 1) if isinstance(buffers, Fixed) else buffers
        assert isinstance(placed, Buffers)
        if placed.send != placed.recv and placed.count:
            ctypes.memmove(placed.recv, placed.send, placed.count * spec.dtype.itemsize)
        op = PendingOp(0, spec, _NOBODY)
        op.note_written()
        return op

    def launch(self, spec: OpSpec, title: str, over: Callable[[], None], ops: list[PendingOp]) -> None:
        ops.append(self.run(spec, title, 0.0))
        over()

    def outcome(self, op: PendingOp, title: str) -> None:
        return

    def give_up(self, ops: Sequence[PendingOp], title: str, timeout_s: float) -> None:
        return

    def failure(self, title: str, error: PCCLError, specs: Sequence[OpSpec] = ()) -> BackendError:
        return self._names.failure(title, error)

    def later(self, call: Callable[[], None]) -> None:
        call()

    def finished(self, work: PCCLWork) -> None:
        return


class _Nobody:
    """The session of ops that need none."""

    def ask_for_release(self, op: PendingOp) -> None:
        return

    def wait_for_release(self, op: PendingOp) -> None:
        return

    def leave_for(self, reason: str) -> None:
        return

    def whom(self, op: PendingOp) -> str:
        return "nobody"


_NOBODY = _Nobody()
