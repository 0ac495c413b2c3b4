"""`pccl stress`: peers reduce and sync while other peers are killed, frozen, cut off and added."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pccl.cli.arguments import PlanOptions, plan_of
from pccl.tools.report import add_output_options, check_outputs, console_for, exit_code, write_json
from pccl.tools.stress.plan import Interval, Plan, parse_interval

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Starts a master and several peers as processes on this machine. Each peer loops over update_topology,
sync_shared_state and ten concurrent reduces of all types and many sizes, plain and quantized. Each result reveals
its participants. Peers are killed, dismissed and started at random. The results, verdicts and states of all peers are
compared.

The exit code is 0 if every guarantee held and no call took too long. If not, it is 1, and the seed, the problems and
the folder with the logs are printed. It is 130 after Ctrl-C, which ends all processes.
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "stress",
        help="inject faults into a run and check every guarantee",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = PlanOptions(parser, Plan)
    option("--minutes", "length of the run", metavar="M")
    option("--peers", "peers at the start", metavar="N")
    option("--peers-max", "maximum number of peers at any time", metavar="N")
    option("--groups", "peer groups", metavar="N")
    interval = {"type": _interval, "metavar": "A..B"}
    help_text = "seconds between two faults, of any kind"
    option("--kill-every", help_text, dest="disturb_every", **interval)
    option("--kill", "kill peers with SIGKILL")
    option("--join", "let new peers join")
    option("--leave", "let peers leave")
    option("--freeze", "stop peers with SIGSTOP, and continue them later")
    option("--freeze-for", "duration of a freeze in seconds", **interval)
    option("--cut", "break connections between running peers")
    help_text = "seconds between kills of the leading master; another is started at its address"
    option("--kill-master-every", help_text, dest="kill_master", **interval)
    option("--standbys", "standby masters, whose addresses all peers know", metavar="N")
    help_text = "masters record their run on disk (default: only if they are killed and have no standby)"
    option("--state", help_text, action=argparse.BooleanOptionalAction)
    option("--timeouts", "give up some ops after a short timeout")
    help_text = "number of threads with which some peers reduce, mixing all_reduce and all_reduce_async"
    option("--threads", help_text, metavar="N")
    help_text = (
        "seconds between interrupts: a peer receives SIGINT in the middle of a call, its buffers must be unchanged, "
        "and it continues"
    )
    option("--interrupts", help_text, **interval)
    option("--token", "give the run a token")
    option("--encrypt", "encrypt traffic between peers, with a token")
    option("--hang", "fail if a call takes longer than this", dest="hang_s", metavar="SECONDS")
    help_text = "seed for all random choices (default: a new one)"
    parser.add_argument("--seed", type=int, metavar="S", help=help_text)
    add_output_options(parser)
    parser.set_defaults(run=run)


def _interval(text: str) -> Interval:
    try:
        return parse_interval(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(arguments: argparse.Namespace) -> int:
    import secrets
    from contextlib import closing

    from pccl.tools.stress.report import Display
    from pccl.tools.stress.supervisor import Supervisor

    if arguments.seed is None:
        arguments.seed = secrets.randbelow(1 << 31)

    def run_stress() -> bool:
        plan = plan_of(arguments, Plan)
        plan.check()
        check_outputs(arguments.json)
        with (
            closing(Display(console_for(arguments.json), plan)) as display,
            closing(Supervisor(plan, display)) as supervisor,
        ):
            report = supervisor.run()
        display.verdict(report)
        write_json(report, arguments.json)
        return report.passed

    return exit_code("pccl stress", run_stress)
