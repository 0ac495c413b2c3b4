"""A worker's communicator, and calls of it that a SIGINT may interrupt.

*Not knowing.* A signal (`Plan.interrupts`) raises KeyboardInterrupt where the main thread is in a call. Where a handle
was waited for, it is waited for again. A result that is there is taken. Otherwise the op may have been committed by the
others, as when the library itself says that its outcome is unknown: the peer leaves its session and comes back as a
newcomer. So it does when another call was interrupted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TypeVar

from pccl import Communicator, Result
from pccl.stress.errors import LeftSessionError

T = TypeVar("T")

LEFT_OUT = (Result.MASTER_CONNECTION_FAILED, Result.RANK_CONNECTION_FAILED)
"""The peer was evicted, refused, or has lost the master. It connects again."""


class Calls:
    """The communicator of the present session. Ops may be called from any thread, everything else from the main one."""

    def __init__(self, new_communicator: Callable[[], Communicator], are_interrupted: bool) -> None:
        """`are_interrupted`: SIGINTs are sent to this process."""
        self._new_communicator = new_communicator
        self._are_interrupted = are_interrupted
        self._may_be_interrupted = False
        """The main thread is in a call of the library."""
        self.has_left = False
        """The session was left, because nobody can know how a call has ended."""
        self.communicator = new_communicator()

    def renew(self) -> None:
        """Take another communicator; the former one is closed."""
        self.communicator = self._new_communicator()

    def begin_session(self) -> None:
        self.has_left = False

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGINT: interrupt the call that the main thread is in, if it is in one."""
        if self._may_be_interrupted:
            self._may_be_interrupted = False
            raise KeyboardInterrupt

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Surround a call of the library. On other threads than the main one it changes nothing."""
        if not self._are_interrupted or threading.current_thread() is not threading.main_thread():
            yield
            return
        try:
            self._may_be_interrupted = True
            yield
        finally:
            self._may_be_interrupted = False

    def leave_session(self, why: str, is_state_spoiled: bool = False) -> NoReturn:
        """Close the communicator, which fails the calls of other threads, and raise LeftSessionError."""
        self.has_left = True
        self.communicator.close()
        raise LeftSessionError(why, is_state_spoiled)

    def joint(self, call: Callable[[], T], name: str, spoils: bool = False) -> T:
        """Make a call other than a reduce. `spoils`: an interrupt may leave the state half overwritten."""
        try:
            with self.interruptible():
                return call()
        except KeyboardInterrupt:
            self.leave_session(f"interrupted in {name}", is_state_spoiled=spoils)
