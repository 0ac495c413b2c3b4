"""The `pccl` command. One module per subcommand; each imports what it needs when it runs, so that help comes at once.

A subcommand's module has `add_parser(subparsers)`, which ends in `set_defaults(run=run)`, and `run(arguments) -> int`,
whose result is the exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from pccl.cli import bench, demo, doctor, launch, master, status, stress, trace
from pccl.cli.output import UnwrittenError, say, writing

COMPLETION = """\
Prints a script that makes a shell complete pccl's commands, options and their values.

  bash   pccl completion bash > ~/.local/share/bash-completion/completions/pccl
  zsh    pccl completion zsh > "${fpath[1]}/_pccl"
  fish   pccl completion fish > ~/.config/fish/completions/pccl.fish

A new shell uses it. Run it again when pccl is updated.
"""


class _Version(argparse.Action):
    """The action of `--version`, which looks the version up only when it is asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: object) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from pccl import __version__

        say(f"pccl {__version__}")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="pccl",
        description="Fault-tolerant peer-to-peer collective communication: tools for the command line.",
        allow_abbrev=False,  # what a launched script is given passes through this parser, too
    )
    result.add_argument("--version", action=_Version)
    subparsers = result.add_subparsers(metavar="COMMAND", required=True)
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

    say(shtab.complete(parser(), arguments.shell))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return _call(argv)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _drop_output()
        return 141
    except UnwrittenError as error:
        _drop_output()
        print(f"pccl: standard output cannot be written: {error}", file=sys.stderr)
        return 1


def _call(argv: Sequence[str] | None) -> int:
    """Run the command until what it has printed is written, which may be all at its end."""
    try:
        arguments = parser().parse_args(argv)
        run: Callable[[argparse.Namespace], int] = arguments.run
        code = run(arguments)
    except SystemExit:  # after --help or --version
        _write_out()
        raise
    _write_out()
    return code


def _write_out() -> None:
    """Write what is in the buffer. BrokenPipeError, UnwrittenError."""
    if sys.stdout is not None:
        with writing():
            sys.stdout.flush()


def _drop_output() -> None:
    """Drop what is in the buffer, which the interpreter would write again at its end."""
    if sys.stdout is not None:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
