"""A model of the time that an all-reduce takes: the ring, the direct algorithm, and a hierarchy of sites.

    python -m tests.wan.model                    # with the constants below
    python -m tests.wan.model bench.json         # how well they fit what the lab measured, and which would fit best

The model: each site has an uplink and a downlink of one rate, any two are one delay apart, and a site has no delay
inside. An op moves bytes at EFFICIENCY of the rate (headers, slow starts, streams that crowd each other), and has
OVERHEAD_S also; the verdict takes a round trip to the master. Where a step's bytes take longer than the delay, steps
of the ring follow each other without a pause; where they take less, each step takes the delay.

    ring        every peer sends 2 (W - 1) / W of the buffer to the next; sites side by side, so one link leaves each
    direct      as many bytes a peer, in two steps; a site's uplink carries those of all its peers to all other sites
    hierarchy   one peer of each site, in a ring among themselves; pccl has no such algorithm

`bench.json` is what `python -m tests.wan --hosts N --delay-ms D --rate-mbit R -- bench --algorithm ring,direct --json
bench.json` writes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

EFFICIENCY = 0.90
OVERHEAD_S = 0.039
SIZES = (2**12, 2**20, 2**24, 2**28)


@dataclass(frozen=True)
class Net:
    sites: int
    peers: int
    """The number of each site's hosts."""
    rate_mbit: float
    """The rate of each site's uplink, and of its downlink."""
    delay_s: float
    efficiency: float = EFFICIENCY
    overhead_s: float = OVERHEAD_S

    @property
    def world(self) -> int:
        return self.sites * self.peers

    def transfer_s(self, count: float) -> float:
        return count * 8e-6 / (self.rate_mbit * self.efficiency)

    @property
    def agreement_s(self) -> float:
        return self.overhead_s + 2 * self.delay_s


def ring_s(net: Net, count: int) -> float:
    step_s = net.transfer_s(count / net.world)
    # With several peers a site only some steps go far, and each byte crosses every border twice.
    far_s = 2 * (net.sites - (net.peers == 1)) * net.delay_s
    if step_s >= net.delay_s:
        return net.agreement_s + 2 * (net.world - 1) * step_s + net.delay_s
    return net.agreement_s + max(2 * (net.world - 1) * step_s, far_s) + step_s


def direct_s(net: Net, count: int) -> float:
    leaving = net.peers * (net.world - net.peers) / net.world * count
    return net.agreement_s + 2 * (net.transfer_s(leaving) + net.delay_s)


def hierarchy_s(net: Net, count: int) -> float:
    return ring_s(Net(net.sites, 1, net.rate_mbit, net.delay_s, net.efficiency, net.overhead_s), count)


ALGORITHMS: dict[str, Callable[[Net, int], float]] = {"ring": ring_s, "direct": direct_s, "hierarchy": hierarchy_s}


def show(rate_mbit: float, delay_s: float) -> None:
    print(f"{rate_mbit:g} Mbit/s a site, {delay_s * 1e3:g} ms, seconds")
    print(f"{'sites x peers':>14}{'bytes':>12}" + "".join(f"{name:>12}" for name in ALGORITHMS))
    for sites, peers in ((4, 1), (16, 1), (64, 1), (2, 8), (4, 8), (8, 8)):
        for count in SIZES:
            net = Net(sites, peers, rate_mbit, delay_s)
            times = "".join(f"{algorithm(net, count):12.3f}" for algorithm in ALGORITHMS.values())
            print(f"{sites:>8} x {peers:<3}{count:>12}{times}")


def fit(report: Path, rate_mbit: float, delay_s: float) -> None:
    rows = [row for row in json.loads(report.read_text())["rows"] if row["tensors"] == 1]

    def errors(efficiency: float, overhead_s: float) -> list[float]:
        return [
            ALGORITHMS[row["algorithm"]](Net(row["peers"], 1, rate_mbit, delay_s, efficiency, overhead_s), row["bytes"])
            / row["pccl"]["median_s"]
            - 1
            for row in rows
        ]

    choices = [(percent / 100, ms / 1e3) for percent in range(50, 98) for ms in range(40)]
    best = min(choices, key=lambda choice: statistics.fmean(error**2 for error in errors(*choice)))
    print(f"best fit: efficiency {best[0]:.2f}, overhead {best[1]:.3f} s")
    for row, error, error_of_best in zip(rows, errors(EFFICIENCY, OVERHEAD_S), errors(*best), strict=True):
        print(
            f"{row['algorithm']:>10}{row['bytes']:>12}{row['pccl']['median_s']:9.3f} s, model {error:+6.0%}, "
            f"best fit {error_of_best:+6.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, nargs="?")
    parser.add_argument("--rate-mbit", type=float, default=200.0, help="(default: %(default)s)")
    parser.add_argument("--delay-ms", type=float, default=25.0, help="one way (default: %(default)s)")
    options = parser.parse_args()
    if options.report is not None:
        fit(options.report, options.rate_mbit, options.delay_ms / 1e3)
    else:
        show(options.rate_mbit, options.delay_ms / 1e3)


if __name__ == "__main__":
    main()
