"""Ops whose elements become available piece by piece: several ops of the engine that are one to everybody else.

Theory of operation. A *source* stands for arrays that the engine cannot read, such as those on a device. It divides the
op into pieces, alike on all peers, and says when the elements of each are in memory; the piece is then submitted as an
op of its own, named by the op's tag and use, and the piece's number in the upper bits of the use. So pieces meet their
like on all peers in whatever order they come, and the rest of pccl knows one op:

    done        when the last piece is; completed likewise
    frozen      when all pieces that were submitted are: no further ones will be
    a verdict   goes to all pieces that were submitted; no further ones will be
    ended       when all those have given their memory back
    detached    when all those are, and nothing is read any more that further ones would be made of; known if all
                pieces of it were
    mismatch    the first that any piece reports

1. Commit never meets a piece that was not submitted: an op is done only when all its pieces were.
2. An epoch that is frozen takes no more pieces: its ops that are not done by then will be aborted.

*Meeting ops that are whole.* A peer whose arrays are in memory launches one op of the engine, which costs less, and
does not know that others have a source.

1. An op of several pieces has a *marker* (`marker_ops`): an op without elements under the name that the whole would
   have. It differs from the whole op, so the engines of all others report a mismatch.
2. A peer with a whole all_reduce that can be divided, and a link to every peer of the group, takes it back and joins in
   pieces (`division`); later ops in that epoch it divides from the beginning, and has markers for them.
3. What cannot be divided is a mismatch in truth, which all peers are told.
4. In a group in which two peers lack a link, a marker would not get to all. All know whether it is such a group, so a
   source is not divided there: the whole op is one piece. Only where the group is too large for a mesh, and so never
   has one, are sources divided although nobody else can join.
5. Nobody waits for markers, and no result depends on them. A committed op leaves its own behind until all peers have
   sent theirs, which may come last, or the epoch is over.

A first piece that is the whole op has no marker, and looks on the wire as if there were no pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pccl.protocol.peer import SubmitOp
from pccl.runtime.data_plane import division, pieces
from pccl.runtime.data_plane.engine import Verdict
from pccl.runtime.data_plane.events import (
    EngineEvent,
    OpCompleted,
    OpDetached,
    OpDone,
    OpEnded,
    OpFrozen,
    OpMismatch,
    OpRefused,
)
from pccl.runtime.data_plane.interfaces import OpEngine
from pccl.runtime.data_plane.mailbox import Mailbox
from pccl.runtime.data_plane.marker_ops import MarkerOps
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec
from pccl.runtime.data_plane.pieces import FIRST_PIECE_OP, PIECE_SHIFT, InMemory

OF_AN_OP = frozenset({OpDone, OpCompleted, OpFrozen, OpDetached, OpMismatch, OpEnded, OpRefused})
"""Kinds of events that may be of a piece or a marker. Ops on the fast path have neither."""


@dataclass(slots=True)
class _Staged:
    """An op in pieces."""

    launch: SubmitOp
    spec: OpSpec
    undone: int
    """Number of pieces that are not done, also of those to come."""
    uncompleted: int
    """Number of pieces that are not completed, also of those to come."""
    pieces: list[int] = field(default_factory=list)
    """The pieces that were submitted, in the engine's numbers."""
    places: dict[int, int] = field(default_factory=dict)
    """The place of each of them in the op, from 0."""
    unended: set[int] = field(default_factory=set)
    tx_bytes: int = 0
    rx_bytes: int = 0
    is_mismatched: bool = False
    is_closed: bool = False
    """There is a verdict, or the op was refused: no further pieces."""
    unfrozen: set[int] | None = None
    """Pieces that are being frozen; no further ones are taken."""
    refusal: str = ""

    def close(self) -> None:
        """Take no further pieces."""
        self.is_closed = True
        assert self.spec.source is not None
        self.spec.source.abandon()


