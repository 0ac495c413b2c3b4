"""Alignment of the peers' clocks.

The *shift* of a peer's monotonic clock is added to its times. It is bounded by

1. the name of the clock: processes of one machine share one, and need no shift;
2. timestamps that the master exchanged with each peer (`runtime.master.requests`); for files, the hosts' wall clocks;
3. the ops: no peer is done before all have launched, which bounds the shift to microseconds.

The shift is the middle of the interval that all bounds allow. If they contradict each other, as when one clock runs
faster, only the last ops count, and then the timestamps alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pccl.flight_recorder import OpRecord, PeerTrace, Recording, Trace

WALL_CLOCK_NS = 10 * 10**9
"""Assumed limit of the difference between two hosts' wall clocks."""
OPS_COMPARED = 1024
"""Number of ops, the last ones, that are compared between two clocks."""
OPS_COMPARED_MIN = 4
CLOCKS_COMPARED = 8
"""Number of clocks that another one is compared with."""
OF_ALL = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier"})
"""Kinds of op that end only after all peers have launched them."""

Bounds = tuple[int, int]
Name = tuple[int, int, int, int]


@dataclass(frozen=True)
class Shift:
    """What to add to the times of one clock."""

    shift_ns: int
    uncertainty_ns: int
    source: str
    """How it is known: "same clock", "timestamps", "calendar", and with " and ops" where these have narrowed it."""


@dataclass(frozen=True)
class _Seen:
    """The times of an op on all peers of one clock."""

    launched_ns: int
    """The last launch."""
    done_ns: int
    """The first time when one of them knew that all had launched it; 0: none."""
    met: tuple[tuple[int, int], ...] = ()
    """Peers, and the times when they were known to have launched it."""
    launches: tuple[tuple[int, int], ...] = ()


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
    seen = {clock: _seen(peers) for clock, peers in by_clock.items()}
    placed: dict[str, Shift] = {}
    if reference in by_clock:
        placed[reference] = Shift(0, 0, "same clock")
    base = by_clock[reference][0].recording if reference in by_clock else None
    for clock in sorted(by_clock.keys() - placed.keys(), key=lambda clock: (-len(by_clock[clock]), clock)):
        known = _known(by_clock[clock], base)
        others = list(placed)[:CLOCKS_COMPARED]
        placed[clock] = _narrowed(known, [(placed[other], seen[other]) for other in others], seen[clock])
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


def _seen(peers: Iterable[PeerTrace]) -> dict[Name, _Seen]:
    found: dict[Name, list[tuple[int, OpRecord]]] = defaultdict(list)
    for peer in peers:
        assert peer.recording is not None
        for op in peer.recording.ops:
            if op.epoch:
                found[peer.recording.group, *op.name].append((peer.peer, op))
    return {name: _joined(ops) for name, ops in found.items()}


def _joined(ops: Sequence[tuple[int, OpRecord]]) -> _Seen:
    known = [op.done_ns if op.kind in OF_ALL else op.agreed_ns for _, op in ops]
    return _Seen(
        launched_ns=max(op.launched_ns for _, op in ops),
        done_ns=min((at_ns for at_ns in known if at_ns), default=0),
        met=tuple((op.joined_last, op.joined_ns) for _, op in ops if op.joined_ns and op.joined_last),
        launches=tuple((peer, op.launched_ns) for peer, op in ops),
    )


def _most(mine: _Seen, theirs: _Seen) -> int | None:
    """Return the upper bound of the difference of the other clock's shift to this one's, if the op gives one."""
    bounds = [mine.done_ns - theirs.launched_ns] if mine.done_ns else []
    launches = dict(theirs.launches)
    bounds += [at_ns - launches[peer] for peer, at_ns in mine.met if peer in launches]
    return min(bounds, default=None)


def _bounds(mine: dict[Name, _Seen], theirs: dict[Name, _Seen]) -> list[tuple[int | None, int | None]]:
    """Return the bounds of the difference of two shifts for each common op, the last one first."""
    names = sorted(mine.keys() & theirs.keys(), key=lambda name: mine[name].launched_ns, reverse=True)[:OPS_COMPARED]
    found = []
    for name in names:
        most, least = _most(mine[name], theirs[name]), _most(theirs[name], mine[name])
        found.append((None if least is None else -least, most))
    return found


def _narrowed(known: Shift, others: Sequence[tuple[Shift, dict[Name, _Seen]]], own: dict[Name, _Seen]) -> Shift:
    pairs = [(other, _bounds(seen, own)) for other, seen in others]
    count = max((len(bounds) for _, bounds in pairs), default=0)
    room_ns = known.uncertainty_ns + max((other.uncertainty_ns for other, _ in others), default=0)
    low, high = known.shift_ns - room_ns, known.shift_ns + room_ns
    while count >= OPS_COMPARED_MIN:
        within = _intersection(low, high, pairs, count)
        if within is not None and within != (low, high):
            shift_ns = sum(within) // 2
            return Shift(shift_ns, (within[1] - within[0]) // 2 + 1, f"{known.source} and ops")
        if within is not None:
            break
        count //= 2
    return known


def _intersection(
    low: int, high: int, pairs: Iterable[tuple[Shift, Sequence[tuple[int | None, int | None]]]], count: int
) -> Bounds | None:
    for other, bounds in pairs:
        for least, most in bounds[:count]:
            if least is not None:
                low = max(low, other.shift_ns + least)
            if most is not None:
                high = min(high, other.shift_ns + most)
    return (low, high) if low <= high else None
