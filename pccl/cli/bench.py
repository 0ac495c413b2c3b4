"""`pccl bench`: measures all-reduces between local processes beside a raw ring, or between hosts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pccl.bench.messages import DTYPES, QUANTIZATIONS
from pccl.bench.sizes import parse_bytes
from pccl.cli.arguments import natural, positive

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Reduces tensors between processes of this machine and compares with a raw ring, which moves the same bytes with
nothing but sends, receives and NumPy adds. An iteration's time is that of its slowest rank. Algorithm bandwidth
is bytes / time, bus bandwidth that times 2(W-1)/W, as in nccl-tests. With --master the peers are this host and others:
start `pccl master` on one of them and the same `pccl bench --master HOST:PORT --peers N ...` on all N.
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("bench", help="measure this machine", description=DESCRIPTION)
    parser.add_argument(
        "--master",
        metavar="HOST:PORT",
        help="be one peer of the run whose master is there; --peers is how many there will be in all",
    )
    parser.add_argument("--peers", type=_world_sizes, default=[2, 4], metavar="LIST", help="world sizes (default: 2,4)")
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=_sizes("4KiB,1MiB,64MiB"),
        metavar="LIST",
        help="bytes per rank (default: 4KiB,1MiB,64MiB)",
    )
    parser.add_argument(
        "--tensors",
        type=_positives,
        default=[1],
        metavar="LIST",
        help="into how many concurrent tensors a size is cut (default: 1)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(default: %(default)s)")
    parser.add_argument(
        "--connections", type=natural, default=0, metavar="N", help="per link; 0 is the library's choice (default: 0)"
    )
    parser.add_argument(
        "--quantize",
        choices=QUANTIZATIONS,
        default="none",
        help="8-bit quantization; the raw ring stays unquantized (default: none)",
    )
    parser.add_argument("--iterations", type=positive, default=20, metavar="N", help="timed ones (default: 20)")
    parser.add_argument("--warmup", type=natural, default=3, metavar="N", help="untimed ones (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    parser.add_argument(
        "--kill",
        action="store_true",
        help="instead: 3 peers reduce 16 MiB in a loop, one is killed; print what it cost the others",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from pccl.bench.peers import BenchError

    try:
        if arguments.master is not None and (arguments.kill or len(arguments.peers) > 1):
            raise BenchError("with --master give one number of --peers, and not --kill")
        if arguments.kill:
            _run_kill(arguments)
        else:
            _run_cases(arguments)
    except BenchError as error:
        print(f"pccl bench: {error}", file=sys.stderr)
        return 1
    return 0


def _run_cases(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from pccl.bench.hosts import measure_as_one_peer
    from pccl.bench.measure import Plan, measure
    from pccl.bench.report import BenchReport, rows_table, this_machine, write_json

    plan = Plan(
        peers=arguments.peers,
        sizes_bytes=arguments.sizes,
        tensors=arguments.tensors,
        dtype=arguments.dtype,
        connections=arguments.connections,
        quantization=arguments.quantize,
        iterations=arguments.iterations,
        warmup=arguments.warmup,
    )
    console = Console()
    rows = []
    cases = len(plan.peers) * len(plan.sizes_bytes) * len(plan.tensors)
    measured = measure(plan) if arguments.master is None else measure_as_one_peer(plan, arguments.master)
    with console.status("measuring") as status:
        for row in measured:
            rows.append(row)
            status.update(f"measuring: {len(rows)} of {cases} cases")
    console.print(rows_table(plan, rows))
    if arguments.json is not None:
        write_json(arguments.json, BenchReport(this_machine(), plan, rows))


def _run_kill(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from pccl.bench.kill import KillPlan, measure_kill
    from pccl.bench.report import kill_table, write_json

    plan = KillPlan(
        steps_before=arguments.iterations, steps_after=arguments.iterations, connections=arguments.connections
    )
    report = measure_kill(plan)
    Console().print(kill_table(report))
    if arguments.json is not None:
        write_json(arguments.json, report)


def _positives(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def _world_sizes(text: str) -> list[int]:
    values = _positives(text)
    if 1 in values:
        raise argparse.ArgumentTypeError("a peer alone has nobody to reduce with")
    return values


def _sizes(text: str) -> list[int]:
    try:
        return [parse_bytes(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
