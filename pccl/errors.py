"""The one exception of the public API."""

from __future__ import annotations

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
