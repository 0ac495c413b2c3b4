"""`pccl demo`: trains a small language model across processes that die and join."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pccl.cli.arguments import PlanOptions, plan_of
from pccl.tools.demo.plan import Plan
from pccl.tools.report import add_output_options, check_outputs, console_for, exit_code, write_json

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Starts a master and several peers as processes on this machine. Each peer trains the same byte-level language model on
its own shard of the Python standard library's sources, with DiLoCo: many local steps, then one all-reduce of
their changes, then an outer Nesterov step. During the run, one peer is killed in the middle of an all-reduce, and
later a new one joins and receives the shared state from the others.

This takes about 20 seconds on two cores; --steps 20 --inner-steps 80 takes a minute and learns more.

The exit code is 0 if the loss fell clearly below the text's unigram entropy (or, in runs with fewer than 100 inner
steps, below the initial loss), all survivors hold the same bytes, and the kill and the join went as planned. Otherwise
it is 1, or 130 after Ctrl-C, which ends all processes.
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train across processes that die and join",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = PlanOptions(parser, Plan)
    option("--peers", "peers at the start", metavar="N")
    option("--steps", "number of outer steps", metavar="N")
    option("--inner-steps", "inner steps per outer step, on each peer", metavar="N")
    option("--seed", "seed for all random choices", metavar="S")
    option("--kill", "kill the last peer after a third of the steps")
    option("--join", "let a new peer join after two thirds of the steps")
    option("--quantize", "send the all-reduces as 8-bit integers", choices=("none", "min-max", "zero-point"))
    option("--optimizer", "inner optimizer; muon is for the hidden layers' matrices", choices=("adamw", "muon"))
    option("--connections", "connections between two peers", metavar="N")
    option("--context", "bytes of text that the model sees", metavar="N")
    option("--hidden", "width of the model's hidden layers", metavar="N")
    option("--step-timeout", "give up if no step ends for this long", dest="step_timeout_s", metavar="SECONDS")
    help_text = "serve the status page at this address during the run (default: off; without HOST:PORT, at a free port)"
    parser.add_argument("--http", nargs="?", const="127.0.0.1:0", metavar="HOST:PORT", help=help_text)
    add_output_options(parser, plots="the loss against steps and bytes")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from contextlib import closing

    from pccl.tools.demo.report import Display, draw_plot
    from pccl.tools.demo.supervisor import Supervisor

    def run_demo() -> bool:
        plan = plan_of(arguments, Plan)
        plan.check()
        check_outputs(arguments.json, arguments.plot)
        with (
            closing(Display(console_for(arguments.json), plan)) as display,
            closing(Supervisor(plan, display)) as supervisor,
        ):
            report = supervisor.run(arguments.http)
        display.verdict(report)
        write_json(report, arguments.json)
        if arguments.plot is not None:
            draw_plot(report, arguments.plot)
        return report.passed

    return exit_code("pccl demo", run_demo)
