"""Alignment of the peers' clocks.

The *shift* of a peer's monotonic clock is added to its times. It is bounded by

1. the clock's name: processes on one machine share a clock and need no shift;
2. timestamps that the master exchanged with each peer (`runtime.master.requests`) or, for files, the wall clocks;
3. the ops: none ends on a peer before all peers have launched it, which bounds the shift to microseconds.

The shift is the middle of the interval that all bounds allow. If the bounds contradict each other, for example because
one clock runs faster, fewer and fewer of the most recent ops are used, and finally only the timestamps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pccl.flight_recorder import PeerTrace, Recording, Trace

WALL_CLOCK_NS = 10 * 10**9
"""The assumed maximum difference between two hosts' wall clocks."""
OPS_COMPARED = 1024
"""The number of recent ops to compare between two clocks."""
OPS_COMPARED_MIN = 4
CLOCKS_COMPARED = 8
OF_ALL = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier"})
"""Kinds of op that end only after all peers have launched them."""

Times = dict[tuple[int, int, int, int], tuple[int, int]]
"""For each op, the last launch on a clock, and the first time when all launches were known (0: never)."""


@dataclass(frozen=True)
class Shift:
    """What to add to the times of one clock."""

    shift_ns: int
    uncertainty_ns: int
    source: str
    """The source of the shift: "same clock", "timestamps" or "calendar", plus " and ops" if ops have narrowed it."""


def shifts(trace: Trace) -> dict[int, Shift]:
    by_clock: dict[str, list[PeerTrace]] = defaultdict(list)
    for peer in trace.peers:
        if peer.recording is not None:
            by_clock[peer.recording.clock].append(peer)
    if not by_clock:
        return {}
    is_measured = any(peer.offset_ns is not None for peer in trace.peers)
    reference = trace.clock  # the master's
    if not is_measured:
        reference = max(by_clock, key=lambda clock: (len(by_clock[clock]), clock))
    times = {clock: _times(peers) for clock, peers in by_clock.items()}
    placed: dict[str, Shift] = {}
    if reference in by_clock:
        placed[reference] = Shift(0, 0, "same clock")
    base = by_clock[reference][0].recording if reference in by_clock else None
    for clock in sorted(by_clock.keys() - placed.keys(), key=lambda clock: (-len(by_clock[clock]), clock)):
        known = _known(by_clock[clock], base)
        others = list(placed)[:CLOCKS_COMPARED]
        placed[clock] = _narrowed(known, [(placed[other], times[other]) for other in others], times[clock])
    return {peer.peer: placed[clock] for clock, peers in by_clock.items() for peer in peers}


def _known(peers: Sequence[PeerTrace], base: Recording | None) -> Shift:
    measured = [peer for peer in peers if peer.offset_ns is not None]
    if measured:
        best = min(measured, key=lambda peer: peer.uncertainty_ns)
        assert best.offset_ns is not None
        return Shift(-best.offset_ns, best.uncertainty_ns, "timestamps")
    own = peers[0].recording
    assert own is not None
    base = base or own
    shift_ns = (own.taken_unix_ns - own.taken_ns) - (base.taken_unix_ns - base.taken_ns)
    return Shift(shift_ns, WALL_CLOCK_NS, "calendar")


def _times(peers: Iterable[PeerTrace]) -> Times:
    found: Times = {}
    for peer in peers:
        assert peer.recording is not None
        for op in peer.recording.ops:
            if op.epoch:
                name = peer.recording.group, *op.name
                launched_ns, done_ns = found.get(name, (0, 0))
                known_ns = op.done_ns if op.kind in OF_ALL else op.agreed_ns
                found[name] = max(launched_ns, op.launched_ns), min(filter(None, (done_ns, known_ns)), default=0)
    return found


def _narrowed(known: Shift, others: Sequence[tuple[Shift, Times]], own: Times) -> Shift:
    pairs = []
    for other, times in others:
        common = sorted(own.keys() & times.keys(), key=lambda name: own[name][0], reverse=True)[:OPS_COMPARED]
        pairs.append((other.shift_ns, [(own[name], times[name]) for name in common]))
    room_ns = known.uncertainty_ns + max((other.uncertainty_ns for other, _ in others), default=0)
    count = max((len(ops) for _, ops in pairs), default=0)
    while count >= OPS_COMPARED_MIN:
        low, high = widest = known.shift_ns - room_ns, known.shift_ns + room_ns
        for shift_ns, ops in pairs:
            for (launched_ns, done_ns), (their_launched_ns, their_done_ns) in ops[:count]:
                if done_ns:
                    low = max(low, shift_ns + their_launched_ns - done_ns)
                if their_done_ns:
                    high = min(high, shift_ns + their_done_ns - launched_ns)
        if (low, high) == widest:
            break
        if low <= high:
            return Shift((low + high) // 2, (high - low) // 2 + 1, f"{known.source} and ops")
        count //= 2
    return known
