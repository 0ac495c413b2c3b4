"""Find the best ring for the known link metrics. The computation uses NumPy arrays and runs in a worker thread.

Each link is rated by a latency and a *grade*: UNREACHABLE, UNKNOWN, or KNOWN and above, higher for faster links.
Rings are compared by their number of unreachable links, then of unknown links, then by the grade of the slowest known
link (higher is better), then by the sum of latencies.

For up to EXACT_PEERS_MAX peers the result is optimal: the Held-Karp dynamic program finds the cycle of least weight,
and a binary search over grades finds the fastest possible slowest link.

For more peers, a heuristic links peers greedily, best link first. It then replaces the worst link of the ring by
reordering or reversing segments. This is repeated with several caps on grades. Grades above the cap count as equal, so
that links of lower latency are preferred. Last, runs of up to RUN_PEERS_MAX peers are moved if it improves the ring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pccl.protocol.topology import RingProblem

Grades = npt.NDArray[np.int32]
Latencies = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]
Price = tuple[int, int, int, float]
"""Unreachable links, unknown links, the negative grade of the slowest known link, latency sum. Lower is better."""

UNREACHABLE, UNKNOWN, KNOWN = 0, 1, 2
GRADE_STEP = 1.05
"""Ratio of the rates of adjacent grades. Links of the same grade count as equally fast."""
RATE_MIN = 1e3
"""Lowest rate in bytes per second; slower links count as this fast."""
LATENCY_S_MAX = 60.0
EXACT_PEERS_MAX = 16
SEARCHED_PEERS_MAX = 2048
"""Larger rings are not optimized."""
GREEDY_CHUNK = 1 << 15
CONSIDERED_MAX = 128
SWEEPS_MAX = 12
RUN_PEERS_MAX = 3


@dataclass(frozen=True)
class _Links:
    grades: Grades
    latencies: Latencies

    @property
    def count(self) -> int:
        return len(self.grades)


def best_ring(problem: RingProblem) -> list[int]:
    """Return the peers of the problem's ring in the best order found, starting with the same peer. The given order
    stays unless another one is strictly better."""
    ring = list(problem.ring)
    if len(ring) < 3 or len(ring) > SEARCHED_PEERS_MAX:
        return ring
    return [ring[at] for at in best_order(*matrices(problem))]


def grade(bytes_per_s: float) -> int:
    return KNOWN + round(math.log(max(bytes_per_s, RATE_MIN) / RATE_MIN) / math.log(GRADE_STEP))


def matrices(problem: RingProblem) -> tuple[Grades, Latencies]:
    """Return the links' grades and latencies, indexed by the sender's and the receiver's position in the ring. Links
    that the problem does not contain are UNKNOWN."""
    count = len(problem.ring)
    place = {peer: at for at, peer in enumerate(problem.ring)}
    grades = np.full((count, count), UNKNOWN, dtype=np.int32)
    latencies = np.zeros((count, count))
    if problem.between_hosts:
        hosts = np.asarray(problem.hosts)
        host_grades = np.full((hosts.max() + 1, hosts.max() + 1), UNKNOWN, dtype=np.int32)
        host_latencies = np.zeros(host_grades.shape)
        for pair, (bytes_per_s, latency_s) in problem.between_hosts.items():
            host_grades[pair] = grade(bytes_per_s)
            host_latencies[pair] = min(latency_s, LATENCY_S_MAX)
        grades, latencies = host_grades[np.ix_(hosts, hosts)], host_latencies[np.ix_(hosts, hosts)]
    for (sender, receiver), (bytes_per_s, latency_s) in problem.links.items():
        at = place[sender], place[receiver]
        grades[at] = grade(bytes_per_s)
        latencies[at] = min(latency_s, LATENCY_S_MAX)
    for sender, receiver in problem.unreachable:
        grades[place[sender], place[receiver]] = UNREACHABLE
    return grades, latencies


def best_order(grades: Grades, latencies: Latencies) -> list[int]:
    """Return the best order of positions, starting with position 0, as `best_ring` does for peers."""
    links = _Links(grades, np.where(grades >= KNOWN, latencies, 0.0))
    present = list(range(links.count))
    if links.count < 3:
        return present
    found = _exact(links) if links.count <= EXACT_PEERS_MAX else _heuristic(links)
    at = found.index(0)
    found = found[at:] + found[:at]
    assert sorted(found) == present
    # If both directions are equally good, always choose the same one.
    found = min(found, [0, *reversed(found[1:])], key=lambda order: (_price(links, order), order))
    return found if _price(links, found) < _price(links, present) else present


def price(grades: Grades, latencies: Latencies, order: Sequence[int]) -> Price:
    return _price(_Links(grades, np.where(grades >= KNOWN, latencies, 0.0)), order)


def _price(links: _Links, order: Sequence[int]) -> Price:
    senders, receivers = np.asarray(order), np.roll(order, -1)
    used = links.grades[senders, receivers]
    known = used[used >= KNOWN]
    total_s = round(float(links.latencies[senders, receivers].sum()), 9)
    slowest = int(known.min()) if len(known) else 0
    return int((used == UNREACHABLE).sum()), int((used == UNKNOWN).sum()), -slowest, total_s


# Exact search.


def _exact(links: _Links) -> list[int]:
    """Return the optimal order. The weight of a known link is its latency. An unknown link outweighs all latencies, and
    an unreachable link outweighs all unknown ones."""
    unknown = LATENCY_S_MAX * (links.count + 1)
    unreachable = unknown * (links.count + 1)
    weights = np.where(links.grades == UNREACHABLE, unreachable, links.latencies)
    weights = np.where(links.grades == UNKNOWN, unknown, weights)
    total, best = _least_cycle(weights)
    bad = total // unknown
    steps = np.unique(links.grades[links.grades >= KNOWN])
    low, high = 0, len(steps)
    while high - low > 1:
        middle = (low + high) // 2
        is_slow = (links.grades >= KNOWN) & (links.grades < steps[middle])
        total, order = _least_cycle(np.where(is_slow, np.inf, weights))
        if total // unknown == bad:
            low, best = middle, order
        else:
            high = middle
    return best


def _least_cycle(weights: npt.NDArray[np.float64]) -> tuple[float, list[int]]:
    """Return the cost and the order of the cheapest directed cycle through all nodes, or the cost inf if there is no
    cycle. Held-Karp: for each set of nodes, by size, find the cheapest path from the last node through the set to each
    member."""
    rest = len(weights) - 1
    between, first, last = weights[:rest, :rest], weights[rest, :rest], weights[:rest, rest]
    cheapest = np.full((1 << rest, rest), np.inf)
    for end in range(rest):
        cheapest[1 << end, end] = first[end]
    for sets in _sets_by_size(rest)[2:]:
        for end in range(rest):
            with_end = sets[(sets >> end) & 1 == 1]
            cheapest[with_end, end] = (cheapest[with_end ^ (1 << end)] + between[:, end]).min(axis=1)
    left = (1 << rest) - 1
    ends = cheapest[left] + last
    end = int(ends.argmin())
    total = float(ends[end])
    order = [end]
    while len(order) < rest:
        left ^= 1 << end
        end = int((cheapest[left] + between[:, end]).argmin())
        order.append(end)
    return total, [rest, *reversed(order)]


@lru_cache(maxsize=4)
def _sets_by_size(count: int) -> list[npt.NDArray[np.int64]]:
    sets = np.arange(1 << count)
    sizes = sum(((sets >> bit) & 1 for bit in range(count)), np.zeros_like(sets))
    return [sets[sizes == size] for size in range(count + 1)]


# Heuristic search.


def _heuristic(links: _Links) -> list[int]:
    best = _with_cap(links, int(links.grades.max()))
    slowest = -_price(links, best)[2]
    # No ring is faster than the best link into or out of any of its nodes.
    fastest = np.minimum(links.grades.max(axis=0), links.grades.max(axis=1))
    bound = int(fastest[fastest >= KNOWN].min(initial=links.grades.max()))
    low, high = slowest, max(bound, slowest) + 1
    cap = low
    while True:
        order = _with_cap(links, cap)
        if _price(links, order) < _price(links, best):
            best = order
        if -_price(links, order)[2] >= cap:
            low = max(low, cap)
        else:
            high = min(high, cap)
        if high - low <= 1:
            return _shortened(links, best)
        cap = (low + high) // 2


def _with_cap(links: _Links, cap: int) -> list[int]:
    capped = np.minimum(links.grades, cap)
    return _mended(capped, _greedy(capped, links.latencies))


def _greedy(grades: Grades, latencies: Latencies) -> list[int]:
    count = len(grades)
    ranked = np.lexsort((latencies.ravel(), -grades.ravel()))
    followed_by = np.full(count, -1)
    is_entered = np.zeros(count, dtype=bool)
    ends = list(range(count))
    """For each node that is the end of a path, the path's other end."""
    joined = 0
    for start in range(0, len(ranked), GREEDY_CHUNK):
        chunk = ranked[start : start + GREEDY_CHUNK]
        senders, receivers = np.divmod(chunk, count)
        may = (followed_by[senders] < 0) & ~is_entered[receivers] & (senders != receivers)
        for sender, receiver in zip(senders[may].tolist(), receivers[may].tolist(), strict=True):
            if followed_by[sender] >= 0 or is_entered[receiver] or ends[sender] == receiver:
                continue
            followed_by[sender], is_entered[receiver] = receiver, True
            head, tail = ends[sender], ends[receiver]
            ends[head], ends[tail] = tail, head
            joined += 1
        if joined == count - 1:
            break
    order = [int(np.flatnonzero(~is_entered)[0])]
    while len(order) < count:
        order.append(int(followed_by[order[-1]]))
    return order


