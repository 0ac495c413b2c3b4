"""Staging: runs ops on a device's arrays through host memory.

The input is copied to host memory, the engine runs the op there, and a committed result is copied back. Other peers see
an ordinary op. An abort leaves the device's arrays unchanged.

The copy to the host waits for the launching thread's current stream; the copy back uses the current stream of the
waiting thread. One thread per device allocates memory and waits for copies, in the order of launches.

If the device fails before the op begins, the op fails on all peers. If it fails after the verdict, this peer leaves the
run, because its arrays differ from those of the other peers.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pccl.devices.device import Block, Device, Event, HostPool
from pccl.runtime.data_plane.op_spec import Buffers

EXIT_GRACE_S = 5.0

logger = logging.getLogger("pccl.devices")


@dataclass(frozen=True, slots=True)
class StagedArrays:
    """The contiguous arrays of an op."""

    send: Any
    recv: Callable[[], Any]
    """Returns the array for the result. Called when there is a result."""
    count: int
    """Number of elements, as the engine counts them for the collective."""
    send_bytes: int | None
    """Number of bytes to send from the start of the array; None if this peer does not send."""
    recv_bytes: int | None
    """Size of the result; None if this peer does not receive."""
    is_in_place: bool = False
    """Whether one block of host memory is used for both sending and receiving."""
    parts: tuple[Sequence[int], Sequence[int]] | None = None
    """As in `Buffers`."""


class Staging:
    """One launch of an op. Create it in the launching thread, because the copy to the host waits for its stream."""

    def __init__(self, device: Device, load: Callable[[], StagedArrays]) -> None:
        """`load` returns the arrays. It is called at the start of the op, because sizes may depend on the group."""
        self._device = device
        self._load = load
        self._arrays: StagedArrays | None = None
        self._launched = device.mark()
        self._blocks: tuple[Block | None, Block | None] = None, None
        """Host memory to send from and to receive into. The engine uses it until the op has ended."""
        self._is_over = False
        self._delivering = threading.RLock()
        self._delivered: Event | None = None

    def begin(self, arrived: Callable[[Buffers | BaseException], None]) -> None:
        """Start copying from the device. The device's thread calls `arrived` with the buffers or the error."""
        arrays = self._arrays = self._load()

        def read(helper: Helper) -> None:
            if self._is_over:
                return
            try:
                arrived(self._read(arrays, helper.pool))
            except BaseException as error:  # raised by the device's library; signals do not reach this thread
                arrived(error)

        helper_of(self._device).run(read)

    def _read(self, arrays: StagedArrays, pool: HostPool) -> Buffers:
        source = pool.take(arrays.send_bytes) if arrays.send_bytes is not None else None
        target = source
        if not arrays.is_in_place:
            target = pool.take(arrays.recv_bytes) if arrays.recv_bytes is not None else None
        if source is not None:
            assert arrays.send_bytes is not None
            self._device.read(arrays.send, 0, arrays.send_bytes, source.host, self._launched).wait()
        blocks = self._blocks = source, target
        send, recv = (block.address if block is not None else 0 for block in blocks)
        return Buffers(send, recv, arrays.count, blocks, arrays.parts)

    def abandon(self) -> None:
        """Skip the copy if it has not started yet."""
        self._is_over = True

    def release(self, released: Callable[[], None]) -> None:
        """Call `released` once the device no longer reads the caller's array."""
        helper_of(self._device).run(lambda _: released())  # after `read`, in the same thread

    def deliver(self) -> None:
        """Copy a committed op's result to the device's array, in this thread's current stream."""
        arrays = self._arrays
        assert arrays is not None
        with self._delivering:
            if self._delivered is not None:
                self._device.follow(self._delivered)
                return
            blocks = list(self._blocks)
            last: Event | None = None
            if arrays.recv_bytes is not None:
                _, target = blocks
                assert target is not None
                last = self._device.write(arrays.recv(), 0, arrays.recv_bytes, target.host)
            helper_of(self._device).run(lambda helper: _release(helper.pool, blocks, last))
            self._delivered = last
            self._blocks = None, None


def _release(pool: HostPool, blocks: list[Block | None], read: Event | None) -> None:
    if read is not None:
        read.wait()
    blocks.clear()
    pool.trim()


class Helper:
    """The thread and the host memory of one device."""

    def __init__(self, device: Device) -> None:
        self.pool = HostPool(device)
        self._tasks: queue.SimpleQueue[Callable[[Helper], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"pccl-{device.name}", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def run(self, task: Callable[[Helper], None]) -> None:
        self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task(self)
            except Exception:  # raised by the device's library
                logger.exception("a copy failed")
            del task  # and its references

    def close(self) -> None:
        """End the thread, before the interpreter unloads the device's library."""
        atexit.unregister(self.close)
        self._tasks.put(None)
        self._thread.join(EXIT_GRACE_S)


_helpers: dict[Device, Helper] = {}
_creating = threading.Lock()


def helper_of(device: Device) -> Helper:
    with _creating:
        if device not in _helpers:
            _helpers[device] = Helper(device)
        return _helpers[device]


def remove_helper(device: Device) -> Helper | None:
    """Remove an unused device's helper and return it for the caller to close."""
    with _creating:
        return _helpers.pop(device, None)


_of_parent: list[Helper] = []
"""In a forked child, the parent's helpers, kept so that their memory is not freed."""


def _forget_after_fork() -> None:
    """Drop all helpers in a forked child, which must not use the device, not even to free pinned memory."""
    global _creating
    _creating = threading.Lock()
    _of_parent.extend(_helpers.values())
    _helpers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)
