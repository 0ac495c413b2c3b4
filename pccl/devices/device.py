"""The interface of a device that holds arrays: `Device`, the `Event`s of its streams, and `HostMemory`.

A device runs what it is given later, in *streams*: in order within one, in any order between two. Each thread of the
program has a current stream, which is where its own work goes. An *event* stands for the moment at which a stream has
come to where the event was made.
"""

from __future__ import annotations

from typing import Any, Protocol


class Event(Protocol):
    def wait(self) -> None:
        """Block this thread until the event has happened. Other threads have the GIL meanwhile."""


class HostMemory(Protocol):
    """Memory of this machine. It is freed with the object."""

    @property
    def address(self) -> int: ...


class Device(Protocol):
    """One device. Thread-safe. Its methods raise whatever the device or its library raises."""

    @property
    def name(self) -> str:
        """The name that users know the device by, such as 'cuda:0'."""

    def allocate(self, size_bytes: int, pinned: bool) -> HostMemory:
        """Allocate memory of this machine. A device copies from and to `pinned` memory by itself. MemoryError."""

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        """Return a new array of the dtype of `like`, in this thread's current stream."""

    def mark(self) -> Event:
        """Return the event that everything is done which this thread has given to its current stream so far."""

    def read(self, array: Any, start_byte: int, size_bytes: int, to: HostMemory, after: Event | None) -> Event:
        """Copy a stretch of a contiguous array to the beginning of `to`, in a stream apart from the program's own.

        The copy begins once `after` has happened. Returns the event that it is done.
        """

    def write(self, array: Any, start_byte: int, size_bytes: int, source: HostMemory) -> Event:
        """Copy the beginning of `source` to a stretch of a contiguous array, in this thread's current stream.

        Returns the event that it is done, from which on `source` may be used for something else.
        """

    def follow(self, event: Event) -> None:
        """Make whatever this thread gives to its current stream from now on wait for `event`."""

    def synchronize(self) -> None:
        """Block until everything is done that was given to any stream of the device."""
