"""What callers may give as `timeout=`."""

from __future__ import annotations

from numbers import Real
from typing import Any

from pccl.errors import PCCLError
from pccl.types import Result

TIMEOUT_S_MAX = 1e9
"""About thirty years; more is cut to it, so that no clock overflows."""


def checked_s(timeout: Any, func_name: str) -> float | None:
    """Seconds; None: as long as it takes. A negative time has passed already. PCCLError INVALID_ARGUMENT."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or timeout != timeout:
        what = f"timeout {timeout!r} is no number of seconds; None waits as long as it takes"
        raise PCCLError(Result.INVALID_ARGUMENT, func_name, what)
    seconds: Any = min(max(timeout, 0), TIMEOUT_S_MAX)
    return float(seconds)


class Default:
    """Type of DEFAULT: the communicator's own timeout."""


DEFAULT = Default()
Timeout = float | None | Default
