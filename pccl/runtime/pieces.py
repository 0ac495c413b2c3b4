"""Ops whose elements become available piece by piece: several ops of the engine that are one to everybody else.

Theory of operation. A *feed* stands for arrays that the engine cannot read, such as those on a device. It divides the
op into pieces, alike on all peers, and says when the elements of each are in memory; the piece is then submitted as an
op of its own, named by the op's tag and use, and the piece's number in the upper bits of the use. So pieces meet their
like on all peers in whatever order they come, and the rest of pccl knows one op:

    done        when the last piece is, and so for agreed
    frozen      at once but for pieces that were submitted: no further ones are
    a verdict   goes to all pieces that have been submitted; no further ones are
    ended       when all those have given their memory back
    mismatch    the first that any piece reports

An op is done only when all its pieces were submitted, so commit never meets one that was not; an abort may. An epoch
that is frozen takes no more pieces: its ops that are not done by then will be aborted.

A first piece that is the whole op looks on the wire as if there were no pieces, so peers with and without a feed can
share it. A larger op they can only share where those with a feed do not divide it (PCCL_PIECE_BYTES=0): the others do
not know of the feed when they begin, and do not ask, because that would cost every op a message.
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
from pccl.runtime.engine import (
    Buffers,
    EngineEvent,
    OpAgreed,
    OpDone,
    OpEnded,
    OpFrozen,
    OpMismatch,
    OpRefused,
    OpSpec,
    Verdict,
)
from pccl.runtime.lanes import Lanes

PIECE_BYTES = int(os.environ.get("PCCL_PIECE_BYTES", 16 << 20))
"""Of an op in pieces. 0: none is divided."""
FIRST_PIECE_OP = 1 << 62
"""Numbers of pieces, in the engine's eyes, begin here; those of ops never come so far."""
PIECE_SHIFT = 40
"""Bits of the key's sequence that count the uses of a tag in a view."""


def piece_elements(item_bytes: int) -> int:
    """0: all of them."""
    return max(PIECE_BYTES, item_bytes) // item_bytes if PIECE_BYTES else 0


def hint(mismatch: OpMismatch) -> str:
    """For whoever may have met an op that is divided with one that is not."""
    if not PIECE_BYTES or not min(mismatch.size_bytes) == PIECE_BYTES < max(mismatch.size_bytes):
        return ""
    return (
        f"; a larger array than {PIECE_BYTES} bytes is reduced in pieces where it is on a device: if some peers have "
        "theirs in memory, start those that have theirs on devices with PCCL_PIECE_BYTES=0"
    )


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
    unended: set[int] = field(default_factory=set)
    tx_bytes: int = 0
    rx_bytes: int = 0
    is_mismatched: bool = False
    is_closed: bool = False
    """There is a verdict, or it was refused: no further pieces."""
    unfrozen: set[int] | None = None
    """Pieces that are being frozen; no further ones are taken."""
    refusal: str = ""


class Pieces(Lanes):
    """Lanes that take specs with a feed, too."""

    def __init__(self, group: int, segment_bytes: int = 0, force_poll: bool = False) -> None:
        super().__init__(group, segment_bytes, force_poll)
        self._staged: dict[int, _Staged] = {}
        self._op_of: dict[int, int] = {}
        """By piece."""
        self._numbers = itertools.count(FIRST_PIECE_OP)
        self._frozen_epoch = -1
        self._news: deque[Callable[[], None]] = deque()
        """What feeds have said, in their threads."""
        self._own: list[EngineEvent] = []
        """Events that no engine reports."""
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
        if spec.feed is None:
            super().submit(launch, spec)
            return
        assert launch.sequence < 1 << PIECE_SHIFT
        self._request.fill(launch, spec)  # ValueError for what would be refused later
        op = launch.op
        self._staged[op] = _Staged(launch, spec, spec.feed.piece_count, spec.feed.piece_count)

        def ready(number: int, buffers: Buffers) -> None:
            self._tell(partial(self._submit_piece, op, number, buffers))

        def failed(error: BaseException) -> None:
            self._tell(partial(self._refuse_staged, op, f"{type(error).__name__}: {error}"))

        spec.feed.begin(ready, failed)

    def end(self, op: int, verdict: Verdict) -> None:
        staged = self._staged.get(op)
        if staged is None:
            super().end(op, verdict)
            return
        if staged.refusal:
            return
        self._shut(staged)
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

    def freeze_op(self, op: int) -> None:
        staged = self._staged.get(op)
        if staged is None:
            super().freeze_op(op)
        elif not staged.refusal:
            staged.unfrozen = set(staged.unended)
            for piece in staged.unfrozen:
                super().freeze_op(piece)
            self._note_frozen(op, staged)

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
        if self._op_of:
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
        launch = replace(staged.launch, op=piece, sequence=staged.launch.sequence + (number << PIECE_SHIFT))
        try:
            super().submit(launch, replace(staged.spec, buffers=buffers, feed=None))
        except MemoryError as error:
            self._refuse_staged(op, f"out of memory: {error}")
            return
        self._op_of[piece] = op
        staged.pieces.append(piece)
        staged.unended.add(piece)

    def _refuse_staged(self, op: int, reason: str) -> None:
        staged = self._staged.get(op)
        if staged is None or staged.is_closed:
            return
        staged.refusal = reason
        self._shut(staged)
        for piece in staged.pieces:
            super().end(piece, Verdict.ABORT)
        if not staged.pieces:
            self._end_staged(op, staged)

    # What becomes of pieces.

    def _join_piece(self, event: EngineEvent) -> EngineEvent | None:
        """What an event of a piece means for its op, if anything."""
        kinds = OpDone | OpAgreed | OpFrozen | OpEnded | OpMismatch | OpRefused
        if not isinstance(event, kinds) or event.op < FIRST_PIECE_OP:
            return event
        op = self._op_of.get(event.op)
        if op is None:
            return None
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
            return replace(event, op=op, mine=event.mine + whole)
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
