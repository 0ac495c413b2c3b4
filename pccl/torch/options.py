"""What callers of collectives give beside tensors: timeouts, and whether they wait."""

from __future__ import annotations

from datetime import timedelta
from typing import Any


def seconds(timeout: Any, default_s: float) -> float:
    """Return a timeout in seconds: `default_s` if none is given, which c10d expresses by None, 0 or less."""
    if timeout is None:
        return default_s
    found = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return found if found > 0 else default_s


def is_async(options: Any) -> bool:
    """Return whether the caller of a collective goes on without waiting for it.

    torch says so from 2.8 on; an earlier one waits for the work at once if it has to.
    """
    return bool(getattr(options, "asyncOp", True))
