"""Output of the commands: standard output that may fail, lines that may find no reader, and reports as JSON."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console

STANDARD_OUTPUT = "-"
TELL_S = 1.0


class UnwrittenError(Exception):
    """Standard output cannot be written. The text says why."""


@contextmanager
def writing() -> Iterator[None]:
    """A context for writes to standard output. BrokenPipeError if its reader is gone, else UnwrittenError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UnwrittenError(error.strerror or str(error)) from None


def say(text: str, end: str = "\n") -> None:
    """Print a text at once. Raises as `writing` does."""
    if sys.stdout is None:
        raise UnwrittenError("it is closed")
    with writing():
        print(text, end=end, flush=True)


def tell(line: str, stream: TextIO | None = None) -> None:
    """Print a line, to standard output by default, and go on after TELL_S if the pipe is full."""
    out: TextIO | None = sys.stdout if stream is None else stream
    if out is None:
        return  # the process was started with it closed
    try:
        fd = out.fileno()
    except OSError:
        print(line, file=out)  # in memory
        return

    def write() -> None:
        with suppress(OSError):
            os.write(fd, f"{line}\n".encode(errors="backslashreplace"))

    # Past the stream's buffer: a thread that waited with its lock would abort the interpreter when it ends.
    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(TELL_S)


class Report(Protocol):
    """The facts of a run of processes."""

    @property
    def passed(self) -> bool:
        """Whether all went well."""


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--json` to a subcommand."""
    parser.add_argument(
        "--json",
        nargs="?",
        const=STANDARD_OUTPUT,
        metavar="FILE",
        help="write the facts as JSON; without FILE to standard output, and the display to standard error",
    )


def console_beside(json: str | None) -> Console:
    """Return the console for the display: on standard error if `--json` has standard output."""
    from rich.console import Console

    return Console(stderr=json == STANDARD_OUTPUT)


def write_json(facts: str, json: str | None) -> None:
    """Write the facts to where `--json` says, if it was given. OSError."""
    if json == STANDARD_OUTPUT:
        print(facts)
    elif json is not None:
        Path(json).write_text(facts + "\n", encoding="utf-8")


def exit_code(
    command: str, run: Callable[[], Report], *, wrong_plan: type[Exception], failures: tuple[type[Exception], ...] = ()
) -> int:
    """Call `run`, print the error if it raises one, and return the exit code of the subcommand.

    It is 0 if the report has passed and 1 if not; 2 if `run` raised `wrong_plan`, 1 for `failures` and OSError, and 130
    after Ctrl-C.
    """
    expected: tuple[type[Exception], ...] = (wrong_plan, OSError, *failures)
    try:
        return 0 if run().passed else 1
    except expected as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, wrong_plan) else 1
    except KeyboardInterrupt:
        print(f"{command}: interrupted; all its processes have ended", file=sys.stderr)
        return 130
