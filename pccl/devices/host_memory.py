"""The memory of this machine that copies from and to devices go through.

A device copies from and to pinned memory at full speed and while other work goes on, and the system cannot use that
memory for anything else. So there is a bound, PINNED_BYTES_MAX for each device of a process. Beyond it, or beyond what
the system pins, blocks are ordinary memory, which is copied at about a third of the speed. Nobody ever waits for
memory: two peers that waited for different ops would wait for ever.

Pinning is slow. Free blocks are therefore kept and used again, up to IDLE_BYTES_MAX. Sizes are powers of two from
SIZE_MIN, so that a block of one op fits the next. Freed blocks go back to torch, which keeps them pinned for later
tensors of the same size.

A block is free again when nothing refers to it any more: while the engine may read it, or a copy is under way, somebody
does. The amount of pinned memory is summed up over the blocks that exist, and not counted along: a Ctrl-C in the middle
of `take` may free the memory that it was about to hand out, but makes no count wrong.
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
    """A stretch of host memory, of at least as many bytes as were asked for, with any contents."""

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
        # Anywhere, also within `HostPool.take`: no lock may be taken here.
        if hasattr(self, "_memory"):  # else an interrupt came before
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
        size = max(SIZE_MIN, 1 << max(0, size_bytes - 1).bit_length())
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
        """Free idle blocks beyond the bound. To be called when an op has ended."""
        with self._lock:
            self._free(self.idle_bytes - IDLE_BYTES_MAX)

    @property
    def pinned_bytes(self) -> int:
        """The bytes of all pinned memory, in use and idle."""
        with self._lock:
            return sum(memory.size_bytes for memory in self._pinned)

    @property
    def idle_bytes(self) -> int:
        """The bytes of blocks that wait to be used again."""
        with self._lock:
            self._sort()
            return sum(size * len(idle) for size, idle in self._idle.items())

    def _sort(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            if memory.is_pinned:
                self._idle[memory.size_bytes].append(memory)

    def _free(self, excess_bytes: int) -> None:
        """Free at least so many bytes of idle blocks, the largest first, or all that are idle."""
        for size in sorted(self._idle, reverse=True):
            while excess_bytes > 0 and self._idle[size]:
                self._idle[size].pop()
                excess_bytes -= size
