"""The ops of a session that are in flight, by number and by tag."""

from __future__ import annotations

from pccl.protocol.peer import OpResult
from pccl.runtime.data_plane.op_spec import Pair
from pccl.runtime.data_plane.pending import PendingOp


class OpTable:
    """Ops from their launch until their result is known. `claim` and `release_tag` are for any thread, all else is for
    the trio thread."""

    def __init__(self) -> None:
        self.ops: dict[int, PendingOp] = {}
        """Ops that the machine knows, or is about to."""
        self._holders: dict[tuple[int, Pair | None], PendingOp] = {}

    def __bool__(self) -> bool:
        return bool(self.ops or self._holders)

    def claim(self, op: PendingOp) -> PendingOp:
        """Return the op that has the name of this one, which is this one from now on if there was none."""
        return self._holders.setdefault(op.name, op)

    def holds_tag(self, op: PendingOp) -> bool:
        return self._holders.get(op.name) is op

    def release_tag(self, op: PendingOp) -> None:
        if self._holders.get(op.name) is op:
            # Its caller may do so at the same time.
            self._holders.pop(op.name, None)

    def finish(self, op: PendingOp, result: OpResult) -> None:
        """End an op for its caller. Its tag is freed first: a waiting thread may launch the next one at once."""
        self.release_tag(op)
        op.finish(result)
        self.ops.pop(op.op, None)
