"""Link metrics: what the master knows about the links between peers, each value with its age.

A metric consists of the rate of one direction of a link, in bytes per second, and the link's round-trip time. Half of
the round-trip time is taken as the latency. Metrics come from probes (`optimize_topology`).

    1  A metric is kept until a newer one replaces it. `is_due` returns whether to measure again.
    2  A metric between two hosts applies to every unmeasured pair of their peers, including peers that join later from
       a known host.
    3  Peers share a host if they advertise the same addresses. An unmeasured link within one host is assumed to carry
       LOCAL_BYTES_PER_S.
    4  A pair whose measurement failed counts as unreachable until one succeeds.

A peer keeps its own measurements for the next master.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from pccl.protocol.topology import RingProblem, ring_links

Pair = tuple[int, int]
Hosts = tuple[str, ...]

FRESH_S = 600.0
FAILURE_FRESH_S = 60.0
"""Seconds after a failed measurement of a pair before the next attempt."""
HOST_PAIRS_MAX = 2**16
LOCAL_BYTES_PER_S = 1e10
BYTES_PER_S_MAX = 1e15
ROUND_TRIP_S_MAX = 1e3


@dataclass(frozen=True)
class KnownMetric:
    bytes_per_s: float
    round_trip_s: float
    at: float
    is_assumed: bool = False
    """Whether this is the default for peers on one host, not a measurement."""

    @property
    def latency_s(self) -> float:
        return self.round_trip_s / 2


class LinkMetrics:
    def __init__(self) -> None:
        self._hosts: dict[int, Hosts] = {}
        self._of_pairs: dict[Pair, KnownMetric] = {}
        self._between_hosts: dict[tuple[Hosts, Hosts], KnownMetric] = {}
        """For each two hosts, the latest metric between any of their peers. The oldest entry comes first."""
        self._known_hosts: set[Hosts] = set()
        self._failed_at: dict[Pair, float] = {}

    def arrived(self, peer: int, hosts: Sequence[str]) -> None:
        self._hosts[peer] = tuple(hosts)

    def gone(self, peer: int) -> None:
        """Forget the metrics between this peer and others, but keep its host's metrics."""
        self._hosts.pop(peer, None)
        for known in (self._of_pairs, self._failed_at):
            for pair in [pair for pair in known if peer in pair]:
                del known[pair]

    def measured(self, pair: Pair, bytes_per_s: float, round_trip_s: float, now: float) -> None:
        """Record the measurement of a pair. Impossible values count as a failure."""
        if not (0 < bytes_per_s <= BYTES_PER_S_MAX and 0 <= round_trip_s <= ROUND_TRIP_S_MAX):
            self.failed(pair, now)
            return
        self._failed_at.pop(pair, None)
        self._keep(pair, KnownMetric(bytes_per_s, round_trip_s, now))

    def failed(self, pair: Pair, now: float) -> None:
        self._failed_at[pair] = now

    def _keep(self, pair: Pair, metric: KnownMetric) -> None:
        self._of_pairs[pair] = metric
        hosts = self._hosts_of(pair)
        self._between_hosts.pop(hosts, None)
        self._between_hosts[hosts] = metric
        self._known_hosts.update(hosts)
        if len(self._between_hosts) > HOST_PAIRS_MAX:
            for oldest in list(islice(self._between_hosts, HOST_PAIRS_MAX // 4)):
                del self._between_hosts[oldest]
            self._known_hosts = {each for both in self._between_hosts for each in both}

    def get(self, pair: Pair) -> KnownMetric | None:
        hosts = self._hosts_of(pair)
        found = self._of_pairs.get(pair) or self._between_hosts.get(hosts)
        if found is None and hosts[0] == hosts[1]:
            found = KnownMetric(LOCAL_BYTES_PER_S, 0.0, float("-inf"), is_assumed=True)
        return found

    def is_unreachable(self, pair: Pair) -> bool:
        return pair in self._failed_at

    def is_due(self, pair: Pair, now: float) -> bool:
        failed_at = self._failed_at.get(pair)
        if failed_at is not None:
            return now >= failed_at + FAILURE_FRESH_S
        metric = self.get(pair)
        return metric is None or now >= metric.at + FRESH_S

    def are_on_one_host(self, peers: Iterable[int]) -> bool:
        return len({self.hosts(peer) for peer in peers}) == 1

    def hosts(self, peer: int) -> Hosts:
        """Return the addresses of a peer, or a name unique to the peer if it has advertised none."""
        return self._hosts.get(peer) or (f"peer {peer}",)

    def _hosts_of(self, pair: Pair) -> tuple[Hosts, Hosts]:
        return self.hosts(pair[0]), self.hosts(pair[1])

    def knows_host_of(self, peer: int) -> bool:
        return self.hosts(peer) in self._known_hosts

    def problem(self, ring: Sequence[int]) -> RingProblem:
        members = set(ring)
        numbers: dict[Hosts, int] = {}
        hosts = tuple(numbers.setdefault(self.hosts(peer), len(numbers)) for peer in ring)
        between_hosts = {(number, number): (LOCAL_BYTES_PER_S, 0.0) for number in numbers.values()}
        for (sender, receiver), metric in self._between_hosts.items():
            if sender in numbers and receiver in numbers:
                between_hosts[numbers[sender], numbers[receiver]] = metric.bytes_per_s, metric.latency_s
        return RingProblem(
            ring=tuple(ring),
            links={
                pair: (metric.bytes_per_s, metric.latency_s)
                for pair, metric in self._of_pairs.items()
                if members.issuperset(pair)
            },
            unreachable=frozenset(pair for pair in self._failed_at if members.issuperset(pair)),
            hosts=hosts,
            between_hosts=between_hosts,
        )


# The op size below which the direct algorithm is faster than the ring, computed from a group's link metrics.

UNKNOWN = -1
"""The limit if links were not measured or only one algorithm is possible. Op size and world size then decide."""
CROWDING = 1.1
"""Slowdown of several streams on one uplink, as measured in a WAN lab."""
STEP_S = 5e-5
BITS_MIN, BITS_MAX = 12, 40
UNMEASURED_CHUNK_BYTES = 512 << 10
"""Largest chunk per rank for direct ops if the limit is UNKNOWN (pccl_algorithm_default in native/src/plans.c)."""
OTHERWISE_BITS = 2
"""Power of two by which a new limit must differ to justify a new ring. Less may be measurement noise."""


def direct_limit(ring: Sequence[int], metrics: LinkMetrics) -> int:
    """Return the largest op in bytes for which the direct algorithm is faster: 0, a power of two, or UNKNOWN."""
    world_size = len(ring)
    hosts = Counter(metrics.hosts(peer) for peer in ring)
    if world_size < 3 or len(hosts) < 2:
        return UNKNOWN
    known = {}
    for sender in ring:
        for receiver in ring:
            if sender != receiver:
                metric = metrics.get((sender, receiver))
                if metric is None or metrics.is_unreachable((sender, receiver)):
                    return UNKNOWN
                known[sender, receiver] = metric
    around = [known[pair] for pair in ring_links(ring)]
    ring_delay_s = sum(max(metric.latency_s, STEP_S) for metric in around) / world_size
    ring_s_per_byte = 1 / min(metric.bytes_per_s for metric in around)

    far = {pair: metric for pair, metric in known.items() if not metrics.are_on_one_host(pair)}
    direct_delay_s = max(max(metric.latency_s for metric in far.values()), STEP_S)
    direct_s_per_byte = 1 / min(metric.bytes_per_s for metric in far.values())
    for host, count in hosts.items():
        for end in (0, 1):
            line = max(metric.bytes_per_s for pair, metric in far.items() if metrics.hosts(pair[end]) == host)
            direct_s_per_byte = max(direct_s_per_byte, count * (world_size - count) / line)

    def is_direct_faster(count: int) -> bool:
        chunk = count / world_size
        step_s = chunk * ring_s_per_byte
        ring_s = 2 * (world_size - 1) * max(step_s, ring_delay_s) + min(step_s, ring_delay_s)
        return 2 * (direct_delay_s + chunk * direct_s_per_byte * CROWDING) <= ring_s

    limit = 0
    for bits in range(BITS_MIN, BITS_MAX + 1):
        if not is_direct_faster(1 << bits):
            break
        limit = 1 << bits
    return limit


def is_outdated(in_force: int, found: int, world_size: int) -> bool:
    """Return whether the limit `found` differs enough from the one in force to justify a new ring."""
    if found == UNKNOWN:
        return False
    limits = (UNMEASURED_CHUNK_BYTES * world_size if in_force == UNKNOWN else in_force), found
    bits = [max(limit, 1 << BITS_MIN).bit_length() for limit in limits]
    return abs(bits[0] - bits[1]) >= OTHERWISE_BITS
