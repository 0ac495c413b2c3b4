"""The size up to which ops of a group had better take the direct algorithm than the ring, from its link metrics.

The direct algorithm (native/src/direct_plan.h) takes two one-way delays, the ring 2(W-1). But the ring fills its links,
where the direct algorithm's streams crowd each other on every peer's line. So there is a size up to which direct wins,
and it is the larger the longer and the faster the links are.

The model, for a chunk of S/W bytes of each of W ranks:

    ring     2(W-1) steps, each of which takes what the slowest link of the ring needs for a chunk, or the mean delay of
             its links if that is longer; and once more the shorter of both
    direct   twice the longest delay, and twice the time in which a host sends, or gets, what its peers exchange with
             those of other hosts, or in which the slowest link carries a chunk

A host's line is as fast as the fastest link that uses it. All peers of a group have to choose alike, so the master
tells them the limit together with the ring, and it holds as long as the ring does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pccl.protocol.link_metrics import LinkMetrics
from pccl.protocol.topology import ring_links

UNKNOWN = -1
"""No limit: links have not been measured, or there is nothing to choose. Every op is judged by its own size and
world."""
CROWDING = 1.1
"""Factor by which a line takes longer for several streams than for one, as measured in a WAN lab."""
STEP_S = 5e-5
"""Seconds that a step costs where the delay is next to nothing."""
BITS_MIN, BITS_MAX = 12, 40
UNMEASURED_CHUNK_BYTES = 512 << 10
"""Size of a rank's chunk up to which ops go direct where the limit is UNKNOWN (pccl_algorithm_default in
native/src/direct_plan.c)."""
OTHERWISE_BITS = 2
"""A new limit is worth a new ring if it differs by this power of two. Less is the spread of the measurements."""


def direct_limit(ring: Sequence[int], metrics: LinkMetrics) -> int:
    """Return the limit in bytes of an op: 0, a power of two, or UNKNOWN."""
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
    """Whether the limit `found` differs enough from the one in force to make the ring anew for it."""
    if found == UNKNOWN:
        return False
    limits = (UNMEASURED_CHUNK_BYTES * world_size if in_force == UNKNOWN else in_force), found
    bits = [max(limit, 1 << BITS_MIN).bit_length() for limit in limits]
    return abs(bits[0] - bits[1]) >= OTHERWISE_BITS
