"""Warnings of long waits for loops in ordinary threads, in the wording of all others (`protocol.wait_reasons`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pccl.protocol.wait_reasons import LongWait, how_to_look, where_to_look

__all__ = ["LoopWait", "how_to_look", "warning_to", "where_to_look"]


class LoopWait:
    """A context for a loop that waits. The loop calls `look` each time round. Only for one thread."""

    def __init__(self, what: str, say: Callable[[str], object]) -> None:
        """`say` is given each line, such as `warning_to` makes it."""
        self._wait = LongWait(what, time.monotonic())
        self._say = say

    def look(self, whom: str, where: str) -> None:
        """Warn if it is time, with the peers that the loop waits for (`whom`), and where to look."""
        now = time.monotonic()
        if self._wait.is_due(now):
            self._say(self._wait.warning(now, whom, where))

    def __enter__(self) -> LoopWait:
        return self

    def __exit__(self, *_: object) -> None:
        if self._wait.is_told:
            self._say(self._wait.ending(time.monotonic()))


def warning_to(logger: logging.Logger) -> Callable[[str], object]:
    """Return a function that logs a line about a long wait."""
    return lambda line: logger.warning("%s", line)
