"""Output of the commands that run processes and judge the result: console, JSON, plots, exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console

STANDARD_OUTPUT = "-"


class ToolError(Exception):
    """A tool cannot do its work. Exit code 1."""


class PlanError(ValueError):
    """Invalid options, named as on the command line. Exit code 2."""


class Judged(Protocol):
    """A report with a verdict."""

    @property
    def passed(self) -> bool: ...


def add_json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        nargs="?",
        const=STANDARD_OUTPUT,
        metavar="FILE",
        help="write the facts as JSON; without FILE to standard output, and the display to standard error",
    )


def console_for(json: str | None) -> Console:
    """Return the console of the display: standard error if `--json` takes standard output."""
    from rich.console import Console

    return Console(stderr=json == STANDARD_OUTPUT)


def write_json(facts: str, json: str | None) -> None:
    """Write the facts to the place that `--json` names, if it was given."""
    if json == STANDARD_OUTPUT:
        print(facts)
    elif json is not None:
        Path(json).write_text(facts + "\n", encoding="utf-8")


def check_folder(option: str, path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise ToolError(f"{option} {path}: folder {path.absolute().parent} does not exist")


def check_plot(path: Path) -> None:
    """Raise ToolError if a plot cannot be written to `path`, before the run that it is to show."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise ToolError("--plot needs matplotlib: pip install 'pccl-collectives[plot]'") from None
    if path.suffix.lstrip(".").lower() not in FigureCanvasAgg.get_supported_filetypes():
        raise ToolError(f"--plot {path}: not a known kind of image; use a name such as curve.png or curve.svg")
    check_folder("--plot", path)


def exit_code(command: str, run: Callable[[], Judged]) -> int:
    """Run a command and return its exit code: 0 passed, 1 failed, 2 invalid options, 130 after Ctrl-C."""
    try:
        return 0 if run().passed else 1
    except (PlanError, ToolError, OSError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, PlanError) else 1
    except KeyboardInterrupt:
        print(f"{command}: interrupted; all its processes have ended", file=sys.stderr)
        return 130
