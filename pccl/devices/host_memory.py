"""The host memory that copies from and to devices use.

Copies from and to pinned memory are asynchronous and fast, but the system cannot page it out: PINNED_BYTES_MAX bounds
it for each device of a process. Beyond the bound blocks are ordinary memory. An op never waits for memory, since two
peers that waited for different ops would deadlock.

Pinning is slow, so free blocks are kept for reuse, up to IDLE_BYTES_MAX. Sizes are rounded up to an eighth of a power
of two. A block is free when its last reference is gone.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import defaultdict, deque
from dataclasses import dataclass
from weakref import WeakSet

from pccl.devices.device import Device, HostMemory

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
        # Runs anywhere, also within `HostPool.take`: it must not take a lock.
        if hasattr(self, "_memory"):  # unless an interrupt came before
            self._returned.append(self._memory)


class HostPool:
    """The host memory of one device. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.RLock()
        self._returned: deque[_Memory] = deque()
        self._idle: defaultdict[int, list[_Memory]] = defaultdict(list)
        self._pinned: WeakSet[_Memory] = WeakSet()
        """All pinned memory, in use and idle."""

    def take(self, size_bytes: int) -> Block:
        """Return a block of at least `size_bytes`, pinned if there is room. MemoryError."""
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
                logger.warning("no more memory can be pinned for %s, copies are slower: %s", self._device.name, error)
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
        """Free idle blocks, the largest first, until at least `excess_bytes` are free or none are left."""
        for size in sorted(self._idle, reverse=True):
            while excess_bytes > 0 and self._idle[size]:
                self._idle[size].pop()
                excess_bytes -= size
