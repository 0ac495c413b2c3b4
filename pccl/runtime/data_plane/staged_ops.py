"""Ops whose elements become available piece by piece: several ops of the engine that are one to everybody else.

Theory of operation. A *feed* stands for arrays that the engine cannot read, such as those on a device. It divides the
op into pieces, alike on all peers, and says when the elements of each are in memory; the piece is then submitted as an
op of its own, named by the op's tag and use, and the piece's number in the upper bits of the use. So pieces meet their
like on all peers in whatever order they come, and the rest of pccl knows one op:

    done        when the last piece is, and so for agreed
    frozen      at once but for pieces that were submitted: no further ones are
    a verdict   goes to all pieces that have been submitted; no further ones are
    ended       when all those have given their memory back
    detached    when all those are, and nothing is read any more that further ones would be made of
    mismatch    the first that any piece reports

An op is done only when all its pieces were submitted, so commit never meets one that was not; an abort may. An epoch
that is frozen takes no more pieces: its ops that are not done by then will be aborted.

*Meeting ops that are whole.* A peer whose arrays are in memory launches one op of the engine, which costs less, and
does not know that others have a feed. An op of several pieces therefore has a *guard*: an op without elements under the
name that the whole would have, which differs from it, so that the engines of all others report a mismatch. Whoever has
a whole all_reduce that can be divided, and a link to every peer of the group, takes it back, which restores its arrays,
and joins in pieces; later ops in that epoch it divides from the beginning, and announces so. What cannot be divided is
a mismatch in truth, of which all peers are told. Nobody waits for guards, and no result depends on them. A committed
op leaves its own behind until all peers have sent theirs, which may come last, or the epoch is over.

A first piece that is the whole op has no guard and looks on the wire as if there were no pieces.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from pccl.protocol.peer import SubmitOp
from pccl.runtime.data_plane.detached import PrivateCopy
from pccl.runtime.data_plane.engine import (
    Buffers,
    EngineEvent,
    OpAgreed,
    OpDetached,
    OpDone,
    OpEnded,
    OpFrozen,
    OpMismatch,
    OpRefused,
    OpSpec,
    Verdict,
    guard_spec,
    guarded,
)
from pccl.runtime.data_plane.engine_threads import EngineThreads
from pccl.types import Collective

PIECE_BYTES = int(os.environ.get("PCCL_PIECE_BYTES", 16 << 20))
"""Of an op in pieces. 0: none is divided."""
FIRST_PIECE_OP = 1 << 62
"""Numbers of pieces and guards, in the engine's eyes, begin here; those of ops never come so far."""
PIECE_SHIFT = 40
"""Bits of the key's sequence that count the uses of a tag in a view. Above them is 0, of the op itself or its guard, or
the number of the piece from 1."""


OpEvent = OpDone | OpAgreed | OpFrozen | OpEnded | OpMismatch | OpRefused


def piece_elements(item_bytes: int) -> int:
    """0: all of them."""
    return max(PIECE_BYTES, item_bytes) // item_bytes if PIECE_BYTES else 0


def hint(mismatch: OpMismatch) -> str:
    """For whoever has met an op that is divided and cannot divide its own."""
    if not mismatch.their_piece_bytes or mismatch.size_bytes[0] <= mismatch.their_piece_bytes:
        return ""
    return (
        "; where arrays are on devices they are reduced in pieces, which all peers can do if PCCL_PIECE_BYTES is the "
        "same for all and no two of them lack a link: else start those with devices with PCCL_PIECE_BYTES=0"
    )


