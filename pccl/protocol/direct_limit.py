"""The size limit below which the direct algorithm beats the ring, from a group's link metrics.

The direct algorithm (native/src/plans.h) takes two one-way delays, the ring 2(W-1), but its streams compete for
each host's uplink. For a chunk of S/W bytes of each of W ranks:

    ring     2(W-1) steps of the larger of the slowest link's time for a chunk and the mean delay, and once the smaller
    direct   twice the longest delay, and twice the larger of the time of the busiest host and of the slowest link

A host is as fast as its fastest link. The master sends the limit with the ring, so that all peers choose alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pccl.protocol.link_metrics import LinkMetrics
from pccl.protocol.topology import ring_links

UNKNOWN = -1
"""No limit: links were not measured, or only one algorithm is possible. Ops are judged by size and world size."""
CROWDING = 1.1
"""Factor of the time for several streams on one uplink, as measured in a WAN lab."""
STEP_S = 5e-5
"""Seconds of a step without network delay."""
BITS_MIN, BITS_MAX = 12, 40
UNMEASURED_CHUNK_BYTES = 512 << 10
"""Largest chunk of a rank for direct ops with an UNKNOWN limit (pccl_algorithm_default in native/src/plans.c)."""
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
    """Whether the limit `found` differs enough from the current one to make the ring again."""
    if found == UNKNOWN:
        return False
    limits = (UNMEASURED_CHUNK_BYTES * world_size if in_force == UNKNOWN else in_force), found
    bits = [max(limit, 1 << BITS_MIN).bit_length() for limit in limits]
    return abs(bits[0] - bits[1]) >= OTHERWISE_BITS