def _mended(grades: Grades, order: list[int]) -> list[int]:
    """Replace the worst links with better ones while possible. Each replacement removes links of one grade and adds
    only better ones, so this terminates."""
    places = np.asarray(order)
    stuck: set[tuple[int, int]] = set()
    while len(stuck) < len(places):
        used = grades[places, np.roll(places, -1)]
        for at in np.argsort(used, kind="stable").tolist():
            link = int(places[at]), int(places[at + 1 - len(places)])
            if link not in stuck:
                break
        better = _exchanged(grades, np.roll(places, -1 - at), int(used[at]))
        if better is not None:
            places = better
        elif used[at] >= KNOWN:
            break
        else:
            stuck.add(link)
    return [int(place) for place in places]


def _exchanged(grades: Grades, order: Places, above: int) -> Places | None:
    """Return an order that avoids the link from the last node to the first, with new links of higher grades than
    `above` only. Return None if the search finds none."""
    # A B C becomes A C B, which adds the links from A to C, from C to B and from B to A.
    ends_of_a = _highest(grades[order[-1], order[1:-1]], above)
    ends_of_b = _highest(grades[order[:-1], order[0]], above)
    lowest = np.where(
        ends_of_a[:, None] < ends_of_b[None, :],
        grades[np.ix_(order[ends_of_a], order[ends_of_b + 1])],
        UNREACHABLE,
    )
    if lowest.size:
        at = np.unravel_index(int(lowest.argmax()), lowest.shape)
        if lowest[at] > above:
            a, b = int(ends_of_a[at[0]]) + 1, int(ends_of_b[at[1]]) + 1
            return np.concatenate((order[:a], order[b:], order[a:b]))
    # Reverse a prefix of the order.
    turned = np.minimum.accumulate(grades[order[1:-1], order[:-2]])
    lowest = np.minimum(turned, np.minimum(grades[order[-1], order[1:-1]], grades[order[0], order[2:]]))
    last = int(lowest.argmax()) + 1
    if lowest[last - 1] > above:
        return np.concatenate((order[last::-1], order[last + 1 :]))
    return None


