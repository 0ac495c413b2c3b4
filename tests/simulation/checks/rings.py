"""The check of ring searches: no ring is better for what is known, tried out where there are few peers."""

from __future__ import annotations

from itertools import permutations

from pccl.protocol.topology import RingProblem
from pccl.runtime.master.ring_search import matrices, price

TRIED_OUT_PEERS_MAX = 6


def check_ring(problem: RingProblem, ring: list[int]) -> None:
    assert sorted(ring) == sorted(problem.ring)
    if not 3 <= len(ring) <= TRIED_OUT_PEERS_MAX:
        return
    grades, latencies = matrices(problem)
    order = [problem.ring.index(peer) for peer in ring]
    for rival in permutations(range(1, len(ring))):
        assert price(grades, latencies, order) <= price(grades, latencies, [0, *rival]), f"not {ring}: {problem}"
