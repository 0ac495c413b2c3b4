"""The interface of a device that holds arrays: `Device`, the `Event`s of its streams, and its `HostPool`.

A device runs work asynchronously in *streams*. Work within a stream runs in order, but streams are independent. Each
thread of the program has a current stream for its work. An *event* marks a point in a stream and happens when the
stream reaches it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet


class Event(Protocol):
    def wait(self) -> None:
        """Block this thread until the event has happened, without holding the GIL."""


class HostMemory(Protocol):
    """Host memory that is freed with the object."""

    @property
    def address(self) -> int: ...


class Device(Protocol):
    """One device. Thread-safe. Exceptions from the device or its library propagate."""

    @property
    def name(self) -> str:
        """The device's name for users, such as 'cuda:0'."""

    def allocate(self, size_bytes: int, pinned: bool) -> HostMemory:
        """Allocate host memory. Copies to and from `pinned` memory are asynchronous. Raises MemoryError."""

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        """Return a new array with the dtype of `like`, allocated in this thread's current stream."""

    def mark(self) -> Event:
        """Return an event at the end of this thread's current stream."""

    def read(self, array: Any, start_byte: int, size_bytes: int, to: HostMemory, after: Event | None) -> Event:
        """Copy a range of a contiguous array to the start of `to`, in a separate stream, once `after` has happened.
        Return an event that marks the end of the copy."""

    def write(self, array: Any, start_byte: int, size_bytes: int, source: HostMemory) -> Event:
        """Copy the start of `source` to a range of a contiguous array, in this thread's current stream. Return an event
        that marks the end of the copy; `source` may be reused after it."""

    def follow(self, event: Event) -> None:
        """Make later work in this thread's current stream wait for `event`."""

    def synchronize(self) -> None:
        """Block until all of the device's streams are done."""


logger = logging.getLogger("pccl.devices")

PINNED_BYTES_MAX = int(os.environ.get("PCCL_PINNED_BYTES", 1 << 30))
IDLE_BYTES_MAX = 256 << 20
SIZE_MIN = 4096


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Memory:
    host: HostMemory
    size_bytes: int
    is_pinned: bool


class Block:
    """Host memory of at least the requested size, with any contents."""

    __slots__ = ("_memory", "_returned")

    def __init__(self, memory: _Memory, returned: deque[_Memory]) -> None:
        self._returned = returned
        self._memory = memory

    @property
    def host(self) -> HostMemory:
        return self._memory.host

    @property
    def address(self) -> int:
        return self._memory.host.address

    @property
    def is_pinned(self) -> bool:
        return self._memory.is_pinned

    def __del__(self) -> None:
        # May run anywhere, even within `HostPool.take`, so it must not take a lock.
        if hasattr(self, "_memory"):  # unless an interrupt has ended `__init__` early
            self._returned.append(self._memory)


class HostPool:
    """The host memory for copies to and from one device. Thread-safe.

    Copies are asynchronous and fast with pinned memory. Because the system cannot page it out, PINNED_BYTES_MAX limits
    it; beyond that limit, blocks are ordinary memory. An op never waits for memory, because two peers whose waits
    depend on different ops could deadlock. Pinning is slow, so free blocks are kept for reuse, up to IDLE_BYTES_MAX.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.RLock()
        self._returned: deque[_Memory] = deque()
        self._idle: defaultdict[int, list[_Memory]] = defaultdict(list)
        self._pinned: WeakSet[_Memory] = WeakSet()
        """All pinned memory, whether in use or idle."""

    def take(self, size_bytes: int) -> Block:
        """Return a block of at least `size_bytes`, pinned if the limit allows it. Raises MemoryError."""
        step = max(SIZE_MIN, 1 << max(0, size_bytes - 1).bit_length() >> 3)
        size = max(1, -(-size_bytes // step)) * step
        with self._lock:
            self._sort()
            if self._idle[size]:
                return Block(self._idle[size].pop(), self._returned)
            self._free(self.pinned_bytes + size - PINNED_BYTES_MAX)
            return Block(self._allocate(size), self._returned)

    def _allocate(self, size: int) -> _Memory:
        if self.pinned_bytes + size <= PINNED_BYTES_MAX:
            try:
                memory = _Memory(self._device.allocate(size, True), size, True)
                self._pinned.add(memory)
                return memory
            except MemoryError as error:
                logger.warning("cannot pin more memory for %s, so copies are slower: %s", self._device.name, error)
        return _Memory(self._device.allocate(size, False), size, False)

    def trim(self) -> None:
        with self._lock:
            self._free(self.idle_bytes - IDLE_BYTES_MAX)

    @property
    def pinned_bytes(self) -> int:
        with self._lock:
            return sum(memory.size_bytes for memory in self._pinned)

    @property
    def idle_bytes(self) -> int:
        with self._lock:
            self._sort()
            return sum(size * len(idle) for size, idle in self._idle.items())

    def _sort(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            if memory.is_pinned:
                self._idle[memory.size_bytes].append(memory)

    def _free(self, excess_bytes: int) -> None:
        """Free idle blocks, largest first, until at least `excess_bytes` are freed or none are left."""
        for size in sorted(self._idle, reverse=True):
            while excess_bytes > 0 and self._idle[size]:
                self._idle[size].pop()
                excess_bytes -= size
