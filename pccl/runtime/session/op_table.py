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
        """Ops that the machine has, or is about to get."""
        self.holders: dict[tuple[int, Pair | None], PendingOp] = {}
        """The op in flight of each name."""

    def __bool__(self) -> bool:
        return bool(self.ops or self.holders)

    def holds_tag(self, op: PendingOp) -> bool:
        return self.holders.get(op.name) is op

    def release_tag(self, op: PendingOp) -> None:
        if self.holders.get(op.name) is op:
            self.holders.pop(op.name, None)  # another thread may do so at the same time

    def finish(self, op: PendingOp, result: OpResult) -> None:
        """End an op for its caller."""
        op.finish(result)
        self.ops.pop(op.op, None)
