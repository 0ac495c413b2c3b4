"""Warnings of long waits in a trio run (`protocol.wait_reasons`).

A call costs an entry in a table and its removal. While there is an entry, a system task looks at it every LOOK_S.
The reason of a wait is asked for only when a warning is due, by a task of its own, because it may have to ask a master.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field

import trio

from pccl.protocol.wait_reasons import LongWait

LOOK_S = 1.0
REASON_S = 3.0
"""Time that a reason may take."""

Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]
Reason = Callable[[], Awaitable[tuple[str, str]]]
"""A function that returns what a call waits for, and where to look."""


@dataclass(eq=False)
class waiting(AbstractContextManager[None]):  # noqa: N801 - a context, as trio's are named
    """A context for a call that waits, with its name or the schedule of its wait."""

    what: str | LongWait
    reason: Reason
    logger: Logger
    schedule: LongWait = field(init=False)
    is_over: bool = field(init=False, default=False)

    def __enter__(self) -> None:
        self.schedule = self.what if isinstance(self.what, LongWait) else LongWait(self.what, trio.current_time())
        board = _board()
        board.waits[self] = None
        if not board.is_looking:
            board.is_looking = True
            trio.lowlevel.spawn_system_task(_look, board)

    def __exit__(self, *_: object) -> None:
        self.is_over = True
        _board().waits.pop(self, None)
        if self.schedule.is_told:
            self.logger.warning("%s", self.schedule.ending(trio.current_time()))


@dataclass(eq=False)
class _Board:
    """The waits of one trio run."""

    waits: dict[waiting, None] = field(default_factory=dict)
    is_looking: bool = False


_boards: trio.lowlevel.RunVar[_Board] = trio.lowlevel.RunVar("pccl_waits")


def _board() -> _Board:
    try:
        return _boards.get()
    except LookupError:
        _boards.set(board := _Board())
        return board


async def _look(board: _Board) -> None:
    """Warn of long waits until the last wait is over."""
    try:
        while board.waits:
            await trio.sleep(LOOK_S)
            now = trio.current_time()
            for wait in list(board.waits):
                if wait.schedule.is_due(now):
                    trio.lowlevel.spawn_system_task(_warn, wait)
    finally:
        board.is_looking = False


async def _warn(wait: waiting) -> None:
    whom, where = "a reason that could not be found in time", "look at the master"
    with suppress(Exception), trio.move_on_after(REASON_S):  # a warning must not end anything
        whom, where = await wait.reason()
    if not wait.is_over:
        wait.logger.warning("%s", wait.schedule.warning(trio.current_time(), whom, where))
