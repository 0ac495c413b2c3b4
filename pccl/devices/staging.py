"""A reduce of arrays on a device, through the memory of this machine.

Theory of operation. The op is divided into *pieces* of PIECE_BYTES, in the same way on all peers. A piece is an op of
the engine's own, which begins when the piece has been copied from the device; so the device copies the later pieces
while the network works on the earlier ones. To everybody else the pieces are one op: one launch, one tag, one verdict
(`pccl.runtime.pieces`). Results are copied to the device when the verdict is there and is commit, so an abort
leaves the device's arrays as they were, in place or not.

*Order.* What the launching thread had given to its current stream comes before the first copy: gradients may
still be in the making when their reduce is launched. The way back goes through the current stream of the thread that
waits for the op, so what that thread gives to this stream afterwards finds the result; `wait` itself does not block for
the copy. A thread that uses other streams must order them itself, as with any work of the device.

*Memory.* On the host the op needs its size once, pinned, and once more in the engine, which works in place and keeps
what it overwrites (an abort has no use for it here, but a neighbour may have to be sent it again). All of the results
must be kept until the verdict, so this cannot be less, however many pieces. On the device nothing is needed.

*Who does it.* Copies to the host are given to the device and awaited by one thread for each device, ops in the order
of their launches. That needs the GIL for a moment between two pieces, unlike what the engine does with a piece.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from pccl.devices.device import Device, Event
from pccl.devices.host_memory import Block, HostPool
from pccl.runtime.engine import Buffers

PIECE_BYTES = 16 << 20
AHEAD = 2
"""Copies to the host that the device has been given and that are not there yet: while we take note of one, it does the
next."""

logger = logging.getLogger("pccl.devices")

Ready = Callable[[int, Buffers], None]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A piece's place in the op."""

    number: int
    start: int
    count: int
    """Elements."""


def stretches(count: int, item_bytes: int) -> list[Stretch]:
    """At least one. The same on all peers: this is part of what they must agree on."""
    length = PIECE_BYTES // item_bytes
    pieces = max(1, -(-count // length))
    return [Stretch(i, i * length, min(length, count - i * length)) for i in range(pieces)]


class Staging:
    """One launch of an op. Create it in the thread that launches, which is asked for its stream.

    `begin` may be called once. `deliver` is for any thread, again and again.
    """

    def __init__(self, device: Device, send: Any, recv: Any, count: int, item_bytes: int) -> None:
        self.pieces = stretches(count, item_bytes)
        self._device = device
        self._send = send
        self._recv = recv
        self._item_bytes = item_bytes
        self._launched = device.mark()
        self._blocks: dict[int, Block] = {}
        self._is_over = False
        self._delivering = threading.RLock()
        self._delivered: Event | None = None

    @property
    def piece_count(self) -> int:
        return len(self.pieces)

    def begin(self, ready: Ready, failed: Callable[[BaseException], None]) -> None:
        """Starts to copy. `ready` hears of each piece that is in its block, in order, in another thread; `failed`
        that no more will come, and why."""
        helper_of(self._device).run(lambda helper: self._read(helper.pool, ready, failed))

    def abandon(self) -> None:
        """The op has been aborted: what has not been copied yet need not be."""
        self._is_over = True

    def _read(self, pool: HostPool, ready: Ready, failed: Callable[[BaseException], None]) -> None:
        under_way: list[tuple[Stretch, Block, Event]] = []
        try:
            for stretch in self.pieces:
                if self._is_over:
                    break
                size_bytes = stretch.count * self._item_bytes
                block = pool.take(size_bytes)
                start_byte = stretch.start * self._item_bytes
                arrived = self._device.read(self._send, start_byte, size_bytes, block.host, self._launched)
                under_way.append((stretch, block, arrived))
                if len(under_way) >= AHEAD:
                    self._arrive(*under_way.pop(0), ready)
            while under_way:
                self._arrive(*under_way.pop(0), ready)
        except BaseException as error:
            for _, _, arrived in under_way:
                arrived.wait()  # before its block is used for anything else
            failed(error)

    def _arrive(self, stretch: Stretch, block: Block, arrived: Event, ready: Ready) -> None:
        arrived.wait()
        self._blocks[stretch.number] = block
        if not self._is_over:
            ready(stretch.number, Buffers(block.address, block.address, stretch.count, block))

    def deliver(self) -> None:
        """Puts the results of a committed op into the device's array, as seen from this thread's current stream."""
        with self._delivering:
            if self._delivered is not None:
                self._device.follow(self._delivered)
                return
            assert len(self._blocks) == len(self.pieces)
            last: Event | None = None
            for stretch in self.pieces:
                start_byte, size_bytes = stretch.start * self._item_bytes, stretch.count * self._item_bytes
                host = self._blocks[stretch.number].host
                last = self._device.write(self._recv, start_byte, size_bytes, host)
            assert last is not None
            self._delivered = last
            blocks, self._blocks = self._blocks, {}
            helper_of(self._device).run(lambda helper: _release(helper.pool, blocks, last))


def _release(pool: HostPool, blocks: dict[int, Block], read: Event) -> None:
    """The device has read them: they may be used for something else."""
    read.wait()
    blocks.clear()
    pool.trim()


class Helper:
    """The thread and the host memory of one device."""

    def __init__(self, device: Device) -> None:
        self.pool = HostPool(device)
        self._thread = ThreadPoolExecutor(1, f"pccl-{device.name}")

    def run(self, task: Callable[[Helper], None]) -> None:
        """After all that was given before."""
        try:
            self._thread.submit(self._run, task)
        except RuntimeError:  # the interpreter is exiting
            self._run(task)

    def _run(self, task: Callable[[Helper], None]) -> None:
        try:
            task(self)
        except Exception:
            logger.exception("a copy failed")


_helpers: dict[Device, Helper] = {}
_creating = threading.Lock()


def helper_of(device: Device) -> Helper:
    with _creating:
        if device not in _helpers:
            _helpers[device] = Helper(device)
        return _helpers[device]


def _forget_after_fork() -> None:
    """Threads are not copied. The child may not use the device, but a lock must not be held for ever."""
    global _creating
    _creating = threading.Lock()
    _helpers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
