"""Training objects that have made their own connection: one for each thread and run, left in order as the program ends.

*The end of a program.* A program that does not close such an object leaves the run all the same as the interpreter
ends, and what the last step has left is compared then, as `close` would. Python prints what an atexit callback raises
and forgets it, so a divergence found there would leave the exit status at 0. What else could be done:

1. `os._exit` with another status would skip the callbacks that are still to come, which write other libraries' logs.
2. `sys.exit` in a callback is ignored.
3. The C library's exit may be called again by what it calls as the process ends, and the last status given counts:
   glibc documents that, and goes on with what is left to be called. So a call of it with the status 1 is registered,
   which comes after all of Python's end, when everything is written.
4. With other C libraries an interpreter that fails to flush standard output as it ends has the status 120, as Python
   documents for `sys.exit`. So the divergence is raised once more from there.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import weakref
from typing import Any, Protocol

from pccl import Communicator, PCCLError

FAILURE = 1
"""The exit status after a divergence."""

_of_thread = threading.local()
"""The last object that this thread has added, as a weak reference, and its `address`."""


class Connected(Protocol):
    """A training object with a communicator of its own. It can be referred to weakly and hashed."""

    @property
    def own_communicator(self) -> Communicator: ...
    def close(self) -> None: ...


_all: weakref.WeakSet[Any] = weakref.WeakSet()


def add(connected: Connected, address: str) -> None:
    """Note that this object is in the run at `address`, to be closed when the program ends."""
    _of_thread.latest, _of_thread.address = weakref.ref(connected), address
    _all.add(connected)


def is_thread_in(address: str) -> bool:
    """Whether this thread has an object in the run at `address` that is connected still."""
    latest = getattr(_of_thread, "latest", lambda: None)()
    return latest is not None and _of_thread.address == address and _is_connected(latest)


def _is_connected(connected: Connected) -> bool:
    try:
        return connected.own_communicator.world_size > 0
    except PCCLError:
        return False


class _FailingFlush:
    """Standard output that fails to be flushed, once, after what was printed is written."""

    def __init__(self, stream: Any, error: Exception) -> None:
        self._stream = stream
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        sys.stdout = self._stream
        if self._stream is not None:
            self._stream.flush()
        raise RuntimeError("peers do not have the same state at the end of the run: exit status 120") from self._error

    closed = False


def _exit_with_failure() -> bool:
    """Have this process, which is ending, end with the status 1. Return False where the C library cannot do that."""
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 - only glibc has it
        function = ctypes.cast(libc.exit, ctypes.c_void_p)
        return bool(libc["__cxa_atexit"](function, ctypes.c_void_p(FAILURE), None) == 0)
    except (AttributeError, OSError):
        return False


@atexit.register
def _close_all() -> None:
    """Close all objects that are connected still. Where the program ends by an exception, the run did not end in order,
    and nothing is compared. An error is raised when all are closed, and decides the exit status."""
    if getattr(sys, "last_value", None) is not None:
        return
    errors = []
    for each in [each for each in _all if _is_connected(each)]:
        try:
            each.close()
        except Exception as error:
            errors.append(error)
    if errors:
        if not _exit_with_failure():
            sys.stdout = _FailingFlush(sys.stdout, errors[0])
        raise errors[0]
