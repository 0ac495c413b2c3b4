"""A comparison of the ring that optimize_topology finds where links differ with all rings that there are. Needs root.

    sudo python -m tests.wan.topology [--hosts 6] [--seed 3] [--megabytes 4]

A lab where each direction of each pair of hosts carries `--slow` or `--fast` Mbit/s by chance, and is `--delay-ms`
long, half as much more or less. One peer on each host; the master is on host 0. After an optimize_topology that
measures everything, the lab's own numbers say how good the ring is: its slowest link next to that of the best and of
the worst of all rings. Then an all_reduce is timed on each of the three, and on the one that the order of joining made.

To time a ring of our choice the master here obeys orders in some calls; the first and the last are decided as usual.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import permutations
from typing import Any

from tests.wan.lab import Lab, Link, Path, unavailable

MASTER_PORT = 48148
PHASES = ("as joined", "optimized", "best", "worst", "again")
REPEATS = 3
Ring = tuple[int, ...]
"""Hosts, from 0 on."""


@dataclass(frozen=True)
class Net:
    """The lab's paths, by sender and receiver."""

    rates_mbit: dict[tuple[int, int], float]
    delays_ms: dict[tuple[int, int], float]

    @classmethod
    def of_seed(cls, hosts: int, seed: int, slow: float, fast: float, delay_ms: float) -> Net:
        rng = random.Random(seed)
        links = list(permutations(range(hosts), 2))
        rates = {link: rng.choice((slow, fast)) for link in links}
        delays = {(a, b): round(delay_ms * rng.uniform(0.5, 1.5), 1) for a, b in links if a < b}
        return cls(rates, delays | {(b, a): delay for (a, b), delay in delays.items()})

    def slowest_mbit(self, ring: Ring) -> float:
        return min(self.rates_mbit[ring[at - 1], ring[at]] for at in range(len(ring)))

    def once_round_ms(self, ring: Ring) -> float:
        return round(sum(self.delays_ms[ring[at - 1], ring[at]] for at in range(len(ring))), 1)

    def rings(self) -> list[Ring]:
        """All, best first: by the slowest link, then by the latency."""
        hosts = 1 + max(host for host, _ in self.rates_mbit)
        found = [(0, *rest) for rest in permutations(range(1, hosts))]
        return sorted(found, key=lambda ring: (-self.slowest_mbit(ring), self.once_round_ms(ring)))


@dataclass
class Report:
    optimize_s: float = 0.0
    """The seconds of the call that measures everything."""
    rings: dict[str, Ring] = field(default_factory=dict)
    """The ring, by phase."""
    slowest_mbit: dict[str, float] = field(default_factory=dict)
    """The rate of the ring's slowest link by phase, by the lab's numbers."""
    once_round_ms: dict[str, float] = field(default_factory=dict)
    reduce_s: dict[str, float] = field(default_factory=dict)
    """The median of the slowest peer."""
    measured_mbit: dict[str, float] = field(default_factory=dict)
    """The figures that the master has of each link, such as 0->1."""


def measure(net: Net, megabytes: float) -> Report:
    hosts = 1 + max(host for host, _ in net.rates_mbit)
    rings = net.rings()
    orders = {"best": rings[0], "worst": rings[-1]}
    paths = {link: Path(net.delays_ms[link], rate_mbit=rate) for link, rate in net.rates_mbit.items()}
    report = Report()
    with Lab(hosts, Link(), paths=paths) as lab:
        addresses = [host.address for host in lab.hosts]
        role = [sys.executable, "-m", "tests.wan.topology", "--role"]
        told = json.dumps({"addresses": addresses, "orders": list(orders.values())})
        master = lab.hosts[0].popen([*role, "master", told], stdout=subprocess.PIPE, text=True)
        assert master.stdout is not None
        assert master.stdout.readline(), "the master has not started"
        heard: list[dict[str, Any]] = []
        listener = threading.Thread(target=lambda: heard.extend(map(json.loads, master.stdout)), daemon=True)
        listener.start()
        peers = [
            host.popen(
                [*role, "peer", told], stdout=subprocess.PIPE, text=True, env=_environment(lab, host.number, megabytes)
            )
            for host in lab.hosts
        ]
        lines = [peer.communicate()[0].splitlines() for peer in peers]
        assert not any(peer.returncode for peer in peers), [peer.returncode for peer in peers]
        master.terminate()
        listener.join()
        master.stdout.close()
    for at, phase in enumerate(PHASES):
        of_peers = [json.loads(said[at]) for said in lines]
        report.reduce_s[phase] = max(each["reduce_s"] for each in of_peers)
        if phase == "optimized":
            report.optimize_s = max(each["optimize_s"] for each in of_peers)
    for phase, decision in zip(PHASES, [{"ring": heard[0]["before"]}, *heard], strict=True):
        ring = tuple(decision["ring"])
        report.rings[phase] = ring
        report.slowest_mbit[phase] = net.slowest_mbit(ring)
        report.once_round_ms[phase] = net.once_round_ms(ring)
    report.measured_mbit = heard[0]["measured_mbit"]
    return report


