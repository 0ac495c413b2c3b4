"""`pccl plan`: estimates traffic and waiting time of a run, with the formulas of "Sizing" in docs/operations.md."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import msgspec

from pccl.cli.arguments import interval, positive, seconds
from pccl.cli.output import failed, show
from pccl.tools.report import STANDARD_OUTPUT, ToolError, add_output_options, check_outputs, write_json

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DAY_S = 86400
FLOAT_BYTES = 4
STATE_VECTORS = 2
"""A newcomer fetches the parameters and the outer momentum."""
SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
SHARES = {"none": 1.0, "8": 8.25 / 32, "4": 4.5 / 32, "2": 2.125 / 32, "1": 1.125 / 32}
"""With the scales of default blocks."""


class Estimate(msgspec.Struct, frozen=True):
    sent_bytes: float
    """What each peer sends, and receives, per outer step."""
    network_s: float
    computing_s: float
    utilization: float
    utilization_async: float
    """With `AsyncDiLoCo`, which computes during the exchange."""
    sent_gb_per_day: float
    state_bytes: float
    join_s: float


def amount(text: str) -> float:
    scale = SUFFIXES.get(text[-1:].upper(), 1.0)
    try:
        value = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        value = 0.0
    if not 0 < value < 1e16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters, such as 350M or 1.5B")
    return value


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="estimate traffic and waiting time of a run",
        description="Estimates how long the peers of a DiLoCo run wait for the network and how much they send, if the "
        "slowest uplink is the limit. For DDP, use --inner-steps 1.",
    )
    option = parser.add_argument
    option("parameters", type=amount, metavar="PARAMETERS", help="number of parameters, such as 350M or 1.5B")
    option("--peers", type=positive, default=8, metavar="N", help="number of peers (default: %(default)s)")
    help_text = "the slowest peer's rate in Mbit/s, up or down (default: %(default)g)"
    option("--uplink", type=interval, default=200.0, metavar="MBIT", help=help_text)
    help_text = "steps of the inner optimizer per outer step (default: %(default)s)"
    option("--inner-steps", type=positive, default=500, metavar="H", help=help_text)
    help_text = "duration of an inner step (default: %(default)g)"
    option("--inner-step", type=interval, default=1.0, metavar="SECONDS", help=help_text)
    help_text = "bits per value on the wire (default: %(default)s, 32 bits)"
    option("--quantization", choices=tuple(SHARES), default="none", help=help_text)
    help_text = "round trip between neighbours in the ring (default: %(default)g)"
    option("--round-trip", type=seconds, default=0.05, metavar="SECONDS", help=help_text)
    add_output_options(parser)
    parser.set_defaults(run=run)


def estimate(arguments: argparse.Namespace) -> Estimate:
    peers, model_bytes, bytes_per_s = arguments.peers, FLOAT_BYTES * arguments.parameters, arguments.uplink * 1e6 / 8
    sent_bytes = 2 * (peers - 1) / peers * model_bytes * SHARES[arguments.quantization]
    network_s = sent_bytes / bytes_per_s + (peers - 1) * arguments.round_trip
    computing_s = arguments.inner_steps * arguments.inner_step
    return Estimate(
        sent_bytes=sent_bytes,
        network_s=network_s,
        computing_s=computing_s,
        utilization=computing_s / (computing_s + network_s),
        utilization_async=computing_s / max(computing_s, network_s),
        sent_gb_per_day=sent_bytes * DAY_S / (computing_s + network_s) / 1e9,
        state_bytes=STATE_VECTORS * model_bytes,
        join_s=STATE_VECTORS * model_bytes / bytes_per_s,
    )


def run(arguments: argparse.Namespace) -> int:
    from pccl.cli.status_table import size, span

    try:
        check_outputs(arguments.json)
    except ToolError as error:
        return failed("pccl plan", error)
    found = estimate(arguments)
    write_json(found, arguments.json)
    if arguments.json != STANDARD_OUTPUT:
        show(
            f"outer step          {span(found.computing_s)} of computing, {span(found.network_s)} of waiting for the "
            f"network\nutilization         {found.utilization:.1%}; {found.utilization_async:.1%} with AsyncDiLoCo\n"
            f"each peer sends     {size(found.sent_bytes)} per outer step, {found.sent_gb_per_day:.1f} GB a day\n"
            f"a newcomer fetches  {size(found.state_bytes)} within {span(found.join_s)}"
        )
    return 0
