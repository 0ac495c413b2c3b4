"""Warnings about long waits in loops of ordinary threads, worded as in `protocol.wait_reasons`."""

from __future__ import annotations

import logging
import time

from pccl.protocol.wait_reasons import LongWait
from pccl.protocol.wait_reasons import where_to_look as where_to_look


class LoopWait:
    """A context for a loop that waits in one thread. The loop calls `look` in each iteration."""

    def __init__(self, what: str, logger: logging.Logger) -> None:
        self._wait = LongWait(what, time.monotonic())
        self._logger = logger

    def look(self, whom: str, where: str) -> None:
        """If a warning is due, log one that names what the loop waits for (`whom`) and where to look."""
        now = time.monotonic()
        if self._wait.is_due(now):
            self._logger.warning("%s", self._wait.warning(now, whom, where))

    def __enter__(self) -> LoopWait:
        return self

    def __exit__(self, *_: object) -> None:
        if self._wait.is_told:
            self._logger.warning("%s", self._wait.ending(time.monotonic()))
