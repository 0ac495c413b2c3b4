"""The calls of a trio run that wait, and the warnings of those that wait for long (`protocol.long_wait`).

A call costs an entry in a table and its removal. While there is an entry a task of the trio run looks at the table now
and then; what it says of a wait is asked for then, by a task of its own, for it may have to ask a master.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field

import trio

from pccl.logs import UNASKED
from pccl.protocol.long_wait import LongWait

LOOK_S = 1.0
ACCOUNT_S = 3.0
"""Time that an account may take."""
FLAG = {UNASKED: True}
"""The attribute of all records of long waits."""

Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]
Account = Callable[[], Awaitable[tuple[str, str]]]
"""A function that returns for whom a call waits, and where to look."""


class waiting(AbstractContextManager[None]):  # noqa: N801 - a context, as trio's are named
    """A context for a call that waits. `account` is asked only when that has lasted for long."""

    def __init__(self, what: str | LongWait, account: Account, logger: Logger) -> None:
        """`what` is the call's name, or the schedule of its wait."""
        schedule = what if isinstance(what, LongWait) else LongWait(what, trio.current_time())
        self._wait = _Wait(schedule, account, logger)

    def __enter__(self) -> None:
        _board().enter(self._wait)

    def __exit__(self, *_: object) -> None:
        _board().leave(self._wait)


@dataclass(eq=False)
class _Wait:
    schedule: LongWait
    account: Account
    logger: Logger
    is_over: bool = False


@dataclass(eq=False)
class _Board:
    """The waits of one trio run."""

    waits: dict[_Wait, None] = field(default_factory=dict)
    is_looking: bool = False

    def enter(self, wait: _Wait) -> None:
        self.waits[wait] = None
        if not self.is_looking:
            self.is_looking = True
            trio.lowlevel.spawn_system_task(self._look)

    def leave(self, wait: _Wait) -> None:
        wait.is_over = True
        self.waits.pop(wait, None)
        if wait.schedule.is_told:
            wait.logger.warning("%s", wait.schedule.ending(trio.current_time()), extra=FLAG)

    async def _look(self) -> None:
        """Warn of waits that have lasted for long, until there is none."""
        try:
            while self.waits:
                await trio.sleep(LOOK_S)
                now = trio.current_time()
                for wait in list(self.waits):
                    if wait.schedule.is_due(now):
                        trio.lowlevel.spawn_system_task(_warn, wait)
        finally:
            self.is_looking = False


async def _warn(wait: _Wait) -> None:
    whom, where = "an account of it, which takes long, too", "look at the master"
    with suppress(Exception), trio.move_on_after(ACCOUNT_S):  # a warning must not end anything
        whom, where = await wait.account()
    if not wait.is_over:
        wait.logger.warning("%s", wait.schedule.warning(trio.current_time(), whom, where), extra=FLAG)


_present: trio.lowlevel.RunVar[_Board | None] = trio.lowlevel.RunVar("pccl_waits", None)


def _board() -> _Board:
    board = _present.get()
    if board is None:
        board = _Board()
        _present.set(board)
    return board
