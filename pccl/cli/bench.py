"""`pccl bench`: compares all-reduces between local processes with a raw ring and Gloo, or measures between hosts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pccl.cli.arguments import listed, natural, one_of, plan_of, positive, seconds
from pccl.tools.bench.plan import (
    ALGORITHMS,
    ALL_REDUCE,
    COLLECTIVES,
    DTYPES,
    GLOO,
    RAW_RING,
    Plan,
    parse_bytes,
    parse_quantization,
)
from pccl.tools.report import ToolError, add_output_options, check_outputs, console_for, exit_code, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from pccl.tools.bench.report import Row

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


DESCRIPTION = """\
Reduces tensors between processes on this machine and compares pccl with a raw ring, which moves the same bytes with
plain sends, receives and NumPy adds. An iteration's time is that of its slowest rank. Algorithm bandwidth is bytes /
time; bus bandwidth is algorithm bandwidth times 2(W-1)/W, as in nccl-tests. --collective selects another
collective, whose size is that of the larger array. With --master, the peers are on several hosts: start
`pccl master` on one of them and the same `pccl bench --master HOST:PORT --peers N ...` on all N.

The items of a LIST are separated by commas; all combinations are measured. Options that do not vary are in the title.
"""
EPILOG = """\
quantizations, with --quantize:
  none
  min-max[:TYPE]           blocks of codes between the block's minimum and maximum
  zero-point-scale[:TYPE]  blocks of codes whose range includes 0
                           TYPE: uint8 (default), int8, uint16, int16, uint4, int4
                           also :block=N, the number of elements that share a scale
  cast:bfloat16            16-bit floats; also cast:float16
  lloyd-max, sign          codes of 2 bits and 1 bit; also :block=N
  the first three with     :stochastic rounding, and its :seed=N
  for example              --quantize none,min-max,zero-point-scale:int4:block=128,cast:bfloat16

in the table:
  % of raw   pccl's speed relative to the raw ring's
  Gloo/pccl  Gloo's median divided by pccl's; above 1, pccl is faster
  scratch    the peak memory that one rank's ops use beyond the user's arrays (--memory)
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure this machine",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option(
        "--master", metavar="HOST:PORT", help="join this master's run as one peer; --peers is the total number of peers"
    )
    option("--peers", type=listed(_world_size), default=[2, 4], metavar="LIST", help="numbers of peers (default: 2,4)")
    collectives = listed(one_of({name: name for name in COLLECTIVES}))
    help_text = f"{', '.join(COLLECTIVES)} (default: all_reduce)"
    option("--collective", dest="collectives", type=collectives, default=[ALL_REDUCE], metavar="LIST", help=help_text)
    help_text = "sizes of each rank's arrays (default: 4KiB,1MiB,64MiB)"
    sizes = [4 << 10, 1 << 20, 64 << 20]
    option("--sizes", dest="sizes_bytes", type=listed(parse_bytes), default=sizes, metavar="LIST", help=help_text)
    help_text = "numbers of concurrent tensors to split each array into (default: 1)"
    option("--tensors", type=listed(positive), default=[1], metavar="LIST", help=help_text)
    option("--dtype", choices=DTYPES, default="float32", help="element type (default: %(default)s)")
    help_text = "connections per link; 0 lets the library choose (default: 0)"
    option("--connections", type=listed(natural), default=[0], metavar="LIST", help=help_text)
    help_text = "quantizations, see below; baselines stay unquantized (default: none)"
    option(
        "--quantize", dest="quantizations", type=listed(_quantization), default=["none"], metavar="LIST", help=help_text
    )
    algorithms = listed(one_of({name: name for name in ALGORITHMS}))
    help_text = "auto, ring, direct; auto lets the library choose (default: auto)"
    option("--algorithm", dest="algorithms", type=algorithms, default=["auto"], metavar="LIST", help=help_text)
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--in-place", action="store_true", default=True, help="the result replaces the input (default)")
    help_text = "the result goes to a separate array; baselines still work in place"
    place.add_argument("--out-of-place", action="store_false", dest="in_place", help=help_text)
    against = listed(one_of({"gloo": GLOO, "raw-ring": RAW_RING}))
    help_text = (
        "gloo: also measure torch's Gloo, on the same arrays in the same processes; needs torch. raw-ring: also "
        "measure the raw ring with --master. With --master, each of them opens its own ports"
    )
    option("--against", type=against, default=[], metavar="LIST", help=help_text)
    option("--memory", action="store_true", help="also print the peak memory of a rank's ops beyond the user's arrays")
    option("--encrypt", action="store_true", help="encrypt between peers; with --master, the token is PCCL_TOKEN")
    help_text = "timed iterations per case (default: 20)"
    option("--iterations", type=positive, default=20, metavar="N", help=help_text)
    option("--warmup", type=natural, default=3, metavar="N", help="untimed iterations before those (default: 3)")
    help_text = "untimed pause before each iteration, as between outer steps (default: 0)"
    option("--pause", dest="pause_s", type=seconds, default=0.0, metavar="S", help=help_text)
    add_output_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    return exit_code("pccl bench", lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> bool:
    from pccl.tools.bench.report import BenchReport, print_table, rows_table, this_machine

    if arguments.master is not None and len(arguments.peers) > 1:
        raise ToolError("--master needs a single number for --peers")
    check_outputs(arguments.json)
    console = console_for(arguments.json)
    has_raw_ring = arguments.master is None or RAW_RING in arguments.against
    plan = plan_of(arguments, Plan, rulers=[RAW_RING] * has_raw_ring + [GLOO] * (GLOO in arguments.against))
    rows = _measure(plan, arguments.master, console)
    print_table(rows_table(plan, rows), console)
    write_json(BenchReport(this_machine(with_torch=GLOO in plan.rulers), plan, rows), arguments.json)
    return True


def _measure(plan: Plan, master: str | None, console: Console) -> list[Row]:
    from pccl.tools.bench.local import measure
    from pccl.tools.bench.peer import measure_as_one_peer

    rows = []
    # The master runs in this process, so a spinner at the usual rate would affect the measurement.
    with console.status("measuring", refresh_per_second=1) as status:
        for row in measure(plan) if master is None else measure_as_one_peer(plan, master):
            rows.append(row)
            status.update(f"measuring: {len(rows)} of {plan.rows} cases")
    return rows


def _world_size(text: str) -> int:
    value = positive(text)
    if value == 1:
        raise ValueError("a reduce needs at least two peers")
    return value


def _quantization(text: str) -> str:
    parse_quantization(text)
    return text
