"""What subcommands share that run processes of their own, show them, and judge at the end whether all went well."""

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
    @property
    def passed(self) -> bool:
        """The verdict."""


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        nargs="?",
        const=STANDARD_OUTPUT,
        metavar="FILE",
        help="write the facts as JSON; without FILE to standard output, and the display to standard error",
    )


def console_beside(json: str | None) -> Console:
    """Where the display goes, for what was given as `--json`."""
    from rich.console import Console

    return Console(stderr=json == STANDARD_OUTPUT)


def write_json(facts: str, json: str | None) -> None:
    """Where `--json` says, if it was given. OSError."""
    if json == STANDARD_OUTPUT:
        print(facts)
    elif json is not None:
        Path(json).write_text(facts + "\n", encoding="utf-8")


def exit_code(
    command: str, run: Callable[[], Report], *, wrong_plan: type[Exception], failures: tuple[type[Exception], ...] = ()
) -> int:
    """Of `run`: 0 if its report has passed and 1 if not; 2 where it raised `wrong_plan`, 1 for `failures` and OSError,
    130 after Ctrl-C."""
    expected: tuple[type[Exception], ...] = (wrong_plan, OSError, *failures)
    try:
        return 0 if run().passed else 1
    except expected as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, wrong_plan) else 1
    except KeyboardInterrupt:
        print(f"{command}: interrupted; all its processes have ended", file=sys.stderr)
        return 130
