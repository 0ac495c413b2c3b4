"""`pccl stress`: peers that reduce and sync while they are killed, frozen, cut off and joined."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pccl.cli.arguments import PlanOptions, plan_of
from pccl.tools.report import PlanError, add_output_options, check_outputs, console_for, exit_code, write_json
from pccl.tools.stress.plan import Interval, Plan, parse_interval

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Starts a master and several peers as processes of this machine. Each peer loops over update_topology,
sync_shared_state and ten reduces at once, of all types and many sizes, plain and quantized. Results reveal their
participants. Peers are killed, dismissed and started at random. The results, verdicts and states of all peers are
compared.

Exit code 0 if every promise was kept and no call lasted too long; 1 if not, with the seed, the problems and the logs;
130 after Ctrl-C, which ends all processes.
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "stress",
        help="disturb a run on purpose and check every promise",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = PlanOptions(parser, Plan)
    option("--minutes", "length of the run", metavar="M")
    option("--peers", "peers at the start", metavar="N")
    option("--peers-max", "most peers at any time", metavar="N")
    option("--groups", "peer groups", metavar="N")
    interval = {"type": _interval, "metavar": "A..B"}
    help_text = "seconds between two disturbances, of whatever kind"
    option("--kill-every", help_text, dest="disturb_every", **interval)
    option("--kill", "kill peers with SIGKILL")
    option("--join", "let new peers join")
    option("--leave", "let peers leave")
    option("--freeze", "stop peers with SIGSTOP, and let them go on later")
    option("--freeze-for", "duration of a freeze in seconds", **interval)
    option("--cut", "break connections between living peers")
    help_text = "seconds between partitions of peers and masters, in one direction or both, on Linux only"
    option("--partition", help_text, **interval)
    option("--partition-for", "duration of a partition in seconds", **interval)
    help_text = "seconds between kills of the master that leads; another is started at its address"
    option("--kill-master-every", help_text, dest="kill_master", **interval)
    option("--standbys", "standby masters, at addresses that all peers know too", metavar="N")
    help_text = "masters record their run on disk (default: if they are killed and have no standby)"
    option("--state", help_text, action=argparse.BooleanOptionalAction)
    option("--timeouts", "give some ops up after a moment")
    help_text = "threads of each peer that take turns on a few tags, with all_reduce and all_reduce_async mixed"
    option("--threads", help_text, metavar="N")
    help_text = (
        "seconds between interrupts: a peer is sent SIGINT in the middle of a call, its buffers must be as they were "
        "before, and it goes on"
    )
    option("--interrupts", help_text, **interval)
    option("--token", "give the run a token")
    option("--encrypt", "encrypt between peers, with a token")
    option("--hang", "fail if a call takes longer", dest="hang_s", metavar="SECONDS")
    help_text = "seed of everything that is random (default: a new one)"
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

    from pccl.tools.stress.network import unavailable
    from pccl.tools.stress.report import Display
    from pccl.tools.stress.supervisor import Supervisor

    if arguments.seed is None:
        arguments.seed = secrets.randbelow(1 << 31)

    def run_stress() -> bool:
        plan = plan_of(arguments, Plan)
        plan.check()
        check_outputs(arguments.json)
        if plan.partition is not None and (reason := unavailable()):
            raise PlanError(f"--partition {reason}")
        with (
            closing(Display(console_for(arguments.json), plan)) as display,
            closing(Supervisor(plan, display)) as supervisor,
        ):
            report = supervisor.run()
        display.verdict(report)
        write_json(report, arguments.json)
        return report.passed

    return exit_code("pccl stress", run_stress)
