"""Standard output of commands that answer and end: what cannot be written there is an error with a text of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class UnwrittenError(Exception):
    """What was printed cannot be written. The text says why."""


@contextmanager
def writing() -> Iterator[None]:
    """A context in which nothing but standard output is written. BrokenPipeError if whoever read has enough, else
    UnwrittenError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UnwrittenError(error.strerror or str(error)) from None


def say(text: str, end: str = "\n") -> None:
    """Print a text at once. Errors as those of `writing`."""
    if sys.stdout is None:
        raise UnwrittenError("it is closed")
    with writing():
        print(text, end=end, flush=True)
