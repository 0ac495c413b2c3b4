"""The log of what was done to a run and seen in it, beside the logs of its processes."""

from __future__ import annotations

import time
from collections import deque
from datetime import datetime
from pathlib import Path

LONG_STEP_S = 1.0
"""Steps that last longer are noted."""
BEFORE_STEP_S = 2.0
"""The time before a long step of which the events are told with it."""
EVENTS_KEPT = 500


class EventLog:
    """A file for whoever looks into a failure; its clock is that of the processes' logs."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)
        self._noted: deque[tuple[float, str]] = deque(maxlen=EVENTS_KEPT)
        self._longest_s = LONG_STEP_S
        self.longest_step: list[str] = []
        """The lines of the longest step and the moments before it, if it was long."""

    def note(self, what: str) -> None:
        line = f"{datetime.now().isoformat(' ', 'milliseconds')} {what}"
        self._file.write(line + "\n")
        self._noted.append((time.monotonic(), line))

    def step_ended(self, who: str, revision: int, seconds: float) -> None:
        """Note a long step, and keep what led to it if it is the longest so far."""
        if seconds > LONG_STEP_S:
            self.note(f"{who} needed {seconds:.2f} s for revision {revision}")
        if seconds > self._longest_s:
            self._longest_s = seconds
            since_s = time.monotonic() - seconds - BEFORE_STEP_S
            self.longest_step = [line for at_s, line in self._noted if at_s >= since_s]

    def close(self) -> None:
        self._file.close()