def _highest(grades: Grades, above: int) -> Places:
    found = np.flatnonzero(grades > above)
    if len(found) > CONSIDERED_MAX:
        found = found[np.argsort(-grades[found], kind="stable")[:CONSIDERED_MAX]]
    return found


def _shortened(links: _Links, order: list[int]) -> list[int]:
    slowest = -_price(links, order)[2]
    outweighing = LATENCY_S_MAX * (links.count + 1)
    weights = np.where(links.grades < max(slowest, KNOWN), outweighing, links.latencies)
    for _ in range(SWEEPS_MAX):
        is_shorter = False
        for run in range(1, RUN_PEERS_MAX + 1):
            moved = _moved(weights, order, run)
            if _price(links, moved) < _price(links, order):
                order, is_shorter = moved, True
        if not is_shorter:
            break
    return order


def _moved(weights: npt.NDArray[np.float64], order: list[int], run: int) -> list[int]:
    count = len(order)
    peers = np.asarray(order)
    before, after = np.roll(peers, 1), np.roll(peers, -run)
    """The nodes before and after the run that starts at each node."""
    last = np.roll(peers, 1 - run)
    following = np.roll(peers, -1)
    gains = weights[before, peers] + weights[last, after] - weights[before, after]
    costs = weights[peers[:, None], peers[None, :]].T + weights[np.ix_(last, following)]
    costs -= weights[peers, following][None, :]
    # Do not insert a run between its own nodes or where it already is.
    for shift in range(-1, run):
        costs[np.arange(count), (np.arange(count) + shift) % count] = np.inf
    best = costs.argmin(axis=1)
    gains = gains - costs[np.arange(count), best]
    next_of = dict(zip(order, following.tolist(), strict=True))
    touched: set[int] = set()
    for at in np.argsort(-gains, kind="stable"):
        if not gains[at] > 1e-12:
            break
        members = [order[(at + offset) % count] for offset in range(run)]
        left, right = int(before[at]), int(after[at])
        sender, receiver = order[best[at]], int(following[best[at]])
        concerned = {*members, left, right, sender, receiver}
        if not touched.isdisjoint(concerned):
            continue
        touched |= concerned
        next_of[left] = right
        next_of[sender], next_of[members[-1]] = members[0], receiver
    found = [order[0]]
    while len(found) < count:
        found.append(next_of[found[-1]])
    return found
