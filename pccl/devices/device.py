"""What pccl asks of a device that holds arrays.

A device runs what it is given later, in *streams*: in order within one, in any order between two. Each thread of the
program has a current stream, which is where its own work goes. An *event* stands for the moment at which a stream has
come to where the event was made.
"""

from __future__ import annotations

from typing import Any, Protocol


class Event(Protocol):
    def wait(self) -> None:
        """Blocks this thread, without the GIL, until it has happened."""


class HostMemory(Protocol):
    """Memory of this machine, for as long as the object lives."""

    @property
    def address(self) -> int: ...


class Device(Protocol):
    """One device. Thread-safe. Whatever the device or its library raises goes to the caller."""

    @property
    def name(self) -> str:
        """As users know it, such as 'cuda:0'."""

    def allocate(self, size_bytes: int, pinned: bool) -> HostMemory:
        """`pinned`: the device copies from and to it by itself. MemoryError."""

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        """A new array of the same dtype, in this thread's current stream."""

    def mark(self) -> Event:
        """Everything that this thread has given to its current stream so far."""

    def read(self, array: Any, start_byte: int, size_bytes: int, to: HostMemory, after: Event | None) -> Event:
        """Copies a stretch of a contiguous array to the beginning of `to`, not before `after`, apart from the program's
        own streams. The event: it is there."""

    def write(self, array: Any, start_byte: int, size_bytes: int, source: HostMemory) -> Event:
        """The reverse, in this thread's current stream. The event: `source` has been read."""

    def follow(self, event: Event) -> None:
        """What this thread gives to its current stream from now on waits for `event`."""

    def block_digests(self, array: Any, block_bytes: int, blocks: int) -> bytes | None:
        """The BLAKE3 digests of an array's first blocks, one after the other; None if the device cannot. Blocks this
        thread."""

    def synchronize(self) -> None:
        """Blocks until all that was given to any stream of the device is done."""
