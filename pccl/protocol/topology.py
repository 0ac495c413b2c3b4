"""Pure functions that determine rings and evictions from the present peers and the pairs whose links failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

EXACT_COVER_PEERS_MAX = 14
MESH_PEERS_MAX = 16
"""Groups up to this size link all pairs; larger groups would need too many connections."""


def updated_ring(ring: Sequence[int], members: Collection[int]) -> list[int]:
    """Return the ring for new members: remaining peers keep their order, and new ones are appended by number."""
    kept = [peer for peer in ring if peer in members]
    return kept + sorted(set(members).difference(kept))


def neighbours(ring: Sequence[int], peer: int) -> tuple[int, int]:
    """Return the peers before and after `peer`, or `peer` twice if it is alone."""
    at = ring.index(peer)
    return ring[at - 1], ring[(at + 1) % len(ring)]


def ring_links(ring: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(ring, [*ring[1:], ring[0]], strict=True)) if len(ring) > 1 else []


def ring_pairs(ring: Sequence[int]) -> set[tuple[int, int]]:
    return {pair(*link) for link in ring_links(ring)}


def linked_pairs(ring: Sequence[int]) -> set[tuple[int, int]]:
    """Return the unordered pairs that have a link: all pairs of a small group, ring neighbours in a large one."""
    return set(combinations(sorted(ring), 2)) if len(ring) <= MESH_PEERS_MAX else ring_pairs(ring)


def are_linked_on_demand(ring: Sequence[int], peer: int, other: int) -> bool:
    """Return whether two peers of a large group link only once one of them has a point-to-point op for the other."""
    return len(ring) > MESH_PEERS_MAX and {peer, other}.issubset(ring) and other not in neighbours(ring, peer)


def linked_peers(ring: Sequence[int], peer: int) -> list[int]:
    if peer not in ring:
        return []
    others = ring if len(ring) <= MESH_PEERS_MAX else neighbours(ring, peer)
    return sorted(set(others) - {peer})


def pair(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a < b else (b, a)


def fewest_evictions(
    failed: Iterable[tuple[int, int]],
    newcomers: Collection[int],
    evidence: Iterable[tuple[int, int]] = (),
) -> set[int]:
    """Return the smallest set of peers whose eviction leaves no failed pair: a minimum vertex cover.

    Among covers of equal size, prefer 1. those with the most newcomers; 2. peers in the most pairs of `failed`
    and of `evidence` (other pairs that seem to fail); 3. the highest numbers.
    Exact up to EXACT_COVER_PEERS_MAX peers, greedy beyond.
    """
    pairs = {pair(a, b) for a, b in failed if a != b}
    degrees = Counter(peer for each in pairs.union(pair(a, b) for a, b in evidence) for peer in each)
    involved = sorted({peer for each in pairs for peer in each})

    def guilt(cover: Collection[int]) -> tuple[int, int, list[int]]:
        return (
            sum(peer in newcomers for peer in cover),
            sum(degrees[peer] for peer in cover),
            sorted(cover, reverse=True),
        )

    if len(involved) <= EXACT_COVER_PEERS_MAX:
        for size in range(len(involved) + 1):
            covers = [
                set(chosen)
                for chosen in combinations(involved, size)
                if all(a in chosen or b in chosen for a, b in pairs)
            ]
            if covers:
                return max(covers, key=guilt)
    cover: set[int] = set()
    while pairs:
        worst = max(involved, key=lambda peer: (sum(peer in each for each in pairs), guilt([peer])))
        cover.add(worst)
        pairs = {each for each in pairs if worst not in each}
    return cover


Known = tuple[float, float]
"""Bytes per second and latency in seconds of one direction of a link."""


@dataclass(frozen=True)
class RingProblem:
    """A ring and the known links between its peers, as plain values that can be passed to another thread."""

    ring: tuple[int, ...]
    links: dict[tuple[int, int], Known]
    unreachable: frozenset[tuple[int, int]] = frozenset()
    hosts: tuple[int, ...] = ()
    """The number of each peer's host (from 0), in ring order; empty if each peer has its own host."""
    between_hosts: dict[tuple[int, int], Known] = field(default_factory=dict)
    """Metrics between hosts, for pairs that `links` lacks."""
