"""Keeps works alive while C++ code of torch may ask them something: older releases of torch do not.

The methods of a work are written in Python, and C++ code that makes a call of a process group, such as DDP's reducer,
gets the C++ part of the work. Where torch holds no reference to the Python part, that is destroyed once pccl is through
with the call, and with it all methods: who asks the work then gets "Work::getFuture not implemented" or waits for ever.
Whether somebody outside holds a work cannot be seen, so each is held until it has been asked for what C++ code asks for
once: `wait` or `get_future`. Works that nobody asks are held until LIMIT others are. Works in c10d's registry are held
likewise, in all releases: it has their C++ part alone.
"""

from __future__ import annotations

import re
import threading

import torch

LIMIT = 4096
FIXED_IN = (2, 7)


def release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version of torch."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else FIXED_IN


IS_NEEDED = release(torch.__version__) < FIXED_IN
"""Whether this torch holds no reference to the works that its C++ code gets."""


class HeldWorks:
    """Works that nobody has waited for yet. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: dict[int, object] = {}

    def __len__(self) -> int:
        return len(self._works)

    def hold(self, work: object) -> None:
        """Keep a work alive until `let_go`."""
        with self._lock:
            if len(self._works) >= LIMIT:
                del self._works[next(iter(self._works))]
            self._works[id(work)] = work

    def let_go(self, work: object) -> None:
        """Keep it no longer."""
        with self._lock:
            self._works.pop(id(work), None)


HELD = HeldWorks()
