"""Idle connections to a run's ports, and what they cost it: `python -m tests.runtime.network.flood --connections 1000`.

A master and three peers in this process reduce in a loop. Step times are measured in turns without and with so many
idle connections to the master's port and to every peer's, once these have been accepted; a fourth peer joins while they
stand.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from pccl import MasterNode, ReduceOp
from tests.support.cluster import Cluster, until

# A process of its own: its descriptors and its time are not the run's.
IDLER = """
import resource, socket, sys
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
kept = []
for address in sys.argv[2:]:
    host, port = address.rsplit(":", 1)
    for _ in range(int(sys.argv[1])):
        kept.append(socket.create_connection((host, int(port)), 30))
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def idle_connections(count: int, addresses: Sequence[str]) -> Iterator[None]:
    """`count` connections to each address that never say a word."""
    command = [sys.executable, "-c", IDLER, str(count), *addresses]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)


def ports(cluster: Cluster) -> list[str]:
    """The master's address and every peer's."""
    sessions = [peer._inner._session for peer in cluster.peers]
    assert all(session is not None for session in sessions)
    return [cluster.address, *(f"127.0.0.1:{session._port.number}" for session in sessions if session)]


def arrivals(master: MasterNode, cluster: Cluster) -> int:
    """Return how many unauthenticated connections have come to any port so far and are there still, or were dropped."""
    assert master._service is not None
    sessions = [peer._inner._session for peer in cluster.peers]
    ports = [
        master._service._server._authentication.unauthenticated,
        *(session._inbound.unauthenticated for session in sessions if session),
    ]
    return sum(len(port) + port.dropped for port in ports)


def steps(cluster: Cluster, count: int, elements: int) -> list[float]:
    """Seconds of so many reduces, made by all peers at the same time; each result is checked."""
    taken: list[float] = []

    def loop(index: int) -> None:
        values = np.empty(elements, np.float32)
        for _ in range(count):
            values[:] = index + 1
            start = time.perf_counter()
            cluster[index].all_reduce(values, op=ReduceOp.SUM)
            if index == 0:
                taken.append(time.perf_counter() - start)
            assert (values == sum(range(1, len(cluster.peers) + 1))).all()

    cluster.each(lambda peer, index: loop(index))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=1000, help="idle ones to each port")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="reduces a round")
    parser.add_argument("--elements", type=int, default=2**18)
    arguments = parser.parse_args()
    quiet: list[float] = []
    flooded: list[float] = []
    with ExitStack() as stack:
        master = stack.enter_context(MasterNode("127.0.0.1:0"))
        cluster = Cluster(master.address)
        cluster.join(3)
        stack.callback(cluster.close_all)
        steps(cluster, arguments.steps, arguments.elements)
        for _ in range(arguments.rounds):
            quiet += steps(cluster, arguments.steps, arguments.elements)
            expected = arrivals(master, cluster) + 4 * arguments.connections
            with idle_connections(arguments.connections, ports(cluster)):
                until(lambda n=expected: arrivals(master, cluster) >= n, "all are accepted")
                flooded += steps(cluster, arguments.steps, arguments.elements)
        with idle_connections(arguments.connections, ports(cluster)):
            start = time.perf_counter()
            cluster.join()
            joined_s = time.perf_counter() - start
    for name, taken in (("without", quiet), (f"with {arguments.connections} to each of 4 ports", flooded)):
        percentiles = statistics.quantiles(taken, n=100)
        print(
            f"{name}: {len(taken)} steps of {arguments.elements * 4 / 2**20:g} MiB, "
            f"median {statistics.median(taken) * 1e3:.2f} ms, 99th percentile {percentiles[98] * 1e3:.2f} ms"
        )
    print(
        f"median ratio {statistics.median(flooded) / statistics.median(quiet):.3f}; a peer joined in {joined_s:.3f} s"
    )


if __name__ == "__main__":
    main()
