"""Whole ops that go on in pieces when another peer has them in pieces; see `staged_ops`.

A whole op that can be divided is remembered with what it takes to launch it again. When the engine meets a marker, the
op is *taken back*: aborted in this peer's engine alone, which restores its arrays. Then it goes on in pieces. Later ops
of that epoch are in pieces from the beginning.

While an op is being taken back, verdicts, freezes and detaches are only noted: they apply to what goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pccl.protocol.peer import SubmitOp
from pccl.protocol.topology import MESH_PEERS_MAX
from pccl.runtime.data_plane.engine import Verdict
from pccl.runtime.data_plane.events import EngineEvent, OpEnded, OpMismatch, OpRefused
from pccl.runtime.data_plane.interfaces import OpEngine
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec
from pccl.runtime.data_plane.pieces import announced_bytes, piece_elements
from pccl.types import Collective


@dataclass(slots=True)
class _TakenBack:
    """A whole op that is being taken back, to go on in pieces."""

    launch: SubmitOp
    spec: OpSpec
    is_closed: bool = False
    """Whether there is a verdict, so that it does not go on."""
    is_frozen: bool = False
    is_detached: bool = False
    """Whether its caller has its arrays back, so that it goes on with the copy, or not at all."""


def can_be_in_pieces(launch: SubmitOp) -> bool:
    """Return whether an op of the group may be in pieces. All peers come to the same."""
    return launch.is_mutual or launch.world_size > MESH_PEERS_MAX


def can_divide(launch: SubmitOp, spec: OpSpec) -> bool:
    """Return whether an op with arrays in memory can be in pieces: all peers meet its marker, if one has it so."""
    if spec.collective is not Collective.ALL_REDUCE or not launch.is_mutual or not isinstance(spec.buffers, Buffers):
        return False
    return 0 < piece_elements(spec.dtype.itemsize) < spec.buffers.count


class Division:
    """The whole ops of an engine that can be divided, or are being divided."""

    def __init__(self, engine: OpEngine, go_on: Callable[[SubmitOp, OpSpec, bool], None]) -> None:
        """`go_on` has an op go on in pieces; the last argument says whether it was frozen meanwhile."""
        self._engine = engine
        self._go_on = go_on
        self._divisible: dict[int, tuple[SubmitOp, OpSpec]] = {}
        self._taken_back: dict[int, _TakenBack] = {}
        self._divided_epoch = -1
        """The epoch in which another peer has ops in pieces."""

    def __bool__(self) -> bool:
        return bool(self._divisible or self._taken_back)

    def is_due(self, launch: SubmitOp) -> bool:
        """Return whether an op that can be divided should be, from the beginning."""
        return launch.epoch == self._divided_epoch

    def submit(self, launch: SubmitOp, spec: OpSpec) -> None:
        """Submit an op that can be divided as a whole. Errors as in `OpEngine.submit`."""
        self._engine.submit(launch, spec)
        self._divisible[launch.op] = launch, spec

    def end(self, op: int, verdict: Verdict) -> bool:
        """Note a verdict. Return whether the op is being taken back, so that it has not to be carried out."""
        self._divisible.pop(op, None)
        taken_back = self._taken_back.get(op)
        if taken_back is None:
            return False
        assert verdict is Verdict.ABORT, "it cannot have been done"
        taken_back.is_closed = True
        return True

    def freeze(self, op: int) -> bool:
        """Note that an op is frozen. Return whether it is being taken back, so that the engine need not freeze it."""
        taken_back = self._taken_back.get(op)
        if taken_back is None:
            self._divisible.pop(op, None)
            return False
        taken_back.is_frozen = True
        return True

    def detach(self, op: int) -> None:
        """Note that an op stops, since its caller has given it up."""
        taken_back = self._taken_back.get(op)
        if taken_back is not None:
            taken_back.is_detached = True
        self._divisible.pop(op, None)

    # Events of whole ops.

    def mismatch(self, event: OpMismatch) -> EngineEvent | None:
        """Take the op back if the other peer has it in pieces of the same size and nothing else differs."""
        if event.op in self._divisible:
            launch, spec = self._divisible.pop(event.op)
            if event.their_piece_bytes == announced_bytes() and event.steps is None:
                self._divided_epoch = launch.epoch
                self._taken_back[event.op] = _TakenBack(launch, spec)
                self._engine.end(event.op, Verdict.ABORT)
                return None
        return event.in_pieces()

    def ended(self, event: OpEnded) -> EngineEvent | None:
        """Have an op go on that was taken back."""
        taken_back = self._taken_back.pop(event.op, None)
        if taken_back is None or taken_back.is_closed:
            return event
        if taken_back.is_detached:
            return OpRefused(event.op, "its caller has given it up")
        self._go_on(taken_back.launch, taken_back.spec, taken_back.is_frozen)
        return None

    def refused(self, event: OpRefused) -> EngineEvent:
        """Forget an op that the engine does not take after all."""
        self._divisible.pop(event.op, None)
        self._taken_back.pop(event.op, None)
        return event
