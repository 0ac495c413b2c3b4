"""Commands of the supervisor to this process, read from its standard input."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pccl.stress.messages import Command


def commands() -> Iterator[Command]:
    """Yield commands until the end of the input. For a thread that nobody waits for: unbuffered, because a buffer's
    lock that is held when the interpreter ends would abort it."""
    with open(0, "rb", buffering=0, closefd=False) as lines:
        for line in lines:
            yield msgspec.json.decode(line, type=Command)
