"""A device made of threads: it runs its tasks late, in streams, as a GPU does.

Every stream is a thread with a queue. Each task first sleeps for a short random time, so that code that lacks a
synchronization reads data that is not there yet, or no longer there. New host memory is filled with poison. Tests set
the device's attributes to make it pause or fail.

Its threads, and pccl's threads for it, end when it is closed (`running`).

With `torch_tensors`, torch tensors on the CPU count as the device's. The program's operations on them take effect at
once, and so do copies to them; copies from them complete late.
"""

from __future__ import annotations

import ctypes
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from pccl import DataType, _arrays
from pccl._arrays import Operand
from pccl.devices import staging, torch_cuda
from pccl.devices.device import Event, HostMemory

DELAY_S_MAX = 0.002
POISON = 0xA5
WAIT_S = 60.0

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class FakeEvent:
    def __init__(self) -> None:
        self._happened = threading.Event()

    def wait(self) -> None:
        assert self._happened.wait(WAIT_S), "a fake event has not happened"

    def happen(self) -> None:
        self._happened.set()


class BrokenEvent(FakeEvent):
    """The event of a copy that fails."""

    def wait(self) -> None:
        raise RuntimeError("the fake device is broken")


class Stream:
    """Runs tasks one after the other, each after a short delay."""

    def __init__(self, random_: random.Random) -> None:
        self._random = random_
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            time.sleep(self._random.random() * DELAY_S_MAX)
            task()

    def give(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def close(self) -> None:
        """Wait until all tasks are done, and end the thread."""
        self._tasks.put(None)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "a stream of a fake device has not come to its end"

    def record(self) -> FakeEvent:
        event = FakeEvent()
        self.give(event.happen)
        return event


class FakeMemory:
    def __init__(self, size_bytes: int) -> None:
        self.bytes: Bytes = np.full(max(1, size_bytes), POISON, np.uint8)
        self.address: int = self.bytes.ctypes.data


class FakeArray:
    """An array on the device. Only the device's streams touch `_values`."""

    def __init__(self, device: FakeDevice, values: Any) -> None:
        self.device = device
        self._values = np.ascontiguousarray(values).copy()
        self.shape, self.dtype, self.size = self._values.shape, self._values.dtype, self._values.size
        self.is_writable = True

    def set_later(self, values: Any) -> FakeArray:
        """Set its values by a kernel in this thread's current stream."""
        values = np.array(values, self.dtype)
        self.device.current.give(lambda: time.sleep(self.device.kernel_s))
        self.device.current.give(lambda: np.copyto(self._values, values))
        return self

    def get(self) -> Any:
        """Return its values as the program sees them: after all tasks in this thread's current stream."""
        found: list[Any] = []
        self.device.current.give(lambda: found.append(self._values.copy()))
        self.device.current.record().wait()
        return found[0]

    def settled(self) -> Any:
        """Return its values after all tasks in all streams, for a thread other than the one that used the array."""
        self.device.synchronize()
        return self._values.copy()

    def bytes(self) -> Bytes:
        return self._values.reshape(-1).view(np.uint8)


class FakeDevice:
    """See `pccl.devices.device.Device`."""

    def __init__(self, seed: int = 0, name: str = "fake:0") -> None:
        self.name = name
        self.reads_held = threading.Event()
        """While it is cleared, copies to the host wait."""
        self.reads_held.set()
        self.kernel_s = self.write_s = 0.0
        """The time that a kernel, or a copy to the device, takes in addition to the usual delay."""
        self.fails_after_reads: int | None = None
        self.breaks_late = self.fails_to_write = False
        """`breaks_late`: a copy to the host that fails raises only when it is waited for."""
        self.can_pin = True
        self.reads = self.writes = 0
        self.pinned_allocated: list[int] = []
        self.unpinned_allocated: list[int] = []
        self._random = random.Random(seed)
        self._all_streams: list[Stream] = []
        self._read_stream = self.new_stream()
        self._streams = threading.local()

    def new_stream(self) -> Stream:
        stream = Stream(random.Random(self._random.random()))
        self._all_streams.append(stream)
        return stream

    def close(self) -> None:
        self.reads_held.set()
        helper = staging.remove_helper(self)
        if helper is not None:
            helper.close()
        for stream in self._all_streams:
            stream.close()

    @property
    def current(self) -> Stream:
        """This thread's current stream: a stream of its own, unless the program has set another."""
        if not hasattr(self._streams, "current"):
            self._streams.current = self.new_stream()
        stream: Stream = self._streams.current
        return stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current
        self._streams.current = stream
        try:
            yield
        finally:
            self._streams.current = before

    def array(self, values: Any) -> FakeArray:
        return FakeArray(self, values)

    # The methods that pccl calls.

    def allocate(self, size_bytes: int, pinned: bool) -> FakeMemory:
        if pinned and not self.can_pin:
            raise MemoryError("the fake device does not pin")
        (self.pinned_allocated if pinned else self.unpinned_allocated).append(size_bytes)
        return FakeMemory(size_bytes)

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        if not isinstance(like, FakeArray):
            return sys.modules["torch"].empty(shape, dtype=like.dtype)
        return self.array(np.full(shape, POISON, np.uint8).astype(like.dtype))

    def mark(self) -> FakeEvent:
        return self.current.record()

    def read(self, array: Any, start_byte: int, size_bytes: int, to: HostMemory, after: Event | None) -> Event:
        if self.fails_after_reads is not None and self.reads >= self.fails_after_reads:
            if self.breaks_late:
                return BrokenEvent()
            raise RuntimeError("the fake device is broken")
        self.reads += 1
        if after is not None:
            self._read_stream.give(after.wait)
        self._read_stream.give(lambda: assert_true(self.reads_held.wait(WAIT_S)))
        self._read_stream.give(
            lambda: copy(to.address, bytes_of(array)[start_byte : start_byte + size_bytes].ctypes.data, size_bytes)
        )
        return self._read_stream.record()

    def write(self, array: Any, start_byte: int, size_bytes: int, source: HostMemory) -> Event:
        if self.fails_to_write:
            raise RuntimeError("the fake device is broken")
        self.writes += 1
        self.current.give(lambda: time.sleep(self.write_s))
        self.current.give(
            lambda: copy(bytes_of(array)[start_byte : start_byte + size_bytes].ctypes.data, source.address, size_bytes)
        )
        written = self.current.record()
        if not isinstance(array, FakeArray):
            written.wait()
        return written

    def follow(self, event: Event) -> None:
        self.current.give(event.wait)

    def synchronize(self) -> None:
        for event in [stream.record() for stream in self._all_streams]:
            event.wait()


def bytes_of(array: Any) -> Bytes:
    """Return the bytes of a FakeArray, or of a torch tensor."""
    if isinstance(array, FakeArray):
        return array.bytes()
    found: Bytes = array.view(-1).view(sys.modules["torch"].uint8).numpy()
    return found


def assert_true(value: bool) -> None:
    assert value


def copy(target: int, source: int, size_bytes: int) -> None:
    ctypes.memmove(target, source, size_bytes)


def _operand(array: Any) -> Operand | None:
    if not isinstance(array, FakeArray):
        return None
    dtype = DataType.from_numpy_dtype(array.dtype)
    address = array._values.ctypes.data
    return Operand(address, array.size, dtype, array.shape, array.is_writable, array, array.device)


@contextmanager
def known_arrays() -> Iterator[None]:
    """Make pccl accept FakeArrays."""
    _arrays._others.append(_operand)
    try:
        yield
    finally:
        _arrays._others.remove(_operand)


@contextmanager
def running(count: int = 1) -> Iterator[list[FakeDevice]]:
    """Run devices whose arrays pccl accepts."""
    with known_arrays(), ExitStack() as stack:
        devices = [FakeDevice(i) for i in range(count)]
        for device in devices:
            stack.callback(device.close)
        yield devices


@contextmanager
def torch_tensors(device: FakeDevice) -> Iterator[None]:
    """Make pccl treat all tensors as the device's."""
    before = torch_cuda.device_of

    def device_of(_: Any) -> Any:
        return device

    torch_cuda.device_of = device_of
    try:
        yield
    finally:
        torch_cuda.device_of = before
