"""`pccl launch`: starts a master and N local copies of a script."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from pccl.cli.arguments import listed, natural, positive, seconds

if TYPE_CHECKING:
    from pccl.tools.launch import LaunchOptions

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Starts a master and N copies of a Python script on this machine and waits for all of them. Each copy gets these
environment variables:
  PCCL_MASTER, PCCL_RUN         the master's HOST:PORT, which Communicator() uses, and the run's name (--run)
  RANK, WORLD_SIZE              the copy's number, from 0, and the number of copies on all nodes
  LOCAL_RANK, LOCAL_WORLD_SIZE  the same for the copies on this machine
  MASTER_ADDR, MASTER_PORT      the address where rank 0 of a torch.distributed program opens its store: as
                                already set, else a free port on this machine or, with several nodes, port 29500 on the
                                first node
  PCCL_LAUNCH_INDEX, PCCL_LAUNCH_COUNT  the same as RANK and WORLD_SIZE
A copy that dies does not end the others unless --fail-fast is given.

To use several machines (--nnodes), start a launcher with the same -n on each. Node 0 starts the master at
0.0.0.0:48148 or --listen, and the master ends with that node's copies; the other nodes find it at MASTER_ADDR or
--master. If all nodes are given --master, the copies use that master, which must be running.

SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are forwarded to the copies; a second Ctrl-C kills them. The exit code is
that of the first copy that failed, or 128 plus the signal's number if a signal ended it. With --tolerate-losses it is 0
if at least one copy succeeded and every other copy succeeded or was ended by a signal not sent by the launcher.

If PCCL_TOKEN is set, the master started here requires that token, and the copies inherit it.
PCCL_ENCRYPT=1 makes the copies encrypt the traffic between them.
"""
LISTEN_ALONE = "127.0.0.1:0"
LISTEN_FOR_NODES = "0.0.0.0:48148"
HTTP = "127.0.0.1:0"
HOSTS_GRACE_S = 5.0
"""Time for ssh to end after the copies of its host."""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "launch",
        help="run N copies of a script with a master",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] [-m] script ...",
        allow_abbrev=False,  # otherwise a script argument that abbreviates several options would be an error
    )
    option = parser.add_argument
    names = ("-n", "--count", "--nproc-per-node")
    help_text = "number of copies on this machine (default: %(default)s)"
    option(*names, dest="count", type=positive, default=2, metavar="N", help=help_text)
    help_text = "number of machines with copies (default: NNODES, else 1)"
    option("--nnodes", type=positive, metavar="N", help=help_text)
    help_text = "this machine's number, from 0 (default: NODE_RANK, or RANK if WORLD_SIZE is the number of nodes)"
    option("--node-rank", type=natural, metavar="I", help=help_text)
    help_text = (
        "start the copies on these hosts by ssh, which must not ask for a password: each runs `pccl launch` in this "
        "directory, with this Python and the same PCCL_* variables. The first host starts the master and must be "
        "reachable by this name for the others. Ctrl-C, or the end of this process, ends all"
    )
    option("--hosts", metavar="[USER@]HOST,...", type=listed(str), help=help_text)
    option("--until-eof", action="store_true", help=argparse.SUPPRESS)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--master", metavar="HOST:PORT", help="use this master instead of starting one")
    help_text = (
        f"address for the master started here; 0.0.0.0:48148 lets other machines join (default: "
        f"{LISTEN_ALONE}, or {LISTEN_FOR_NODES} with --nnodes)"
    )
    where.add_argument("--listen", metavar="HOST:PORT", help=help_text)
    help_text = (
        "the run's name: masters refuse peers of a run with another name (default: PCCL_RUN, else the script's name, "
        "on a single node with a random suffix; none with --master on a single node)"
    )
    option("--run", dest="run_name", metavar="NAME", help=help_text)
    option("--http", action="store_true", help="serve the run's status page and print its address")
    option("--http-at", metavar="HOST:PORT", help="serve the status page at this address")
    help_text = (
        "do not set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, for trainers such as "
        "Accelerate's that would put all copies into one torch.distributed world"
    )
    option("--no-ranks", action="store_true", help=help_text)
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument("--fail-fast", action="store_true", help="end all copies when one fails")
    help_text = "treat copies ended by a signal, such as SIGKILL, as losses: exit with 0 if all others succeed"
    ends.add_argument("--tolerate-losses", action="store_true", help=help_text)
    help_text = "seconds that processes get to end before they are killed (default: %(default)g)"
    option("--grace", type=seconds, default=10.0, metavar="SECONDS", help=help_text)
    option("-m", dest="as_module", action="store_true", help="`script` is the name of a module")
    help_text = "a Python file, or a module's name after -m; it gets all arguments that follow"
    option("command", nargs=argparse.PARSER, metavar="script", help=help_text)
    parser.set_defaults(run=run)


