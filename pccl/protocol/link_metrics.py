"""What is known of the links between peers: metrics, each with its age and where it comes from.

A link has two directions, and each has metrics of its own: how many bytes per second it carries, and how long a round
trip takes (of which half counts as its latency). They come from

    probes   a measurement for optimize_topology
    ops      what an op carried in passing, see `carried`

A metric is kept until there is a newer one, however old it is; `is_due` says when it should be measured anew. So is one
between two hosts, whichever peers of theirs it was measured between: it stands for the pairs of their peers that were
not measured themselves, those of a peer included that comes later from a host that was known. Peers share a host if
they advertise the same addresses; peers on one host of which nothing else is known have the best link there is.

A pair that could not be measured is unreachable until it could.

What was measured is also kept by whoever measured it, for a master after this one; the rest is found out anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from pccl.protocol.ring_problem import RingProblem

Pair = tuple[int, int]
"""Sender and receiver."""
Hosts = tuple[str, ...]

FRESH_S = 600.0
"""A younger metric is not measured anew."""
FAILURE_FRESH_S = 60.0
"""A pair that could not be measured is left alone for so long."""
HOST_PAIRS_MAX = 2**16
LOCAL_BYTES_PER_S = 1e10
"""Assumed between peers of one host."""
BYTES_PER_S_MAX = 1e15
ROUND_TRIP_S_MAX = 1e3


@dataclass(frozen=True)
class KnownMetric:
    bytes_per_s: float
    round_trip_s: float
    at: float
    """When it was found."""
    source: str = "probe"
    """probe, op, or host: assumed, since both are on one."""

    @property
    def is_assumed(self) -> bool:
        return self.source == "host"

    @property
    def latency_s(self) -> float:
        """One way, as far as a round trip can tell."""
        return self.round_trip_s / 2


class LinkMetrics:
    def __init__(self) -> None:
        self._hosts: dict[int, Hosts] = {}
        self._of_pairs: dict[Pair, KnownMetric] = {}
        self._between_hosts: dict[tuple[Hosts, Hosts], KnownMetric] = {}
        """The latest of any pair; the oldest entry first."""
        self._known_hosts: set[Hosts] = set()
        """All that are in there."""
        self._failed_at: dict[Pair, float] = {}

    def arrived(self, peer: int, hosts: Sequence[str]) -> None:
        """From now on there is a peer with these addresses."""
        self._hosts[peer] = tuple(hosts)

    def gone(self, peer: int) -> None:
        self._hosts.pop(peer, None)
        for known in (self._of_pairs, self._failed_at):
            for pair in [pair for pair in known if peer in pair]:
                del known[pair]

    def measured(self, pair: Pair, bytes_per_s: float, round_trip_s: float, now: float) -> None:
        if not (0 < bytes_per_s <= BYTES_PER_S_MAX and 0 <= round_trip_s <= ROUND_TRIP_S_MAX):
            self.failed(pair, now)
            return
        self._failed_at.pop(pair, None)
        self._keep(pair, KnownMetric(bytes_per_s, round_trip_s, now))

    def failed(self, pair: Pair, now: float) -> None:
        """It could not be measured."""
        self._failed_at[pair] = now

    def carried(self, pair: Pair, bytes_per_s: float, now: float) -> None:
        """An op has moved data over this link at such a rate while the link was what held it up. The round trip is
        known from elsewhere, or there is nothing to add to."""
        known = self.get(pair)
        if known is not None and 0 < bytes_per_s <= BYTES_PER_S_MAX and not self.is_unreachable(pair):
            self._keep(pair, KnownMetric(bytes_per_s, known.round_trip_s, now, "op"))

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
        """The best that is known of it, None if nothing is."""
        hosts = self._hosts_of(pair)
        found = self._of_pairs.get(pair) or self._between_hosts.get(hosts)
        if found is None and hosts[0] == hosts[1]:
            found = KnownMetric(LOCAL_BYTES_PER_S, 0.0, float("-inf"), "host")
        return found

    def is_unreachable(self, pair: Pair) -> bool:
        return pair in self._failed_at

    def is_due(self, pair: Pair, now: float) -> bool:
        """It should be measured."""
        failed_at = self._failed_at.get(pair)
        if failed_at is not None:
            return now >= failed_at + FAILURE_FRESH_S
        metric = self.get(pair)
        return metric is None or now >= metric.at + FRESH_S

    def are_on_one_host(self, peers: Iterable[int]) -> bool:
        return len({self.hosts(peer) for peer in peers}) == 1

    def hosts(self, peer: int) -> Hosts:
        """Its own where nobody has told any."""
        return self._hosts.get(peer) or (f"peer {peer}",)

    def _hosts_of(self, pair: Pair) -> tuple[Hosts, Hosts]:
        return self.hosts(pair[0]), self.hosts(pair[1])

    def knows_host_of(self, peer: int) -> bool:
        """Something was found out about its host."""
        return self.hosts(peer) in self._known_hosts

    def problem(self, ring: Sequence[int]) -> RingProblem:
        """For a search of a better ring of the same peers."""
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
