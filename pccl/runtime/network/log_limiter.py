"""Bounds log lines about unauthenticated connections, so that clients of a port cannot fill a disk."""

from __future__ import annotations

import logging
from collections.abc import Callable

LINES_MAX = 100
WINDOW_S = 60.0


class LogLimiter:
    """Passes LINES_MAX lines in WINDOW_S seconds and counts the rest, which the next window logs."""

    def __init__(
        self, logger: logging.Logger | logging.LoggerAdapter[logging.Logger], now: Callable[[], float]
    ) -> None:
        self._logger = logger
        self._now = now
        self._window_began = float("-inf")
        self._lines = 0

    def log(self, level: int, text: str) -> None:
        if not self._logger.isEnabledFor(level):
            return
        now = self._now()
        if now >= self._window_began + WINDOW_S:
            if self._lines > LINES_MAX:
                self._logger.warning(
                    "%d more lines about unauthenticated connections were left out", self._lines - LINES_MAX
                )
            self._window_began = now
            self._lines = 0
        self._lines += 1
        if self._lines <= LINES_MAX:
            self._logger.log(level, "%s", text)
        elif self._lines == LINES_MAX + 1:
            self._logger.warning("too many unauthenticated connections: they are not logged for up to %g s", WINDOW_S)