def script_of(arguments: argparse.Namespace) -> list[str]:
    command: list[str] = arguments.command
    return command[1:] if command[0] == "--" else command  # Python 3.11 leaves it there


def run(arguments: argparse.Namespace) -> int:
    import os

    from pccl.tools.launch import LaunchOptions, launch, masters_address, nodes, run_name
    from pccl.tools.report import PlanError

    try:
        if arguments.hosts is not None:
            return launch(_on_hosts(arguments))
        these = nodes(arguments.nnodes, arguments.node_rank, os.environ)
        master = masters_address(these, arguments.master, os.environ)
    except PlanError as error:
        print(f"pccl launch: {error}", file=sys.stderr)
        return 2
    http = arguments.http_at or (HTTP if arguments.http else None)
    if http and master is not None:
        what = "--http needs a master that is started here"
        print(f"pccl launch: {what}; give --http to the master at {master}", file=sys.stderr)
        return 2
    script = script_of(arguments)
    options = LaunchOptions(
        command=(sys.executable, *(["-m"] if arguments.as_module else []), *script),
        count=arguments.count,
        nodes=these,
        master=master,
        run_name=run_name(these, arguments.run_name, master, script[0], os.environ),
        listen=arguments.listen or (LISTEN_ALONE if these.count == 1 else LISTEN_FOR_NODES),
        http=http,
        fail_fast=arguments.fail_fast,
        sets_ranks=not arguments.no_ranks,
        tolerate_losses=arguments.tolerate_losses,
        grace_s=arguments.grace,
        until_eof=arguments.until_eof,
    )
    return launch(options)


def _on_hosts(arguments: argparse.Namespace) -> LaunchOptions:
    """Return the options of the launcher that starts one launcher on each host."""
    import os

    from pccl.tools.launch import LaunchOptions, Nodes, run_name, shell_script
    from pccl.tools.report import PlanError

    hosts, listen = arguments.hosts, arguments.listen or LISTEN_FOR_NODES
    first, port = hosts[0].rpartition("@")[2], listen.rpartition(":")[2]
    if arguments.nnodes is not None or arguments.node_rank is not None:
        raise PlanError("--hosts numbers the nodes itself: leave out --nnodes and --node-rank")
    if not first or any(host.startswith("-") or not host for host in hosts):
        raise PlanError(f"--hosts {','.join(hosts)}: not a list of host names")
    if arguments.master is None and (not port.isdigit() or port == "0"):
        raise PlanError(f"--listen {listen}: --hosts needs a fixed port")
    command = [*(["-m"] if arguments.as_module else []), *script_of(arguments)]
    name = run_name(Nodes(), arguments.run_name, arguments.master, script_of(arguments)[0], os.environ)
    options = ["-n", str(arguments.count), "--grace", f"{arguments.grace:g}", *(["--run", name] if name else [])]
    for flag in ("fail_fast", "tolerate_losses", "no_ranks"):
        options += [f"--{flag.replace('_', '-')}"] if getattr(arguments, flag) else []
    http = arguments.http_at or (HTTP if arguments.http else None)
    scripts = []
    for rank, host in enumerate(hosts):
        master = arguments.master or (f"{first}:{port}" if rank else None)
        own = ["--nnodes", str(len(hosts)), "--node-rank", str(rank)]
        own += ["--master", master] if master else ["--listen", listen]
        own += ["--http-at", http] if http and not rank else []
        scripts.append((host, shell_script(first, [*own, *options, *command], os.environ)))
    grace_s = arguments.grace + HOSTS_GRACE_S
    return LaunchOptions(command, len(hosts), fail_fast=arguments.fail_fast, grace_s=grace_s, hosts=scripts)
