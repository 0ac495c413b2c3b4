"""The interface of a device that holds arrays: `Device`, the `Event`s of its streams, and `HostMemory`.

A device runs work asynchronously, in *streams*: in order within a stream, in any order between streams. Each thread of
the program has a current stream for its own work. An *event* marks a point in a stream, and happens when the stream
reaches it.
"""

from __future__ import annotations

from typing import Any, Protocol


class Event(Protocol):
    def wait(self) -> None:
        """Block this thread, without the GIL, until the event has happened."""


class HostMemory(Protocol):
    """Host memory, freed with the object."""

    @property
    def address(self) -> int: ...


class Device(Protocol):
    """One device. Thread-safe. Its methods raise whatever the device or its library raises."""

    @property
    def name(self) -> str:
        """The device's name for users, such as 'cuda:0'."""

    def allocate(self, size_bytes: int, pinned: bool) -> HostMemory:
        """Allocate host memory. Copies from and to `pinned` memory are asynchronous. MemoryError."""

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        """Return a new array with the dtype of `like`, in this thread's current stream."""

    def mark(self) -> Event:
        """Return an event at the end of this thread's current stream."""

    def read(self, array: Any, start_byte: int, size_bytes: int, to: HostMemory, after: Event | None) -> Event:
        """Copy a range of a contiguous array to the beginning of `to`, in a stream of the device's own, after `after`.
        Return the event of its end."""

    def write(self, array: Any, start_byte: int, size_bytes: int, source: HostMemory) -> Event:
        """Copy the beginning of `source` to a range of a contiguous array, in this thread's current stream. Return the
        event of its end; afterwards `source` may be reused."""

    def follow(self, event: Event) -> None:
        """Make later work in this thread's current stream wait for `event`."""

    def synchronize(self) -> None:
        """Block until all streams of the device are done."""
