"""The one exception of the public API, and what raises it wherever an argument is to be an integer."""

from __future__ import annotations

from typing import Any

from pccl._integers import as_int
from pccl.types import Result


class PCCLError(Exception):
    """A call that did not succeed.

    `result` says what kind of failure it was, `func_name` which call; the text names what was wrong, with whom, and
    what to do.
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
    """As `as_int`, but for PCCLError INVALID_ARGUMENT."""
    try:
        return as_int(name, given, least, most)
    except ValueError as error:
        raise PCCLError(Result.INVALID_ARGUMENT, func_name, str(error)) from None
