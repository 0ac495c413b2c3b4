"""`pccl doctor`: finds problems that keep this host from joining a run."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from pccl.cli.arguments import add_master, add_token_file, token_of
from pccl.cli.output import failed, show

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

MARKS = {"ok": "ok", "warning": "!!", "failed": "FAILED"}


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="find out why a host cannot join a run",
        description="Checks the path to a master (answer, versions, clocks, full-size packets, round trip, bandwidth), "
        "whether the master's host can reach a peer on this host, whether this host can reach the run's peers, and "
        "this host's limits. Prints a remedy for each problem. Run it on the host of a future peer, with that peer's "
        "environment. It does not interrupt the run. The exit code is 1 if a check has failed, else 0.",
    )
    add_master(parser)
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    help_text = "a peer's address on this host, which the master's host dials (default: PCCL_LISTEN, else any port)"
    parser.add_argument("--listen", metavar="HOST:PORT", help=help_text)
    help_text = "the address that other peers would dial (default: PCCL_ADVERTISE, else the one that the master sees)"
    parser.add_argument("--advertise", metavar="HOST[:PORT]", help=help_text)
    add_token_file(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from pccl import PCCLError
    from pccl.doctor import examine

    try:
        token = token_of(arguments)
        found = examine(arguments.address, token=token, listen=arguments.listen, advertise=arguments.advertise)
    except (PCCLError, ValueError, OSError) as error:
        return failed("pccl doctor", getattr(error, "message", error))
    has_failed = any(check.verdict == "failed" for check in found)
    if arguments.json:
        show(json.dumps({"healthy": not has_failed, "checks": [dataclasses.asdict(check) for check in found]}))
    else:
        for check in found:
            show(f"{MARKS[check.verdict]:7}{check.name:14}{check.text}")
            if check.advice:
                show(f"{'':21}-> {check.advice}")
    return 1 if has_failed else 0
