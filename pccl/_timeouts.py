"""Checks of the arguments `timeout` and `master_timeout`."""

from __future__ import annotations

import os
from numbers import Real
from typing import Any

from pccl.errors import invalid
from pccl.protocol.messages import MASTER_TIMEOUT_S

TIMEOUT_S_MAX = 1e9
"""About thirty years. Longer timeouts are reduced to this so that no clock overflows."""


def checked_s(timeout: Any, func_name: str) -> float | None:
    """Return a timeout in seconds; negative ones become 0. Raise INVALID_ARGUMENT unless it is a number or None."""
    if timeout is None:
        return None
    if type(timeout) is float and 0 <= timeout <= TIMEOUT_S_MAX:
        return timeout
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or timeout != timeout:
        raise invalid(func_name, f"timeout {timeout!r} is not a number of seconds; None waits indefinitely")
    seconds: Any = min(max(timeout, 0), TIMEOUT_S_MAX)
    return float(seconds)


def master_timeout_s(given: Any, func_name: str) -> float:
    """Return how long a peer searches for a master: `given`, else PCCL_MASTER_TIMEOUT, else MASTER_TIMEOUT_S."""
    if given is None:
        text = os.environ.get("PCCL_MASTER_TIMEOUT", "")
        try:
            given = float(text) if text else MASTER_TIMEOUT_S
            if given != given:
                raise ValueError
        except ValueError:
            raise invalid(func_name, f"PCCL_MASTER_TIMEOUT {text!r} is not a number of seconds") from None
    seconds = checked_s(given, func_name)
    assert seconds is not None
    return seconds


class Default:
    """The type of DEFAULT, which stands for the communicator's own timeout."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT = Default()
Timeout = float | None | Default
