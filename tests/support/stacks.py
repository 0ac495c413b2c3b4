"""The stacks of this process's threads."""

from __future__ import annotations

import gc
import sys
from types import FrameType


def frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by the thread's identity.

    Garbage collection is off during the call: Python 3.11.7 holds the lock of its thread list, and the destruction of a
    `threading.local` would wait for it forever (python/cpython, issue 106883)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()
