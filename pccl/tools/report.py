"""Console, JSON, plots and exit codes for the commands that run processes and judge the results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from rich.console import Console

STANDARD_OUTPUT = "-"


class ToolError(Exception):
    """A tool cannot run. Exit code 1."""


class PlanError(ValueError):
    """Invalid options, named as on the command line. Exit code 2."""


def add_output_options(parser: argparse.ArgumentParser, *, plots: str = "") -> None:
    """Add `--json`, and `--plot` for a tool that draws `plots`."""
    if plots:
        parser.add_argument("--plot", metavar="FILE", help=f"draw {plots} to a file (PNG, SVG, PDF); needs matplotlib")
    help_text = "write the results as JSON; without FILE to standard output, and the display to standard error"
    parser.add_argument("--json", nargs="?", const=STANDARD_OUTPUT, metavar="FILE", help=help_text)


def console_for(json: str | None) -> Console:
    """Return the console for the display, which is standard error if `--json` uses standard output."""
    from rich.console import Console

    return Console(stderr=json == STANDARD_OUTPUT)


def write_json(report: msgspec.Struct, json: str | None) -> None:
    """Write a report to where `--json` points, if it was given."""
    facts = msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
    if json == STANDARD_OUTPUT:
        print(facts)
    elif json is not None:
        Path(json).write_text(facts + "\n", encoding="utf-8")


def check_outputs(json: str | None, plot: str | None = None) -> None:
    """Raise ToolError before the run if an output file cannot be written."""
    if plot is not None:
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
        except ImportError:
            raise ToolError("--plot needs matplotlib: pip install '.[plot]' in a clone of pccl") from None
        if Path(plot).suffix.lstrip(".").lower() not in FigureCanvasAgg.get_supported_filetypes():
            raise ToolError(f"--plot {plot}: not a known kind of image; use a name such as curve.png or curve.svg")
    for option, path in (("--json", json), ("--plot", plot)):
        if path not in (None, STANDARD_OUTPUT) and not (folder := Path(path).absolute().parent).is_dir():
            raise ToolError(f"{option} {path}: folder {folder} does not exist")


def exit_code(command: str, run: Callable[[], bool]) -> int:
    """Run a command and return its exit code: 0 for passed, 1 for failed, 2 for invalid options, 130 after Ctrl-C."""
    try:
        return 0 if run() else 1
    except (PlanError, ToolError, OSError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, PlanError) else 1
    except KeyboardInterrupt:
        print(f"{command}: interrupted; all its processes have ended", file=sys.stderr)
        return 130
