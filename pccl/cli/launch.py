"""`pccl launch`: starts a master and N local copies of a script."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from pccl.cli.arguments import positive, seconds

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Starts a master and N copies of a Python script on this machine and waits for all of them. Each copy finds
  PCCL_MASTER        the master's HOST:PORT
  PCCL_LAUNCH_INDEX  its own number, 0 ... N-1
  PCCL_LAUNCH_COUNT  N
in its environment. A copy that dies does not end the others unless --fail-fast is given.

SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on to the copies; a second Ctrl-C kills them. The exit code is
that of the first copy that failed, or 128 plus the signal's number if a signal ended it.

The started master asks for the token in PCCL_TOKEN, if the environment has it, and the copies know it from there.
PCCL_ENCRYPT=1 makes the copies encrypt what they send to each other.
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "launch",
        help="run N copies of a script with a master",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] [-m] script ...",
    )
    parser.add_argument(
        "-n", "--count", type=positive, default=2, metavar="N", help="number of copies (default: %(default)s)"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--master", metavar="HOST:PORT", help="use this master instead of starting one")
    where.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default="127.0.0.1:0",
        help="address of the master that is started; 0.0.0.0:48148 lets other machines join (default: %(default)s)",
    )
    parser.add_argument("--fail-fast", action="store_true", help="end all copies when one fails")
    parser.add_argument(
        "--grace",
        type=seconds,
        default=10.0,
        metavar="SECONDS",
        help="time that processes have to end before they are killed (default: %(default)g)",
    )
    parser.add_argument("-m", dest="as_module", action="store_true", help="`script` is the name of a module")
    parser.add_argument("script", help="a Python file, or a module's name after -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="passed to the script")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from pccl.launcher import LaunchOptions, launch

    script = ("-m", arguments.script) if arguments.as_module else (arguments.script,)
    options = LaunchOptions(
        command=(sys.executable, *script, *arguments.arguments),
        count=arguments.count,
        master=arguments.master,
        listen=arguments.listen,
        fail_fast=arguments.fail_fast,
        grace_s=arguments.grace,
    )
    return launch(options)
