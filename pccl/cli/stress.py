"""`pccl stress`: peers that reduce and sync while they are killed, frozen, cut off and joined."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pccl.tools.report import add_json_option, console_for, exit_code, write_json

if TYPE_CHECKING:
    from pccl.tools.stress.plan import Interval

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
    option = parser.add_argument
    switch = argparse.BooleanOptionalAction
    option("--minutes", type=float, default=2.0, metavar="M", help="length of the run (default: %(default)g)")
    option("--peers", type=int, default=4, metavar="N", help="peers at the start (default: %(default)s)")
    option("--peers-max", type=int, default=8, metavar="N", help="most peers at any time (default: %(default)s)")
    option("--groups", type=int, default=1, metavar="N", help="peer groups (default: %(default)s)")
    option(
        "--kill-every",
        dest="disturb_every",
        type=_interval,
        default="0.5..3",
        metavar="A..B",
        help="seconds between two disturbances, of whatever kind (default: %(default)s)",
    )
    option("--kill", action=switch, default=True, help="kill peers with SIGKILL (default: do)")
    option("--join", action=switch, default=True, help="let new peers join (default: do)")
    option("--leave", action=switch, default=True, help="let peers leave (default: do)")
    option(
        "--freeze", action=switch, default=True, help="stop peers with SIGSTOP, and let them go on later (default: do)"
    )
    option(
        "--freeze-for",
        type=_interval,
        default="0.1..10",
        metavar="A..B",
        help="duration of a freeze in seconds (default: %(default)s)",
    )
    option("--cut", action=switch, default=False, help="break connections between living peers (default: do not)")
    option(
        "--partition",
        type=_interval,
        metavar="A..B",
        help="seconds between partitions, which cut some peers off from others, or from the master, in one direction "
        "or both (Linux only; default: none)",
    )
    option(
        "--partition-for",
        type=_interval,
        default="0.1..12",
        metavar="A..B",
        help="duration of a partition in seconds (default: %(default)s)",
    )
    option(
        "--kill-master-every",
        dest="kill_master",
        type=_interval,
        metavar="A..B",
        help="seconds between kills of the master that leads; another is started at its address (default: none)",
    )
    option(
        "--standbys",
        type=int,
        default=0,
        metavar="N",
        help="standby masters, at addresses that all peers know too (default: %(default)s)",
    )
    option(
        "--state",
        action=switch,
        default=None,
        help="masters record their run on disk (pccl master --state; default: if they are killed and have no standby)",
    )
    option("--timeouts", action=switch, default=False, help="give some ops up after a moment (default: do not)")
    option(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="threads of each peer that take turns on a few tags, with all_reduce and all_reduce_async mixed (default: "
        "none)",
    )
    option(
        "--interrupts",
        type=_interval,
        metavar="A..B",
        help="seconds between interrupts: a peer is sent SIGINT in the middle of a call, its buffers must be as they "
        "were before, and it goes on (default: none)",
    )
    option("--token", action=switch, default=False, help="give the run a token (default: do not)")
    option("--encrypt", action=switch, default=False, help="encrypt between peers, with a token (default: do not)")
    option(
        "--hang",
        dest="hang_s",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="fail if a call takes longer (default: %(default)g)",
    )
    option("--seed", type=int, metavar="S", help="seed of everything that is random (default: a new one)")
    add_json_option(parser)
    parser.set_defaults(run=run)


def _interval(text: str) -> Interval:
    from pccl.tools.stress.plan import parse_interval

    try:
        return parse_interval(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(arguments: argparse.Namespace) -> int:
    import secrets

    from pccl.tools.report import PlanError
    from pccl.tools.stress.network import unavailable
    from pccl.tools.stress.plan import Plan
    from pccl.tools.stress.report import Display, Report, to_json
    from pccl.tools.stress.supervisor import Supervisor

    if arguments.seed is None:
        arguments.seed = secrets.randbelow(1 << 31)
    plan = Plan(**{name: value for name, value in vars(arguments).items() if name in Plan.__struct_fields__})

    def run_stress() -> Report:
        plan.check()
        if plan.partition is not None and (reason := unavailable()):
            raise PlanError(f"--partition {reason}")
        with Display(console_for(arguments.json), plan) as display, Supervisor(plan, display) as supervisor:
            report = supervisor.run()
        display.verdict(report)
        write_json(to_json(report), arguments.json)
        return report

    return exit_code("pccl stress", run_stress)
