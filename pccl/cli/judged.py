"""Parts of the subcommands that run processes, show them, and judge at the end whether all went well."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

STANDARD_OUTPUT = "-"


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