class _InMemory:
    """A feed of an op whose arrays are in memory."""

    def __init__(self, spec: OpSpec) -> None:
        assert isinstance(spec.buffers, Buffers)
        self._whole = spec.buffers
        self._item_bytes = spec.dtype.itemsize
        self._length = piece_elements(self._item_bytes)
        self.piece_count = -(-self._whole.count // self._length)

    def begin(self, ready: Callable[[int, Buffers], None], failed: Callable[[BaseException], None]) -> None:
        for number in range(self.piece_count):
            ready(number, self.piece(self._whole, number))

    def piece(self, whole: Buffers, number: int) -> Buffers:
        start = number * self._length
        at = start * self._item_bytes
        count = min(self._length, whole.count - start)
        return Buffers(whole.send + at, whole.recv + at, count, whole.keep)

    def abandon(self) -> None:
        pass

    def release(self, told: Callable[[], None]) -> None:
        told()

    def deliver(self) -> None:
        pass


@dataclass(slots=True)
class _Guard:
    """Until the engine has given it back."""

    op: int
    epoch: int
    is_closed: bool = False


@dataclass(slots=True)
class _Dividing:
    """A whole op that is being taken back, to go on in pieces."""

    launch: SubmitOp
    spec: OpSpec
    is_closed: bool = False
    """There is a verdict: it does not go on."""
    is_frozen: bool = False
    is_detached: bool = False
    """It goes on with the copy, or not at all."""
    copy: PrivateCopy | None = None


@dataclass(slots=True)
class _Staged:
    """An op in pieces."""

    launch: SubmitOp
    spec: OpSpec
    undone: int
    """Pieces that are not done, also those to come."""
    unagreed: int
    """The same of those that are not agreed on."""
    pieces: list[int] = field(default_factory=list)
    """Those submitted, in the engine's numbers."""
    numbers: dict[int, int] = field(default_factory=dict)
    """How-manieth of the op each of them is, from 0."""
    unended: set[int] = field(default_factory=set)
    tx_bytes: int = 0
    rx_bytes: int = 0
    is_mismatched: bool = False
    is_closed: bool = False
    """There is a verdict, or it was refused: no further pieces."""
    unfrozen: set[int] | None = None
    """Pieces that are being frozen; no further ones are taken."""
    refusal: str = ""


class StagedOps(EngineThreads):
    """Lanes that take specs with a feed, too."""

    def __init__(self, group: int, segment_bytes: int = 0, force_poll: bool = False) -> None:
        super().__init__(group, segment_bytes, force_poll)
        self._staged: dict[int, _Staged] = {}
        self._op_of: dict[int, int] = {}
        """By piece."""
        self._guards: dict[int, _Guard] = {}
        self._divisible: dict[int, tuple[SubmitOp, OpSpec]] = {}
        """Whole ops that can be taken back."""
        self._dividing: dict[int, _Dividing] = {}
        self._divided_epoch = -1
        """In which others divide, and so does this peer."""
        self._numbers = itertools.count(FIRST_PIECE_OP)
        self._frozen_epoch = -1
        self._news: deque[Callable[[], None]] = deque()
        """What feeds have said, in their threads."""
        self._own: list[EngineEvent] = []
        """Events that no engine reports."""
        self._detaching_pieces: dict[int, set[int]] = {}
        """Pieces of an op that are not detached yet."""
        self._detaching_op_of: dict[int, int] = {}
        """By piece."""
        self._was_rung = False
        """Spares ops without pieces a system call for each batch of events."""
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
        self._button.setblocking(False)

    @property
    def event_fds(self) -> list[int]:
        return [*super().event_fds, self._bell.fileno()]

    def close(self) -> None:
        super().close()
        for staged in self._staged.values():
            self._shut(staged)
        self._bell.close()
        self._button.close()

    def forget_after_fork(self) -> None:
        super().forget_after_fork()
        self._bell.close()
        self._button.close()

    def submit(self, launch: SubmitOp, spec: OpSpec) -> None:
        if spec.feed is not None:
            assert launch.sequence < 1 << PIECE_SHIFT
            self._request.fill(launch, spec)  # ValueError for what would be refused later
            self._stage(launch, spec, has_guard=spec.feed.piece_count > 1)
        elif not _can_divide(launch, spec):
            super().submit(launch, spec)
        elif launch.epoch == self._divided_epoch:
            self._stage(launch, replace(spec, feed=_InMemory(spec)), has_guard=True)
        else:
            super().submit(launch, spec)
            self._divisible[launch.op] = launch, spec

    def _stage(self, launch: SubmitOp, spec: OpSpec, has_guard: bool) -> None:
        assert spec.feed is not None
        op = launch.op
        self._end_guards(launch.epoch - 1)
        if has_guard:
            guard = next(self._numbers)
            super().submit(replace(launch, op=guard, agrees=False), guard_spec(spec, PIECE_BYTES))
            self._guards[guard] = _Guard(op, launch.epoch)
        self._staged[op] = _Staged(launch, spec, spec.feed.piece_count, spec.feed.piece_count)

        def ready(number: int, buffers: Buffers) -> None:
            self._tell(partial(self._submit_piece, op, number, buffers))

        def failed(error: BaseException) -> None:
            self._tell(partial(self._refuse_staged, op, f"{type(error).__name__}: {error}"))

        spec.feed.begin(ready, failed)

    def end(self, op: int, verdict: Verdict) -> None:
        self._divisible.pop(op, None)
        dividing = self._dividing.get(op)
        if dividing is not None:
            assert verdict is Verdict.ABORT, "it cannot have been done"
            dividing.is_closed = True
            return
        staged = self._staged.get(op)
        if staged is None:
            super().end(op, verdict)
            return
        if staged.refusal:
            return
        self._shut(staged)
        if verdict is Verdict.ABORT:
            self._drop_guard(op)
        if verdict is Verdict.COMMIT_BY_ALL:
            assert staged.undone == 0
            self._forget(op, staged)
        for piece in staged.pieces:
            super().end(piece, verdict)
        if not staged.pieces:
            self._end_staged(op, staged)

    def freeze(self, epoch: int) -> None:
        self._frozen_epoch = max(self._frozen_epoch, epoch)
        super().freeze(epoch)
        self._end_guards(epoch)

    def freeze_op(self, op: int) -> None:
        dividing = self._dividing.get(op)
        staged = self._staged.get(op)
        if dividing is not None:
            dividing.is_frozen = True
            self._own.append(OpFrozen(op))
            self._ring()
        elif staged is None:
            self._divisible.pop(op, None)
            super().freeze_op(op)
        elif not staged.refusal:
            staged.unfrozen = set(staged.unended)
            for piece in staged.unfrozen:
                super().freeze_op(piece)
            self._note_frozen(op, staged)

    def detach_from(self, op: int, copy: PrivateCopy | None) -> None:
        """Takes its caller's arrays from an op, which goes on with the copy, or, without one, stops. One whose arrays
        are not in memory goes on when it has read them, unless its feed was abandoned. Ends with an OpDetached, also if
        there is no such op."""
        while self._news:  # pieces of the caller's arrays, which are submitted before they are detached
            self._news.popleft()()
        private = copy.buffers if copy is not None else None
        staged = self._staged.get(op)
        if staged is not None:
            self._detach_staged(op, staged, private)
            return
        dividing = self._dividing.get(op)
        if dividing is not None:  # what the engine will have put back by then is copied
            dividing.is_detached, dividing.copy = True, copy
            private = None
        elif op in self._divisible:
            launch, spec = self._divisible.pop(op)
            if private is not None:
                self._divisible[op] = launch, replace(spec, buffers=private)
        if not self.detach(op, private):
            self._own.append(OpDetached(op))
            self._ring()

    def _detach_staged(self, op: int, staged: _Staged, private: Buffers | None) -> None:
        feed = staged.spec.feed
        assert feed is not None
        if not isinstance(feed, _InMemory):
            feed.release(lambda: self._tell(lambda: self._own.append(OpDetached(op))))
            return
        left = self._detaching_pieces[op] = {
            piece
            for piece in staged.unended
            if self.detach(piece, None if private is None else feed.piece(private, staged.numbers[piece]))
        }
        self._detaching_op_of |= dict.fromkeys(left, op)
        self._note_detached(op)

    def _note_detached(self, op: int) -> None:
        if not self._detaching_pieces[op]:
            del self._detaching_pieces[op]
            self._own.append(OpDetached(op))
            self._ring()

    # Guards, and ops that become divided.

    def _drop_guard(self, op: int) -> None:
        for number, guard in self._guards.items():
            if guard.op == op:
                self._end_guard(number, guard)

    def _end_guards(self, epoch: int) -> None:
        """Those of all epochs up to this one."""
        for number, guard in self._guards.items():
            if guard.epoch <= epoch:
                self._end_guard(number, guard)

    def _end_guard(self, number: int, guard: _Guard) -> None:
        if not guard.is_closed:
            guard.is_closed = True
            super().end(number, Verdict.ABORT)

    def _divide(self, op: int) -> None:
        launch, spec = self._divisible.pop(op)
        self._divided_epoch = launch.epoch
        self._dividing[op] = _Dividing(launch, spec)
        super().end(op, Verdict.ABORT)

    def _note_taken_back(self, event: OpEnded) -> EngineEvent | None:
        dividing = self._dividing.pop(event.op)
        if dividing.is_closed:
            return event
        spec = dividing.spec
        if dividing.is_detached:
            if dividing.copy is None:
                return OpRefused(event.op, "its caller has given it up")
            dividing.copy.fill()
            spec = replace(spec, buffers=dividing.copy.buffers)
        spec = replace(spec, feed=_InMemory(spec))
        self._stage(dividing.launch, spec, has_guard=False)
        if dividing.is_frozen:
            self._staged[event.op].unfrozen = set()
        return None

    def _join_whole(self, event: EngineEvent) -> EngineEvent | None:
        """What an event of an op that is none in pieces means, if anything."""
        if isinstance(event, OpMismatch) and event.op in self._divisible:
            if event.their_piece_bytes == guarded(PIECE_BYTES) and event.steps is None:
                self._divide(event.op)
                return None
            del self._divisible[event.op]
        elif isinstance(event, OpEnded) and event.op in self._dividing:
            return self._note_taken_back(event)
        elif isinstance(event, OpRefused):
            self._divisible.pop(event.op, None)
            self._dividing.pop(event.op, None)
        return _described(event) if isinstance(event, OpMismatch) else event

    def _join_guard(self, event: OpEvent) -> EngineEvent | None:
        guard = self._guards.get(event.op)
        if guard is None:
            return None
        if isinstance(event, OpDone):
            self._end_guard(event.op, guard)
        elif isinstance(event, OpEnded | OpRefused):
            del self._guards[event.op]
        elif isinstance(event, OpMismatch) and event.their_piece_bytes:
            staged = self._staged.get(guard.op)
            if staged is not None and not staged.is_closed and not staged.is_mismatched:
                staged.is_mismatched = True
                return _described(replace(event, op=guard.op, mine=f"an op in pieces of {PIECE_BYTES} bytes"))
        # Any other op with which it differs is whole: its peer divides that, or says that it cannot.
        return None

    def _note_frozen(self, op: int, staged: _Staged) -> None:
        if staged.unfrozen == set():
            self._own.append(OpFrozen(op))
            self._ring()

    def events(self) -> list[EngineEvent]:
        if self._was_rung:
            self._was_rung = False
            with suppress(OSError):
                while self._bell.recv(4096):
                    pass
        while self._news:
            self._news.popleft()()
        found = super().events()
        if self._op_of or self._guards or self._divisible or self._dividing or self._detaching_pieces:
            found = [joined for event in found if (joined := self._join_piece(event)) is not None]
        # Last: what ended in `_join_piece` is among them.
        own, self._own = self._own, []
        return found + own

    # What feeds say.

    def _tell(self, news: Callable[[], None]) -> None:
        """From any thread."""
        self._news.append(news)
        self._ring()

    def _ring(self) -> None:
        with suppress(OSError):  # closed; or so full that it will be heard anyway
            self._button.send(b"\0")
        # Last: where it is set, there is nothing to come that would be missed.
        self._was_rung = True

    def _submit_piece(self, op: int, number: int, buffers: Buffers) -> None:
        staged = self._staged.get(op)
        if staged is None or staged.is_closed or staged.launch.epoch <= self._frozen_epoch:
            return
        if staged.unfrozen is not None:
            return
        piece = next(self._numbers)
        assert staged.spec.feed is not None
        upper = number + 1 if staged.spec.feed.piece_count > 1 else 0
        launch = replace(staged.launch, op=piece, sequence=staged.launch.sequence + (upper << PIECE_SHIFT))
        try:
            super().submit(launch, replace(staged.spec, buffers=buffers, feed=None))
        except MemoryError as error:
            self._refuse_staged(op, f"out of memory: {error}")
            return
        self._op_of[piece] = op
        staged.pieces.append(piece)
        staged.numbers[piece] = number
        staged.unended.add(piece)

    def _refuse_staged(self, op: int, reason: str) -> None:
        staged = self._staged.get(op)
        if staged is None or staged.is_closed:
            return
        staged.refusal = reason
        self._shut(staged)
        self._drop_guard(op)
        for piece in staged.pieces:
            super().end(piece, Verdict.ABORT)
        if not staged.pieces:
            self._end_staged(op, staged)

    # What becomes of pieces.

    def _join_piece(self, event: EngineEvent) -> EngineEvent | None:
        """What an event of a piece means for its op, if anything."""
        if isinstance(event, OpDetached) and event.op >= FIRST_PIECE_OP:
            detached = self._detaching_op_of.pop(event.op)
            self._detaching_pieces[detached].discard(event.op)
            self._note_detached(detached)
            return None
        if not isinstance(event, OpEvent):
            return event
        if event.op < FIRST_PIECE_OP:
            return self._join_whole(event)
        op = self._op_of.get(event.op)
        if op is None:
            return self._join_guard(event)
        staged = self._staged[op]
        if isinstance(event, OpDone):
            staged.undone -= 1
            staged.tx_bytes += event.tx_bytes
            staged.rx_bytes += event.rx_bytes
            is_done = staged.undone == 0 and not staged.is_closed
            return OpDone(op, staged.tx_bytes, staged.rx_bytes) if is_done else None
        if isinstance(event, OpAgreed):
            staged.unagreed -= 1
            return OpAgreed(op) if staged.unagreed == 0 and not staged.is_closed else None
        if isinstance(event, OpFrozen):
            if staged.unfrozen is not None:
                staged.unfrozen.discard(event.op)
                self._note_frozen(op, staged)
            return None
        if isinstance(event, OpMismatch):
            if staged.is_mismatched or staged.is_closed:
                return None
            staged.is_mismatched = True
            assert staged.spec.feed is not None
            whole = f", as piece {staged.pieces.index(event.op) + 1} of {staged.spec.feed.piece_count}"
            return _described(replace(event, op=op, mine=event.mine + whole))
        if isinstance(event, OpRefused):
            # All its slices have ended.
            staged.pieces.remove(event.op)
            self._refuse_staged(op, event.reason)
        staged.unended.discard(event.op)
        del self._op_of[event.op]
        if staged.is_closed and not staged.unended:
            self._end_staged(op, staged)
        return None

    def _end_staged(self, op: int, staged: _Staged) -> None:
        if self._staged.pop(op, None) is None:
            return
        if staged.refusal:
            self._own.append(OpRefused(op, staged.refusal))
        else:
            self._own.append(OpEnded(op, staged.tx_bytes, staged.rx_bytes))
        self._ring()

    def _forget(self, op: int, staged: _Staged) -> None:
        del self._staged[op]
        for piece in staged.pieces:
            del self._op_of[piece]

    @staticmethod
    def _shut(staged: _Staged) -> None:
        staged.is_closed = True
        assert staged.spec.feed is not None
        staged.spec.feed.abandon()


def _can_divide(launch: SubmitOp, spec: OpSpec) -> bool:
    """Whether an op with arrays in memory can be one in pieces: all will hear of it, if one is."""
    if spec.collective is not Collective.ALL_REDUCE or not launch.agrees or not isinstance(spec.buffers, Buffers):
        return False
    return 0 < piece_elements(spec.dtype.itemsize) < spec.buffers.count


def _described(mismatch: OpMismatch) -> OpMismatch:
    if not mismatch.their_piece_bytes:
        return mismatch
    return replace(mismatch, theirs=f"an op in pieces of {mismatch.their_piece_bytes} bytes")
