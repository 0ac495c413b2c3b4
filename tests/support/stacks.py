"""The stacks of this process's threads."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from pathlib import Path
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


def report() -> str:
    """Return the stack of each thread, with its state and processor time (in ticks) where Linux lists them."""
    found = []
    names = {each.ident: (each.name, each.native_id) for each in threading.enumerate()}
    for ident, frame in frames().items():
        name, native = names.get(ident, ("a thread that Python did not start", None))
        stat = Path(f"/proc/self/task/{native}/stat")
        fields = stat.read_text().rpartition(")")[2].split() if stat.exists() else []
        state = f", {fields[0]}, {fields[11]} + {fields[12]} ticks" if fields else ""
        found.append(f"{name}{state}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(found)