class StagedOps:
    """An engine's ops, of which those with a source are in pieces. Owns the engine. Only from one thread at a time."""

    def __init__(self, engine: OpEngine) -> None:
        """Take over the engine. OSError if the system denies a descriptor."""
        numbers = itertools.count(FIRST_PIECE_OP)
        self._engine = engine
        self._markers = MarkerOps(engine, numbers)
        self._division = division.Division(engine, self._go_on_in_pieces)
        self._numbers = numbers
        self._staged: dict[int, _Staged] = {}
        self._op_of: dict[int, int] = {}
        """The op of each piece."""
        self._frozen_epoch = -1
        self._said = Mailbox()
        """The calls of sources, from their threads."""
        self._own: list[EngineEvent] = []
        """Events that no engine reports."""
        self._detaching: dict[int, set[int]] = {}
        """Pieces of an op that are not detached yet."""
        self._unknown: set[int] = set()
        """Ops of which the engine did not have every piece when they were detached."""
        self._detaching_op_of: dict[int, int] = {}
        """The op of each piece that is not detached yet, which may have ended meanwhile."""
        # What an event means for the op: of a whole one, of a piece, of a marker. Without an entry: of a whole op it
        # passes as it is, of a marker it means nothing.
        self._whole: dict[type, Callable[[Any], EngineEvent | None]] = {
            OpMismatch: self._division.mismatch,
            OpEnded: self._division.ended,
            OpRefused: self._division.refused,
        }
        self._piece: dict[type, Callable[[int, _Staged, Any], EngineEvent | None]] = {
            OpDone: self._piece_done,
            OpCompleted: self._piece_completed,
            OpFrozen: self._piece_frozen,
            OpMismatch: self._piece_mismatch,
            OpEnded: self._piece_ended,
            OpRefused: self._piece_refused,
        }
        self._marker: dict[type, Callable[[Any], EngineEvent | None]] = {
            OpDone: self._markers.done,
            OpEnded: self._markers.gone,
            OpRefused: self._markers.gone,
            OpMismatch: self._marker_mismatch,
        }

    @property
    def event_fds(self) -> list[int]:
        return [*self._engine.event_fds, self._said.fileno()]

    @property
    def is_closed(self) -> bool:
        return self._engine.is_closed

    def close(self) -> None:
        """Close the engine, and abandon all sources."""
        self._engine.close()
        for staged in self._staged.values():
            staged.close()
        self._said.close()

    def forget_after_fork(self) -> None:
        self._engine.forget_after_fork()
        self._said.close()

    # Launches.

    def submit(self, launch: SubmitOp, spec: OpSpec) -> None:
        """Start an op, as `Ops.submit`."""
        if spec.source is not None:
            assert launch.sequence < 1 << PIECE_SHIFT
            if spec.source.piece_count > 1 and not division.can_be_in_pieces(launch):
                spec.source.undivide()
            self._engine.check(launch, spec)  # what would be refused later
            self._stage(launch, spec, has_marker=spec.source.piece_count > 1)
        elif not division.can_divide(launch, spec):
            self._engine.submit(launch, spec)
        elif self._division.is_due(launch):
            self._stage(launch, spec._replace(source=InMemory(spec)), has_marker=True)
        else:
            self._division.submit(launch, spec)

    def _stage(self, launch: SubmitOp, spec: OpSpec, has_marker: bool) -> None:
        assert spec.source is not None
        op = launch.op
        self._markers.end_up_to(launch.epoch - 1)
        if has_marker:
            self._markers.add(launch, spec)
        self._staged[op] = _Staged(launch, spec, spec.source.piece_count, spec.source.piece_count)

        def ready(place: int, buffers: Buffers) -> None:
            self._said.post(partial(self._submit_piece, op, place, buffers))

        def failed(error: BaseException) -> None:
            self._said.post(partial(self._refuse, op, f"{type(error).__name__}: {error}"))

        spec.source.begin(ready, failed)

    def _go_on_in_pieces(self, launch: SubmitOp, spec: OpSpec, is_frozen: bool) -> None:
        """Launch an op anew that was taken back. Other peers have sent markers for it already."""
        self._stage(launch, spec._replace(source=InMemory(spec)), has_marker=False)
        if is_frozen:
            self._staged[launch.op].unfrozen = set()

    def _submit_piece(self, op: int, place: int, buffers: Buffers) -> None:
        staged = self._staged.get(op)
        if staged is None or staged.is_closed or staged.launch.epoch <= self._frozen_epoch:
            return
        if staged.unfrozen is not None:
            return
        piece = next(self._numbers)
        assert staged.spec.source is not None
        upper = place + 1 if staged.spec.source.piece_count > 1 else 0
        launch = replace(staged.launch, op=piece, sequence=staged.launch.sequence + (upper << PIECE_SHIFT))
        try:
            self._engine.submit(launch, staged.spec._replace(buffers=buffers, source=None))
        except MemoryError as error:
            self._refuse(op, f"out of memory: {error}")
            return
        self._op_of[piece] = op
        staged.pieces.append(piece)
        staged.places[piece] = place
        staged.unended.add(piece)

    def _refuse(self, op: int, reason: str) -> None:
        staged = self._staged.get(op)
        if staged is None or staged.is_closed:
            return
        staged.refusal = reason
        staged.close()
        self._markers.end_of(op)
        for piece in staged.pieces:
            self._engine.end(piece, Verdict.ABORT)
        if not staged.pieces:
            self._end_staged(op, staged)

    # Verdicts, freezing, detaching.

    def end(self, op: int, verdict: Verdict) -> None:
        """Carry a verdict out, as `Ops.end`."""
        if self._division.end(op, verdict):
            return
        staged = self._staged.get(op)
        if staged is None:
            self._engine.end(op, verdict)
            return
        if staged.refusal:
            return
        staged.close()
        if verdict is Verdict.ABORT:
            self._markers.end_of(op)
        if verdict is Verdict.COMMIT_BY_ALL:
            assert staged.undone == 0
            self._forget(op, staged)
        for piece in staged.pieces:
            self._engine.end(piece, verdict)
        if not staged.pieces:
            self._end_staged(op, staged)

    def _end_staged(self, op: int, staged: _Staged) -> None:
        if self._staged.pop(op, None) is None:
            return
        if staged.refusal:
            self._report(OpRefused(op, staged.refusal))
        else:
            self._report(OpEnded(op, staged.tx_bytes, staged.rx_bytes))

    def _forget(self, op: int, staged: _Staged) -> None:
        del self._staged[op]
        for piece in staged.pieces:
            del self._op_of[piece]

    def freeze(self, epoch: int) -> None:
        """Stop all ops up to this epoch, as `Ops.freeze`."""
        self._frozen_epoch = max(self._frozen_epoch, epoch)
        self._engine.freeze(epoch)
        self._markers.end_up_to(epoch)

    def freeze_op(self, op: int) -> None:
        """Stop an op, as `Ops.freeze_op`."""
        staged = self._staged.get(op)
        if self._division.freeze(op):
            self._report(OpFrozen(op))
        elif staged is None:
            self._engine.freeze_op(op)
        elif not staged.refusal:
            staged.unfrozen = set(staged.unended)
            for piece in staged.unfrozen:
                self._engine.freeze_op(piece)
            self._note_frozen(op, staged)

    def _note_frozen(self, op: int, staged: _Staged) -> None:
        if staged.unfrozen == set():
            self._report(OpFrozen(op))

    def forget_ops(self, epoch: int, tag: int, uses: range) -> None:
        self._engine.forget_ops(epoch, tag, uses)

    def detach_from(self, op: int) -> None:
        """Stop an op and restore its caller's arrays, as `Ops.detach_from`."""
        self._said.run_posted()  # pieces of the caller's arrays, which are submitted before they are detached
        staged = self._staged.get(op)
        if staged is not None:
            self._detach_staged(op, staged)
            return
        self._division.detach(op)
        if not self._engine.detach(op, None):
            self._report(OpDetached(op, is_known=False))

    def _detach_staged(self, op: int, staged: _Staged) -> None:
        source = staged.spec.source
        assert source is not None
        if not isinstance(source, InMemory):
            source.release(lambda: self._said.post(lambda: self._own.append(OpDetached(op))))
            return
        left = self._detaching[op] = {piece for piece in staged.unended if self._engine.detach(piece, None)}
        if len(left) < source.piece_count:
            self._unknown.add(op)
        self._detaching_op_of |= dict.fromkeys(left, op)
        self._note_detached(op)

    def _note_detached(self, op: int) -> None:
        if not self._detaching[op]:
            del self._detaching[op]
            self._report(OpDetached(op, op not in self._unknown))
            self._unknown.discard(op)

    # Events.

    def _report(self, event: EngineEvent) -> None:
        self._own.append(event)
        self._said.wake()

    def events(self) -> list[EngineEvent]:
        """Return what has happened since the last call; for each op and for each link in order."""
        self._said.empty()
        found = self._engine.events()
        if self._op_of or self._markers or self._division or self._detaching:
            found = [joined for event in found if (joined := self._join(event)) is not None]
        # Last: what `_join` ended is among them.
        own, self._own = self._own, []
        return found + own

    def _join(self, event: EngineEvent) -> EngineEvent | None:
        """Return what an event of the engine means for the op that it belongs to, if anything."""
        kind = type(event)
        if kind not in OF_AN_OP:
            return event
        number: int = event.op  # type: ignore[union-attr]
        if number < FIRST_PIECE_OP:
            of_whole = self._whole.get(kind)
            return event if of_whole is None else of_whole(event)
        if isinstance(event, OpDetached):
            self._piece_detached(event)
            return None
        op = self._op_of.get(number)
        if op is not None:
            return self._piece[kind](op, self._staged[op], event)
        of_marker = self._marker.get(kind) if self._markers.op_of(number) is not None else None
        return None if of_marker is None else of_marker(event)

    def _piece_detached(self, event: OpDetached) -> None:
        op = self._detaching_op_of.pop(event.op)
        if not event.is_known:
            self._unknown.add(op)
        self._detaching[op].discard(event.op)
        self._note_detached(op)

    def _piece_done(self, op: int, staged: _Staged, event: OpDone) -> EngineEvent | None:
        staged.undone -= 1
        staged.tx_bytes += event.tx_bytes
        staged.rx_bytes += event.rx_bytes
        is_done = staged.undone == 0 and not staged.is_closed
        return OpDone(op, staged.tx_bytes, staged.rx_bytes) if is_done else None

    def _piece_completed(self, op: int, staged: _Staged, _: OpCompleted) -> EngineEvent | None:
        staged.uncompleted -= 1
        return OpCompleted(op) if staged.uncompleted == 0 and not staged.is_closed else None

    def _piece_frozen(self, op: int, staged: _Staged, event: OpFrozen) -> None:
        if staged.unfrozen is not None:
            staged.unfrozen.discard(event.op)
            self._note_frozen(op, staged)

    def _piece_mismatch(self, op: int, staged: _Staged, event: OpMismatch) -> EngineEvent | None:
        if staged.is_mismatched or staged.is_closed:
            return None
        staged.is_mismatched = True
        assert staged.spec.source is not None
        which = f", as piece {staged.pieces.index(event.op) + 1} of {staged.spec.source.piece_count}"
        return replace(event, op=op, mine=event.mine + which).in_pieces()

    def _piece_refused(self, op: int, staged: _Staged, event: OpRefused) -> None:
        # All its slices have ended.
        staged.pieces.remove(event.op)
        self._refuse(op, event.reason)
        self._piece_ended(op, staged, event)

    def _piece_ended(self, op: int, staged: _Staged, event: OpEnded | OpRefused) -> None:
        staged.unended.discard(event.op)
        del self._op_of[event.op]
        if staged.is_closed and not staged.unended:
            self._end_staged(op, staged)

    def _marker_mismatch(self, event: OpMismatch) -> EngineEvent | None:
        """Another op has the name of this peer's op in pieces. If it is whole, its peer divides it or says that it
        cannot; if it is in pieces of another size, both say so."""
        op = self._markers.op_of(event.op)
        staged = self._staged.get(op) if op is not None else None
        if not event.their_piece_bytes or staged is None or staged.is_closed or staged.is_mismatched:
            return None
        staged.is_mismatched = True
        mine = f"an op in pieces of {pieces.PIECE_BYTES} bytes"
        return replace(event, op=staged.launch.op, mine=mine).in_pieces()
