"""`pccl stress`: peers that reduce and sync while they are killed, frozen, cut off and joined."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

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


_PLAN_OPTIONS = (
    *("minutes", "peers", "peers_max", "groups", "kill", "join", "leave", "freeze", "freeze_for", "cut", "partition"),
    *("partition_for", "standbys", "state", "timeouts", "threads", "interrupts", "token", "encrypt"),
)
"""Options with the names of the plan's fields."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "stress",
        help="disturb a run on purpose and check every promise",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    switch = argparse.BooleanOptionalAction
    count: dict[str, Any] = {"type": int, "metavar": "N"}
    interval: dict[str, Any] = {"type": _interval, "metavar": "A..B"}
    option("--minutes", type=float, default=2.0, metavar="M", help="length of the run (default: %(default)g)")
    option("--peers", **count, default=4, help="peers at the start (default: %(default)s)")
    option("--peers-max", **count, default=8, help="most peers at any time (default: %(default)s)")
    option("--groups", **count, default=1, help="peer groups (default: %(default)s)")
    help_text = "seconds between two disturbances of any kind (default: %(default)s)"
    option("--kill-every", **interval, default="0.5..3", help=help_text)
    option("--kill", action=switch, default=True, help="kill peers with SIGKILL (default: do)")
    option("--join", action=switch, default=True, help="let new peers join (default: do)")
    option("--leave", action=switch, default=True, help="let peers leave (default: do)")
    option("--freeze", action=switch, default=True, help="stop peers with SIGSTOP for some time (default: do)")
    option("--freeze-for", **interval, default="0.1..10", help="seconds of a freeze (default: %(default)s)")
    option("--cut", action=switch, default=False, help="break connections between living peers (default: do not)")
    help_text = (
        "seconds between partitions, which separate some peers from others, or from the master, in one direction or "
        "both (Linux only; default: none)"
    )
    option("--partition", **interval, help=help_text)
    option("--partition-for", **interval, default="0.1..12", help="seconds of a partition (default: %(default)s)")
    help_text = "seconds between kills of the leading master; another is started at its address (default: none)"
    option("--kill-master-every", **interval, help=help_text)
    help_text = (
        "standby masters, at addresses that all peers know too. A killed master comes back as a standby, or as a "
        "master without the state of the run (default: %(default)s)"
    )
    option("--standbys", **count, default=0, help=help_text)
    help_text = "masters record their run on disk (default: if they are killed and have no standby)"
    option("--state", action=switch, default=None, help=help_text)
    option("--timeouts", action=switch, default=False, help="some ops have a short timeout (default: do not)")
    help_text = "threads of each peer that share a few tags, with blocking and asynchronous ops (default: none)"
    option("--threads", **count, default=0, help=help_text)
    help_text = (
        "seconds between interrupts: a peer receives SIGINT in a call, its buffers must be unchanged, and it continues "
        "(default: none)"
    )
    option("--interrupts", **interval, help=help_text)
    option("--token", action=switch, default=False, help="the run has a token (default: do not)")
    option("--encrypt", action=switch, default=False, help="encrypt between peers, with a token (default: do not)")
    help_text = "fail if a call takes longer (default: %(default)g)"
    option("--hang", type=float, default=30.0, metavar="SECONDS", help=help_text)
    option("--seed", type=int, metavar="S", help="seed of all random choices (default: a new one)")
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

    options = vars(arguments)
    plan = Plan(
        seed=secrets.randbelow(1 << 31) if arguments.seed is None else arguments.seed,
        disturb_every=arguments.kill_every,
        kill_master=arguments.kill_master_every,
        hang_s=arguments.hang,
        **{name: options[name] for name in _PLAN_OPTIONS},
    )

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
