"""`pccl status`: shows the state of a run as seen by its master."""

from __future__ import annotations

import argparse
import io
import sys
import time
from typing import TYPE_CHECKING

from pccl.cli.arguments import add_master, add_timeout, add_token_file, interval, natural, token_of
from pccl.cli.output import OutputError, failed, show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import RenderableType

    from pccl.status import RunStatus

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "status",
        help="show the state of a run",
        description="Asks a master for the state of its run: peers, stragglers, waits, links and losses. It does not "
        "join the run. If the run uses a token or TLS, it needs a peer's settings (PCCL_TOKEN, PCCL_TLS_CA, "
        "PCCL_TLS_CERT).",
    )
    add_master(parser)
    option = parser.add_argument
    help_text = "refresh the state at this interval until Ctrl-C (default: %(const)g); in a pipe, print it repeatedly"
    option("--watch", metavar="SECONDS", type=interval, nargs="?", const=1.0, help=help_text)
    option("--json", action="store_true", help="print the state as one line of JSON")
    help_text = "for probes: exit silently with 0 if the master answers and --peers and --peer hold, else with 1"
    option("--check", action="store_true", help=help_text)
    help_text = "with --check: at least N peers are in the run"
    option("--peers", metavar="N", type=natural, default=0, help=help_text)
    help_text = (
        "with --check: a peer with this name is in the run. Peers are named HOST:PID by default; HOST is enough here"
    )
    option("--peer", metavar="NAME", help=help_text)
    help_text = "remove this peer from the run, by its number or name; it does not come back by itself"
    option("--kick", metavar="PEER", help=help_text)
    add_token_file(parser)
    add_timeout(parser, 10.0, "time to wait for an answer")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from pccl import PCCLError
    from pccl.status import kick, run_status

    if arguments.kick is not None and (arguments.check or arguments.json or arguments.watch is not None):
        return failed("pccl status", "--kick cannot be used with --check, --json and --watch")
    if (arguments.peers or arguments.peer) and not arguments.check:
        return failed("pccl status", "--peers and --peer need --check")
    if arguments.check and arguments.watch is not None:
        return failed("pccl status", "--check cannot be used with --watch")
    if sys.stdout is None and not arguments.check:
        raise OutputError("it is closed")
    try:
        token = token_of(arguments)
    except (ValueError, OSError) as error:
        return failed("pccl status", error)

    def ask() -> RunStatus:
        return run_status(arguments.address, token=token, timeout=arguments.timeout)

    try:
        if arguments.watch is not None:
            _watch(ask, arguments.watch, arguments.json)
        status = ask()
        if arguments.kick is not None:
            peer, named = _one_named(status, arguments.kick)
            kick(arguments.address, peer, token=token, timeout=arguments.timeout)
            show(f"{named} has been removed from the run")
            return 0
    except ValueError as error:
        return failed("pccl status", error)
    except PCCLError as error:
        return failed("pccl status", error.message)
    if arguments.check:
        lack = _lack(status, arguments.peers, arguments.peer)
        return 0 if lack is None else failed("pccl status", lack)
    if arguments.json:
        _print_json(status)
    else:
        from pccl.cli.status_table import render

        _print(render(status))
    return 0


def _lack(status: RunStatus, peers: int, peer: str | None) -> str | None:
    """Return the condition of `--check` that fails, or None if all hold. The answer may come from a standby."""
    names = [member.name for member in status.members if member.state == "accepted"]
    if len(names) < peers:
        return f"{len(names)} peers are in the run, not {peers}"
    if peer is not None and not any(name == peer or name.rpartition(":")[0] == peer for name in names):
        return f"no peer {peer} is in the run"
    return None


def _one_named(status: RunStatus, name: str) -> tuple[int, str]:
    """Return the number and the full name of a peer. Raises ValueError unless there is exactly one."""
    from pccl.status import label

    if not name:
        raise ValueError("--kick needs the number or the name of a peer")
    found = [each for each in status.members if name in (str(each.peer), each.name)]
    if len(found) != 1:
        many = f"{len(found)} peers are named {name}: give a number"
        raise ValueError(many if found else f"no peer {name} is in the run")
    return found[0].peer, f"peer {label(found[0].peer, found[0].name)}"


def _print_json(status: RunStatus) -> None:
    import msgspec

    show(msgspec.json.encode(status).decode())


def _print(shown: RenderableType) -> None:
    from rich.console import Console

    # Render to memory, because rich itself would end the process on a broken pipe.
    memory = io.TextIOWrapper(io.BytesIO(), sys.stdout.encoding, sys.stdout.errors)
    Console(file=memory, force_terminal=sys.stdout.isatty()).print(shown)
    memory.seek(0)
    show(memory.read(), end="")


def _watch(ask: Callable[[], RunStatus], every_s: float, as_json: bool) -> None:
    """Show the state until Ctrl-C. The first request must succeed."""
    if as_json:
        while True:
            _print_json(ask())
            time.sleep(every_s)
    from rich.console import Console
    from rich.live import Live

    states = _states(ask)
    if not sys.stdout.isatty():
        for shown in states:
            _print(shown)
            time.sleep(every_s)
    with Live(next(states), console=Console(), screen=True, auto_refresh=False) as live:
        while True:
            live.refresh()
            time.sleep(every_s)
            live.update(next(states))


def _states(ask: Callable[[], RunStatus]) -> Iterator[RenderableType]:
    """Yield the state at each request or, except for the first request, its error. On a terminal, the error is shown
    above the last state."""
    from rich.console import Group
    from rich.text import Text

    from pccl import PCCLError
    from pccl.cli.status_table import render

    shown = render(ask())
    yield shown
    while True:
        try:
            shown = render(ask())
        except PCCLError as error:
            why = Text(error.message, style="bold red")
            yield Group(why, shown) if sys.stdout.isatty() else why
        else:
            yield shown
