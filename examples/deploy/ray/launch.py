"""Runs copies of a training script as peers on a Ray cluster, with the master in this process.

    python launch.py [--peers N] [--cpus N] SCRIPT [ARGUMENT ...]

Start it on a node of the cluster. All nodes must have pccl installed and the script at the same path. Each peer is a
Ray task. If its script fails or its node is lost, Ray restarts it, on another node if necessary, and it joins as a
newcomer. The script finds PCCL_MASTER, PCCL_TOKEN, PCCL_LAUNCH_INDEX and PCCL_LAUNCH_COUNT in its environment. The exit
code is 0 if all peers succeeded. With `ray job submit`, the master runs where Ray places the job's entry point.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
from typing import Any

import ray
from ray.exceptions import RayError

from pccl import MasterNode


class PeerFailedError(Exception):
    """The script ended with an error."""


def run_peer(index: int, count: int, master: str, token: str, command: list[str]) -> None:
    """Run one peer. Raise PeerFailedError if its script fails."""
    environment = {"PCCL_MASTER": master, "PCCL_TOKEN": token, "PYTHONUNBUFFERED": "1"}
    environment |= {"PCCL_LAUNCH_INDEX": str(index), "PCCL_LAUNCH_COUNT": str(count)}
    with subprocess.Popen([sys.executable, *command], env={**os.environ, **environment}) as process:
        try:
            returncode = process.wait()
        except BaseException:  # e.g. Ray cancels the task
            process.kill()
            raise
    if returncode != 0:
        raise PeerFailedError(f"peer {index} ended with {returncode}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False  # the script may have its own options
    parser.add_argument("--peers", type=int, default=4, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--cpus", type=float, default=1, metavar="N", help="per peer (default: %(default)g)")
    parser.add_argument("--retries", type=int, default=20, metavar="N", help="per peer (default: %(default)s)")
    parser.add_argument("command", nargs=argparse.PARSER, metavar="SCRIPT", help="and its arguments")
    options = parser.parse_args(argv)

    ray.init(address=os.environ.get("RAY_ADDRESS"))
    token = secrets.token_urlsafe(32)
    # One peer per node while there are enough nodes. Ray retries failed tasks, and those on lost nodes.
    task: Any = ray.remote(run_peer).options(
        num_cpus=options.cpus,
        scheduling_strategy="SPREAD",
        max_retries=options.retries,
        retry_exceptions=[PeerFailedError],
    )
    with MasterNode("0.0.0.0:0", token=token) as node:
        port = node.address.rpartition(":")[2]
        master = f"{ray.util.get_node_ip_address()}:{port}"
        script, *given = options.command
        command = [os.path.abspath(script), *given]
        running = [task.remote(index, options.peers, master, token, command) for index in range(options.peers)]
        print(f"{options.peers} peers of the master at {master}", flush=True)
        failed = 0
        for index, peer in enumerate(running):
            try:
                ray.get(peer)
            except (PeerFailedError, RayError) as error:
                failed += 1
                print(f"peer {index}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
