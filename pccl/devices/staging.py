"""Staging: carries out an op on arrays on a device through the memory of this machine.

Theory of operation. An all_reduce is divided into *pieces* of PIECE_BYTES, in the same way on all peers. A piece is an
op of the engine's own, which begins when the piece has been copied from the device; so the device copies the later
pieces while the network works on the earlier ones. To everybody else the pieces are one op: one launch, one tag, one
verdict; peers with arrays in memory join in pieces when they hear of it, and where they could not hear of it, there are
no pieces (`runtime.data_plane.staged_ops`). The other collectives are one piece each, which is the whole op; so on the
wire they are what they are for arrays in memory, and both kinds of peers can share them. Results are copied to the
device when the verdict is there and is commit, so an abort leaves the device's arrays as they were, in place or not.

*Order.* What the launching thread had given to its current stream comes before the first copy: gradients may
still be in the making when their reduce is launched. The way back goes through the current stream of the thread that
waits for the op, so what that thread gives to this stream afterwards finds the result; `wait` itself does not block for
the copy. A thread that uses other streams must order them itself, as with any work of the device. A result for which
the caller gave no array gets one in that stream, too.

*Memory.* On the host an all_reduce needs its size once, pinned, and once more in the engine, which works in place and
keeps what it overwrites (an abort has no use for it here, but a neighbour may have to be sent it again). All of the
results must be kept until the verdict, so this cannot be less, however many pieces. The other collectives need what
they read and what they write, each pinned. On the device nothing is needed.

*Threads.* Copies to the host are given to the device and awaited by one thread for each device, ops in the order
of their launches. That needs the GIL for a moment between two pieces, unlike what the engine does with a piece.

*Giving up.* When a call is given up its op is abandoned: what has not been copied from the device by then never is.
When a wait is given up, the caller has its array back as soon as all has been copied, or after `DEVICE_GRACE_S` of
`runtime.session.reclaims`; the op goes on in host memory, and the result comes to the device with the next wait.

*Errors* of the device before the op is done fail it on all peers. Those after the verdict are the caller's alone: the
others have their results, and this peer leaves the run, for its arrays differ from theirs.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pccl.devices.device import Device, Event
from pccl.devices.host_memory import Block, HostPool
from pccl.runtime.data_plane.op_spec import Buffers
from pccl.runtime.data_plane.pieces import piece_elements

AHEAD = 2
"""The copies to the host that are under way at once: while this thread takes note of one, the device does the next."""

EXIT_GRACE_S = 5.0

logger = logging.getLogger("pccl.devices")

Ready = Callable[[int, Buffers], None]
_Blocks = tuple[Block | None, Block | None]
"""The block that a piece is sent from, and the block that its result comes to."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a contiguous array."""

    start_byte: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an op that is copied, sent and received at once."""

    count: int
    """The number of elements, as the engine counts those of the collective."""
    read: Span | None
    """The part of the array to send; None if this peer sends nothing."""
    write: Span | None
    """The part of the array for the result; None if this peer gets nothing."""
    is_in_place: bool = False
    """True if both parts are alike, so that one block of host memory serves them."""
    parts: tuple[Sequence[int], Sequence[int]] | None = None
    """As in `Buffers`."""


@dataclass(frozen=True, slots=True)
class Cargo:
    """The arrays of an op, and how they are divided."""

    send: Any
    recv: Callable[[], Any]
    """Returns the array for the result. Called when there is one."""
    pieces: Sequence[Piece]


def divided(send: Any, recv: Any, count: int, item_bytes: int) -> Cargo:
    """Divide an all_reduce into pieces, at least one.

    All peers must divide an op in the same way, so this is part of what they compare.
    """
    length = piece_elements(item_bytes) or max(1, count)
    pieces = []
    for start in range(0, max(1, count), length):
        elements = min(length, count - start)
        span = Span(start * item_bytes, elements * item_bytes)
        pieces.append(Piece(elements, span, span, is_in_place=True))
    return Cargo(send, lambda: recv, pieces)


def undivided(cargo: Cargo) -> Cargo:
    """Return the cargo of an all_reduce as one piece."""
    spans = [piece.read for piece in cargo.pieces if piece.read is not None]
    span = Span(spans[0].start_byte, sum(each.size_bytes for each in spans))
    count = sum(piece.count for piece in cargo.pieces)
    return replace(cargo, pieces=[Piece(count, span, span, is_in_place=True)])


class Staging:
    """One launch of an op. Create it in the thread that launches the op: the copies follow that thread's stream.

    `begin` may be called once, `deliver` from any thread, again and again.
    """

    def __init__(self, device: Device, piece_count: int, load: Callable[[], Cargo]) -> None:
        """`load` returns the cargo. It is called when the op begins, since the sizes may depend on who takes part."""
        self.piece_count = piece_count
        self._device = device
        self._load = load
        self._is_divided = True
        self._cargo: Cargo | None = None
        self._launched = device.mark()
        self._blocks: dict[int, _Blocks] = {}
        """The blocks of each piece. The engine reads and writes them until the op has ended."""
        self._is_over = False
        self._delivering = threading.RLock()
        self._delivered: Event | None = None

    def begin(self, ready: Ready, failed: Callable[[BaseException], None]) -> None:
        """Start to copy from the device.

        `ready` is called for each piece once it is in its block, in order; `failed`, with the reason, if no more will
        come. Both are called in another thread.
        """
        cargo = self._load()
        self._cargo = cargo = cargo if self._is_divided else undivided(cargo)
        assert len(cargo.pieces) == self.piece_count
        helper_of(self._device).run(lambda helper: self._read(cargo, helper.pool, ready, failed))

    def undivide(self) -> None:
        """Have the whole op be one piece. To be called before `begin`."""
        self._is_divided, self.piece_count = False, 1

    def abandon(self) -> None:
        """Stop copying: the op has been aborted."""
        self._is_over = True

    def release(self, released: Callable[[], None]) -> None:
        """Call `released` as soon as the caller can have its array back, although there is no result yet.

        That is when all of it has been copied, or nothing more will be. Copies that the device was given before the op
        was abandoned may still be made, to blocks that nobody reads.
        """
        if self._is_over:
            released()
        else:
            helper_of(self._device).run(lambda _: released())  # after `_read`, in the same thread

    def _read(self, cargo: Cargo, pool: HostPool, ready: Ready, failed: Callable[[BaseException], None]) -> None:
        under_way: list[tuple[Event | None, Callable[[], None]]] = []

        def arrive() -> None:
            arrived, tell = under_way[0]
            if arrived is not None:
                arrived.wait()
            del under_way[0]
            if not self._is_over:
                tell()

        try:
            for number, piece in enumerate(cargo.pieces):
                if self._is_over:
                    break
                source = pool.take(piece.read.size_bytes) if piece.read is not None else None
                target = source
                if not piece.is_in_place:
                    target = pool.take(piece.write.size_bytes) if piece.write is not None else None
                arrived = None
                if piece.read is not None and source is not None:
                    arrived = self._device.read(cargo.send, *_place(piece.read), source.host, self._launched)
                under_way.append((arrived, partial(self._arrive, number, piece, source, target, ready)))
                if len(under_way) >= AHEAD:
                    arrive()
            while under_way:
                arrive()
        except BaseException as error:
            failed(error)
            for still, _ in under_way:
                if still is not None:
                    with suppress(Exception):  # of the device, which has just failed
                        still.wait()  # before its block is used for anything else

    def _arrive(self, number: int, piece: Piece, source: Block | None, target: Block | None, ready: Ready) -> None:
        blocks = self._blocks[number] = source, target
        send, recv = (block.address if block is not None else 0 for block in blocks)
        ready(number, Buffers(send, recv, piece.count, blocks, piece.parts))

    def deliver(self) -> None:
        """Copy the results of a committed op into the device's array, in the order of this thread's current stream."""
        cargo = self._cargo
        assert cargo is not None
        with self._delivering:
            if self._delivered is not None:
                self._device.follow(self._delivered)
                return
            last: Event | None = None
            for number, piece in enumerate(cargo.pieces):
                _, target = self._blocks.get(number, (None, None))
                if piece.write is not None:
                    assert target is not None
                    last = self._device.write(cargo.recv(), *_place(piece.write), target.host)
            # In this order: if it is interrupted anywhere, nothing is freed too early, and it can be made again.
            blocks = list(self._blocks.values())
            helper_of(self._device).run(lambda helper: _release(helper.pool, blocks, last))
            self._delivered = last
            self._blocks = {}


def _place(span: Span) -> tuple[int, int]:
    return span.start_byte, span.size_bytes


def _release(pool: HostPool, blocks: list[_Blocks], read: Event | None) -> None:
    """Give blocks back once the device has read them."""
    if read is not None:
        read.wait()
    blocks.clear()
    pool.trim()


class Helper:
    """The thread and the host memory of one device."""

    def __init__(self, device: Device) -> None:
        self.pool = HostPool(device)
        # Not an executor: an interrupt in its `submit` can leave a lock behind for ever.
        self._tasks: queue.SimpleQueue[Callable[[Helper], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"pccl-{device.name}", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def run(self, task: Callable[[Helper], None]) -> None:
        """Run a task in the helper's thread, after all that were given before."""
        self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task(self)
            except Exception:  # whatever the device's library raises: there are further tasks
                logger.exception("a copy failed")
            del task  # and what it holds

    def close(self) -> None:
        """End the thread. The latest time for it is before the interpreter unloads the device's library."""
        atexit.unregister(self.close)
        self._tasks.put(None)
        self._thread.join(EXIT_GRACE_S)


_helpers: dict[Device, Helper] = {}
_creating = threading.Lock()


def helper_of(device: Device) -> Helper:
    """Return the helper of a device, a new one if it has none yet."""
    with _creating:
        if device not in _helpers:
            _helpers[device] = Helper(device)
        return _helpers[device]


def let_go(device: Device) -> Helper | None:
    """Forget the helper of a device that is not used any more, and return it for the caller to close."""
    with _creating:
        return _helpers.pop(device, None)


_of_parent: list[Helper] = []
"""Helpers that a forked child has got from its parent, kept so that nothing of theirs is freed."""


def _forget_after_fork() -> None:
    """Drop all helpers in a forked child, which has none of their threads.

    The child may not use the device, not even to free what the parent has pinned. The lock is made anew, since another
    thread of the parent may have held it.
    """
    global _creating
    _creating = threading.Lock()
    _of_parent.extend(_helpers.values())
    _helpers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
