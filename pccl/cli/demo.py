"""`pccl demo`: trains a small language model across processes that die and join."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pccl.tools.report import add_json_option, console_for, exit_code, write_json

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Starts a master and several peers as processes of this machine. Each trains the same byte-level language model on its
own shard of the Python standard library's sources, with DiLoCo: many local AdamW steps, then one all-reduce of what
they changed, then an outer Nesterov step. On the way one peer is killed in the middle of an all-reduce, and later a
new one joins and receives the shared state from the others.

It takes about 15 seconds on two cores; --steps 20 --inner-steps 80 takes a minute and learns more.

Exit code 0 if the loss fell clearly below the text's unigram entropy (or, in runs of less than 100 inner steps, below
the initial loss), all survivors hold the same bytes, and the kill and the join went as planned; 1 if not; 130 after
Ctrl-C, which ends all processes.
"""


PLAN_OPTIONS = {
    *("peers", "steps", "inner_steps", "seed", "kill", "join", "quantize", "connections", "context", "hidden"),
}
"""Options with the names of the plan's fields."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train across processes that die and join",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    switch = argparse.BooleanOptionalAction
    count: dict[str, Any] = {"type": int, "metavar": "N"}
    option("--peers", **count, default=4, help="peers at the start (default: %(default)s)")
    option("--steps", **count, default=10, help="outer steps of the run (default: %(default)s)")
    option("--inner-steps", **count, default=30, help="inner steps of a peer in an outer step (default: %(default)s)")
    option("--seed", type=int, default=0, metavar="S", help="seed of all random choices (default: %(default)s)")
    option("--kill", action=switch, default=True, help="kill the last peer after a third of the steps (default: do)")
    option("--join", action=switch, default=True, help="a new peer joins after two thirds of the steps (default: do)")
    quantizations = ("none", "min-max", "zero-point")
    help_text = "send the all-reduces as 8-bit integers (default: %(default)s)"
    option("--quantize", choices=quantizations, default="none", help=help_text)
    option("--connections", **count, default=2, help="connections between two peers (default: %(default)s)")
    option("--context", **count, default=12, help="bytes of text that the model sees (default: %(default)s)")
    option("--hidden", **count, default=256, help="width of the model's hidden layers (default: %(default)s)")
    help_text = "fail if no step ends for this long (default: %(default)g)"
    option("--step-timeout", type=float, default=60.0, metavar="SECONDS", help=help_text)
    help_text = "serve the page of the run there (default: not; without HOST:PORT at a free port)"
    option("--http", nargs="?", const="127.0.0.1:0", metavar="HOST:PORT", help=help_text)
    option("--plot", metavar="FILE", help="draw the loss against steps and bytes to a file such as curve.png")
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from pccl.tools.demo.display import Display
    from pccl.tools.demo.plan import Plan
    from pccl.tools.demo.report import Report, draw_plot, to_json
    from pccl.tools.demo.supervisor import Supervisor
    from pccl.tools.report import check_plot

    options = {name: value for name, value in vars(arguments).items() if name in PLAN_OPTIONS}
    plan = Plan(**options, step_timeout_s=arguments.step_timeout)

    def run_demo() -> Report:
        plan.check()
        if arguments.plot:
            check_plot(Path(arguments.plot))
        with (
            Display(console_for(arguments.json), plan) as display,
            Supervisor(plan, display, arguments.http) as supervisor,
        ):
            report = supervisor.run()
        display.verdict(report)
        write_json(to_json(report), arguments.json)
        if arguments.plot:
            draw_plot(report, Path(arguments.plot))
        return report

    return exit_code("pccl demo", run_demo)