def _environment(lab: Lab, host: int, megabytes: float) -> dict[str, str]:
    return {
        **os.environ,
        "PCCL_MASTER": f"{lab.hosts[0].address}:{MASTER_PORT}",
        "PCCL_HOST": str(host),
        "MEGABYTES": str(megabytes),
    }


# Roles of processes in the lab.


def run_master(addresses: list[str], orders: list[list[int]]) -> None:
    from pccl import MasterNode
    from pccl.protocol.link_metrics import LinkMetrics
    from pccl.protocol.master import ring

    decide = ring.decide
    left = [None, *orders, None]

    def decide_or_obey(present: Sequence[int], found: Sequence[int], metrics: LinkMetrics) -> tuple[list[int], str]:
        by_host = {addresses.index(metrics.hosts(peer)[0]): peer for peer in present}
        hosts = {peer: host for host, peer in by_host.items()}
        order = left.pop(0)
        ring, reason = decide(present, found, metrics) if order is None else ([by_host[host] for host in order], "told")
        measured_mbit = {}
        for a, b in permutations(present, 2):
            if (metric := metrics.get((a, b))) is not None:
                measured_mbit[f"{hosts[a]}->{hosts[b]}"] = round(metric.bytes_per_s * 8e-6, 1)
        said = {
            "before": [hosts[peer] for peer in present],
            "ring": [hosts[peer] for peer in ring],
            "measured_mbit": measured_mbit,
        }
        print(json.dumps(said), flush=True)
        return ring, reason

    ring.decide = decide_or_obey
    with MasterNode(f"{addresses[0]}:{MASTER_PORT}"):
        print("listening", flush=True)
        threading.Event().wait()


def run_peer(addresses: list[str]) -> None:
    import numpy as np

    from pccl import Communicator, ReduceAlgorithm, ReduceOp

    data = np.ones(int(float(os.environ["MEGABYTES"]) * 2**20) // 4, np.float32)
    with Communicator(os.environ["PCCL_MASTER"]) as peer:
        peer.wait_for_peers(len(addresses))
        for phase in PHASES:
            begun_s = time.perf_counter()
            if phase != PHASES[0]:
                peer.optimize_topology()
            optimize_s = time.perf_counter() - begun_s
            times_s = []
            for _ in range(REPEATS + 1):
                peer.all_reduce(np.zeros(1, np.float32), op=ReduceOp.SUM)
                begun_s = time.perf_counter()
                peer.all_reduce(data, op=ReduceOp.AVG, algorithm=ReduceAlgorithm.RING)
                times_s.append(time.perf_counter() - begun_s)
            print(json.dumps({"optimize_s": optimize_s, "reduce_s": statistics.median(times_s[1:])}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=6, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=3, help="of the rates and delays (default: %(default)s)")
    parser.add_argument("--slow", type=float, default=20.0, metavar="MBIT", help="(default: %(default)s)")
    parser.add_argument("--fast", type=float, default=200.0, metavar="MBIT", help="(default: %(default)s)")
    parser.add_argument("--delay-ms", type=float, default=25.0, help="one way, in the mean (default: %(default)s)")
    parser.add_argument("--megabytes", type=float, default=4.0, help="of an all_reduce (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="everything, in one line")
    parser.add_argument("--role", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role is not None:
        told = json.loads(options.role[1])
        if options.role[0] == "master":
            run_master(**told)
        else:
            run_peer(told["addresses"])
        return 0
    if reason := unavailable():
        print(reason, file=sys.stderr)
        return 1
    net = Net.of_seed(options.hosts, options.seed, options.slow, options.fast, options.delay_ms)
    report = measure(net, options.megabytes)
    if options.json:
        print(json.dumps(asdict(report)))
    else:
        show(net, report)
    return 0


def show(net: Net, report: Report) -> None:
    print(f"optimize_topology of {len(report.rings['best'])} peers: {report.optimize_s:.1f} s")
    ratios = sorted(
        report.measured_mbit[f"{a}->{b}"] / rate
        for (a, b), rate in net.rates_mbit.items()
        if f"{a}->{b}" in report.measured_mbit
    )
    print(
        f"{len(ratios)} of {len(net.rates_mbit)} links measured, at {ratios[0]:.2f} to {ratios[-1]:.2f} of their rate, "
        f"median {statistics.median(ratios):.2f}"
    )
    print(f"{'ring':12}{'slowest link':>16}{'once round':>14}{'all_reduce':>14}")
    for phase in PHASES:
        print(
            f"{phase:12}{report.slowest_mbit[phase]:9.0f} Mbit/s{report.once_round_ms[phase]:11.0f} ms"
            f"{report.reduce_s[phase]:12.2f} s  {' '.join(map(str, report.rings[phase]))}"
        )


if __name__ == "__main__":
    sys.exit(main())
