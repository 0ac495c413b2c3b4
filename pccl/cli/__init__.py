"""The `pccl` command. Each subcommand has a module, which imports its dependencies only when it runs.

A module defines `add_parser(subparsers)`, which ends with `set_defaults(run=run)`, and `run(arguments) -> int`, which
returns the exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pccl import __version__
from pccl.cli import bench, demo, doctor, launch, master, plan, status, stress, trace
from pccl.cli.output import OutputError, show

COMPLETION = """\
Prints a script that lets a shell complete pccl's commands, options and option values.

  bash   pccl completion bash > ~/.local/share/bash-completion/completions/pccl
  zsh    pccl completion zsh > "${fpath[1]}/_pccl"
  fish   pccl completion fish > ~/.config/fish/completions/pccl.fish

Shells started later use the script. Run the command again after updating pccl.
"""
NO_THREAD = "can't start new thread"
"""Python's text if the system refuses a thread."""


class _Subparser(argparse.ArgumentParser):
    """Rejects unknown arguments itself, so that the error shows the subcommand's usage."""

    def parse_known_args(self, *arguments: Any, **more: Any) -> Any:
        namespace, unknown = super().parse_known_args(*arguments, **more)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="pccl",
        description="Command-line tools for fault-tolerant peer-to-peer collective communication.",
        allow_abbrev=False,  # a launched script's arguments pass through this parser, too
    )
    result.add_argument("--version", action="version", version=f"pccl {__version__}")
    subparsers = result.add_subparsers(metavar="COMMAND", required=True, parser_class=_Subparser)
    for module in (master, status, doctor, trace, launch, plan, demo, bench, stress):
        module.add_parser(subparsers)
    completion = subparsers.add_parser(
        "completion",
        help="print completions for a shell",
        description=COMPLETION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to print a script for")
    completion.set_defaults(run=_complete)
    return result


def _complete(arguments: argparse.Namespace) -> int:
    import shtab

    show(shtab.complete(parser(), arguments.shell))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    try:
        try:
            arguments = parser().parse_args(argv)
            run: Callable[[argparse.Namespace], int] = arguments.run
            return run(arguments)
        finally:  # also after --help and --version
            if sys.stdout is not None:
                show("", end="")
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except RuntimeError as error:
        if str(error) != NO_THREAD:
            raise
        sys.last_value = error  # a master ends too, as if the error were raised
        print(f"pccl: {error}: raise the limit of memory (ulimit -v) or of processes (ulimit -u)", file=sys.stderr)
        return 1
    except OutputError as error:
        _drop_output()
        print(f"pccl: standard output cannot be written: {error}", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """Drop the buffered output, which the interpreter would otherwise write again at exit."""
    if sys.stdout is not None:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
