"""Straggler detection: finds silent, absent and straggling peers from heartbeats, waits and reports.

    silent      the peer has sent no heartbeat for several intervals (`SILENT_INTERVALS` of the master's server)
    absent      the peer has not made a call (op or group call) in which others have waited ABSENT_S, and no more peers
                are missing than wait
    straggler   in ROUNDS rounds in a row the peer spent at least FACTOR times as long between ops as the next slowest
                peer, and the others lost at least LOST_SHARE of their time by waiting for it

All peers of a group end an op together, so the peer that launches last spends the least time in it, and the others
wait for the difference. A round covers at least ROUND_S on each peer's own clock, and an op that all peers have ended.
A pause, such as a checkpoint or a compilation, affects only one round, so it causes no finding.

A silent peer stops all ops of its group, so there are no other findings for its group. Links are not judged
here: `Traffic` measures them. Everything here is pure: times are arguments, and decisions are return values.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import msgspec

from pccl.protocol.completion import callers_tag, ranks_of, tag_named
from pccl.protocol.messages import OpRef, Report
from pccl.protocol.names import NameOf
from pccl.protocol.status import Finding

SILENT, ABSENT, STRAGGLER = "silent", "absent", "straggler"
"""The kinds of finding."""
ABSENT_S = 30.0
FACTOR = 2.0
LOST_SHARE = 0.1
ROUNDS = 5
ROUND_S = 1.0
CLEAR_S = 4.0
"""Seconds without evidence after which a finding ends."""
STALE_S, STALE_ROUNDS = 10.0, 3.0
"""The last rounds stay valid for this many seconds or for this many lengths of the last round, whichever is longer."""
FRESH_S = 2.0
"""Maximum age in seconds of a report that proves that its peer still waits."""
ABSENT_NAMED_MAX = 8


@dataclass(frozen=True)
class GroupScene:
    group: int
    ring: Sequence[int]
    epoch: int
    is_running: bool
    waits: Mapping[str, tuple[float, int, Sequence[int]]] = field(default_factory=dict)
    """For each group call with waiting peers: the longest wait in seconds, number of waiting peers, missing peers."""
    stalled: Mapping[OpRef, Set[int]] = field(default_factory=dict)
    """Ops that peers have reported as stalled, each with the peers that wait in it."""


@dataclass
class _Open:
    finding: Finding
    since: float
    seen_at: float


class Stragglers:
    def __init__(self, name: NameOf = lambda peer: f"peer {peer}") -> None:
        self._name = name
        self._rounds: dict[int, _Rounds] = {}
        self._open: dict[tuple[str, int], _Open] = {}

    def reported(self, peer: int, group: int, report: Report, now: float) -> None:
        if group in self._rounds:
            self._rounds[group].reported(peer, report, now)

    def gone(self, peer: int) -> None:
        for key in [key for key in self._open if key[1] == peer]:
            del self._open[key]

    def judge(
        self, scenes: Iterable[GroupScene], silent_s: Mapping[int, float], now: float
    ) -> tuple[list[Finding], list[Finding]]:
        """Return the new findings and those that ended. `silent_s` maps each silent peer to its seconds of silence."""
        groups = {each.group: each for each in scenes}
        self._rounds = {group: rounds for group, rounds in self._rounds.items() if group in groups}
        begun, over = [], []
        for number, group in groups.items():
            rounds = self._rounds.get(number)
            if rounds is None or rounds.epoch != group.epoch or rounds.ring != tuple(group.ring):
                rounds = self._rounds[number] = _Rounds(tuple(group.ring), group.epoch)
            rounds.advance(now)
            for found in _found(group, rounds, silent_s, self._name, now):
                key = found.kind, found.peer
                if key not in self._open:
                    begun.append(found)
                    self._open[key] = _Open(found, now, now)
                self._open[key].finding, self._open[key].seen_at = found, now
        for key, known in list(self._open.items()):
            if now - known.seen_at >= CLEAR_S:
                del self._open[key]
                over.append(msgspec.structs.replace(known.finding, for_s=known.seen_at - known.since))
        return begun, over

    def findings(self, now: float) -> list[Finding]:
        return [msgspec.structs.replace(each.finding, for_s=now - each.since) for each in self._open.values()]


@dataclass(frozen=True)
class _Sample:
    received_at: float
    own_s: float
    ops: int
    in_ops_s: float
    op_wait_s: float


class _Rounds:
    """The reports from one group in one epoch, divided into comparable rounds."""

    def __init__(self, ring: tuple[int, ...], epoch: int) -> None:
        self.ring = ring
        self.epoch = epoch
        self.last: dict[int, _Sample] = {}
        self._edge: dict[int, _Sample] = {}
        self._slowest: deque[int | None] = deque(maxlen=ROUNDS)
        """For each of the last rounds, the peer that straggled, or None."""
        self._named: int | None = None
        self._shares = 0.0, 0.0
        """Shares of time that the two slowest peers spent between ops in the last round with a straggler."""
        self._valid_until = 0.0

    def reported(self, peer: int, report: Report, now: float) -> None:
        if peer not in self.ring:
            return
        ops = next((committed + aborted for epoch, committed, aborted in report.ops if epoch == self.epoch), 0)
        self.last[peer] = _Sample(now, report.at_ms / 1e3, ops, report.in_ops_ms / 1e3, report.op_wait_ms / 1e3)

    def advance(self, now: float) -> None:
        """End the current round if all peers have reported enough."""
        if len(self.ring) < 2 or len(self.last) < len(self.ring):
            return
        if not self._edge:
            self._edge = dict(self.last)
            return
        spans = {peer: sample.own_s - self._edge[peer].own_s for peer, sample in self.last.items()}
        if min(spans.values()) < ROUND_S or any(
            sample.ops <= self._edge[peer].ops for peer, sample in self.last.items()
        ):
            return
        between = {
            peer: 1 - min(1.0, max(0.0, sample.in_ops_s - self._edge[peer].in_ops_s) / spans[peer])
            for peer, sample in self.last.items()
        }
        self._edge = dict(self.last)
        self._valid_until = now + max(STALE_S, STALE_ROUNDS * max(spans.values()))
        if max(sample.op_wait_s for sample in self.last.values()) >= min(spans.values()):
            return  # one of the peer's threads always waits in an op, so its time in ops is not comparable
        peer = max(between, key=lambda each: between[each])
        own = between.pop(peer)
        rest = max(between.values())
        straggles = own >= FACTOR * rest and own - rest >= LOST_SHARE
        self._slowest.append(peer if straggles else None)
        if straggles:
            self._shares = own, rest

    def straggler(self, now: float) -> tuple[int, float, float] | None:
        """Return the straggler and the shares of time that it and the next slowest peer spend between ops.

        A peer is named once it has straggled in ROUNDS rounds in a row, until it straggles in none of the last ROUNDS.
        """
        if now >= self._valid_until:
            self._slowest.clear()
        if self._named not in self._slowest:
            is_full = len(self._slowest) == ROUNDS and len(set(self._slowest)) == 1
            self._named = self._slowest[0] if is_full else None
        return None if self._named is None else (self._named, *self._shares)


def _found(
    group: GroupScene, rounds: _Rounds, silent_s: Mapping[int, float], name: NameOf, now: float
) -> list[Finding]:
    silent = [
        Finding(SILENT, peer, group.group, f"{name(peer)} is silent: no heartbeat for {seconds:.1f} s")
        for peer, seconds in silent_s.items()
        if peer in group.ring
    ]
    if silent:
        return silent
    found = _absent_from_calls(group, name)
    if not group.is_running:
        return found
    found += _absent_from_ops(group, rounds, name, now)
    straggler = rounds.straggler(now)
    if straggler is not None:
        peer, own, rest = straggler
        text = (
            f"{name(peer)} straggles: it spends {own:.0%} of the time between ops, the next slowest peer {rest:.0%}; "
            "the others wait for it"
        )
        found.append(Finding(STRAGGLER, peer, group.group, text))
    return found


def _absent_from_calls(group: GroupScene, name: NameOf) -> list[Finding]:
    return [
        Finding(
            ABSENT,
            peer,
            group.group,
            f"{name(peer)} has not called {call}; {_peers(count)} waited in it for {seconds:.0f} s",
        )
        for call, (seconds, count, missing) in group.waits.items()
        if seconds >= ABSENT_S and len(missing) <= count
        for peer in missing[:ABSENT_NAMED_MAX]
    ]


def _absent_from_ops(group: GroupScene, rounds: _Rounds, name: NameOf, now: float) -> list[Finding]:
    """Return findings for the peers that have not called the op with the most waiters.

    If these peers wait in other ops, the program probably calls ops in different orders.
    """
    last = rounds.last
    if len(last) < len(group.ring):
        return []
    waiting = {op: peers & last.keys() for op, peers in group.stalled.items() if ranks_of(op.tag) is None}
    if not waiting:
        return []
    op = max(waiting, key=lambda each: len(waiting[each]))
    elsewhere = {peer: other for other, peers in waiting.items() if other != op for peer in peers}
    missing = [
        peer for peer in group.ring if peer not in waiting[op] and (peer in elsewhere or not last[peer].op_wait_s)
    ]
    waited_s = min(last[peer].op_wait_s if now - last[peer].received_at <= FRESH_S else 0.0 for peer in waiting[op])
    if waited_s < ABSENT_S or len(missing) > len(waiting[op]):
        return []
    found = []
    for peer in missing[:ABSENT_NAMED_MAX]:
        what = f"the op with {tag_named(callers_tag(op.tag))}"
        text = f"{name(peer)} has not called {what}; {_peers(len(waiting[op]))} waited in it for {waited_s:.0f} s"
        if peer in elsewhere:
            tag = tag_named(callers_tag(elsewhere[peer].tag))
            text += f"; it waits in the op with {tag}: do all peers call the same ops in the same order?"
        found.append(Finding(ABSENT, peer, group.group, text))
    return found


def _peers(count: int) -> str:
    return "1 other peer has" if count == 1 else f"{count} other peers have"
