"""Errors by which a peer of a stress run ends a step early, beside those of the library."""

from __future__ import annotations

from pccl import PCCLError


class BrokenPromiseError(Exception):
    """The library did what it must not do."""


class LeftSessionError(Exception):
    """This peer cannot know how a call of its own has ended, and has closed its communicator."""

    def __init__(self, why: str, is_state_spoiled: bool = False) -> None:
        super().__init__(why)
        self.is_state_spoiled = is_state_spoiled


def worst(errors: list[Exception]) -> Exception:
    """A broken promise before an error that is one's own choice before one of the library's."""
    kinds = (LeftSessionError, PCCLError)
    return min(errors, key=lambda error: sum(isinstance(error, kind) * (at + 1) for at, kind in enumerate(kinds)))
