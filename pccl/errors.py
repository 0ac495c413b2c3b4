"""PCCLError, the one exception of the public API, and a check that raises it for arguments that are no integers."""

from __future__ import annotations

from typing import Any

from pccl._integers import as_int
from pccl.types import Result


class PCCLError(Exception):
    """A call that did not succeed.

    `result` is the kind of failure, for programs to act on; `func_name` is the call that failed. `message` tells people
    what was wrong, with whom, and what to do.
    """

    def __init__(self, result: Result, func_name: str = "", message: str = "") -> None:
        self.result = result
        self.func_name = func_name
        self.message = message
        super().__init__(result, func_name, message)

    def __str__(self) -> str:
        head = f"{self.func_name}: {self.result.name}" if self.func_name else self.result.name
        return f"{head}: {self.message}" if self.message else head


def integer_argument(name: str, given: Any, func_name: str, least: int | None = None, most: int | None = None) -> int:
    """Return `given` as an int in [least, most]. INVALID_ARGUMENT if it is none."""
    try:
        return as_int(name, given, least, most)
    except ValueError as error:
        raise PCCLError(Result.INVALID_ARGUMENT, func_name, str(error)) from None
