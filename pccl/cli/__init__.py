"""The `pccl` command. One module per subcommand; each imports what it needs when it runs, so that help comes at once.

A subcommand's module has `add_parser(subparsers)`, which ends in `set_defaults(run=run)`, and `run(arguments) -> int`,
whose result is the exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pccl import __version__
from pccl.cli import bench, demo, doctor, launch, master, status, stress, trace
from pccl.cli.output import OutputError, show

COMPLETION = """\
Prints a script that makes a shell complete pccl's commands, options and their values.

  bash   pccl completion bash > ~/.local/share/bash-completion/completions/pccl
  zsh    pccl completion zsh > "${fpath[1]}/_pccl"
  fish   pccl completion fish > ~/.config/fish/completions/pccl.fish

A new shell uses it. Run it again when pccl is updated.
"""


class _Subparser(argparse.ArgumentParser):
    """Rejects unknown arguments itself, so that the usage in the error is that of the subcommand."""

    def parse_known_args(self, *arguments: Any, **more: Any) -> Any:
        namespace, unknown = super().parse_known_args(*arguments, **more)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="pccl",
        description="Fault-tolerant peer-to-peer collective communication: tools for the command line.",
        allow_abbrev=False,  # what a launched script is given passes through this parser, too
    )
    result.add_argument("--version", action="version", version=f"pccl {__version__}")
    subparsers = result.add_subparsers(metavar="COMMAND", required=True, parser_class=_Subparser)
    for module in (master, status, doctor, trace, launch, demo, bench, stress):
        module.add_parser(subparsers)
    completion = subparsers.add_parser(
        "completion",
        help="print completions for a shell",
        description=COMPLETION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that is to complete")
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
    except OutputError as error:
        _drop_output()
        print(f"pccl: standard output cannot be written: {error}", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """Drop the content of the buffer, which the interpreter would write again at its end."""
    if sys.stdout is not None:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
