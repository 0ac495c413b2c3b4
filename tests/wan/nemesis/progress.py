"""Judges whether those that could go on did: no standstill where a majority is connected, no call that never returns.

Theory of operation. What was done to the world is known as *spans*: from when to when a fault lasted, and what it took
away. Between two changes of the world, of a process's first word and of its end included, it is *calm*. For each calm
time the hosts are known whose processes run and are not stopped, and the pairs that carry everything in both
directions. If there is a set of peers, more than half of all, all joined with each other and with one master
that runs, then one of them must end a step within GRACE of the beginning of that calm time, and again and again to its
end.

The grace comes from docs/failures.md, in units of `peer_timeout`, for what may all come one after the other:

    1    a peer, or the master, that fell silent is given up
    1/2  a link that carries no bytes is replaced, or its ends are evicted
    1    the next master waits for those that have not come
    3    where it looked like an outage of the master's own, those that are dead are left out
    +    SLACK_S for processes that start, on a machine that is busy with others

A master without a standby and without a record on disk waits for most of `master_timeout` where a peer is missing; that
comes on top where the master was started again.

A *hang* is a peer that runs, is not stopped, and reports no event for longer than any call may take: `master_timeout`
and the grace. It counts from the last change of the world as well, as everybody may wait for one that is stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from tests.wan.nemesis.checker import Violation
from tests.wan.nemesis.history import Event

SLACK_S = 10.0
TIMEOUTS = 5.5
PROGRESS = ("state", "trained")


@dataclass(frozen=True)
class Span:
    """What a fault took away, and from when to when."""

    label: str
    begin_s: float
    end_s: float
    hosts: frozenset[int]
    """The hosts whose lanes of the timeline show it."""
    cut: frozenset[tuple[int, int]] = frozenset()
    """Directed pairs of hosts between which not everything arrives in time."""
    frozen: frozenset[int] = frozenset()
    """Hosts whose process does not run, or not as it should."""


@dataclass(frozen=True)
class Life:
    """One process, from its start to its end."""

    name: str
    host: int
    begin_s: float
    end_s: float
    is_master: bool = False
    ready_s: float = 0.0
    """When it said its first word: a machine that is busy with others takes long to start a process."""


@dataclass(frozen=True)
class World:
    """Everything that was done, and the run's settings."""

    spans: Sequence[Span]
    lives: Sequence[Life]
    peer_hosts: Sequence[int]
    peer_timeout_s: float
    master_timeout_s: float
    waits_for_all: bool = False
    """Whether a master that is started again waits for `master_timeout`: it has no record and does not stand by."""
    begin_s: float = 0.0
    """When all were together."""
    end_s: float = 0.0
    """When the peers were asked to leave."""

    @property
    def grace_s(self) -> float:
        extra_s = self.master_timeout_s + self.peer_timeout_s if self.waits_for_all else 0.0
        return TIMEOUTS * self.peer_timeout_s + SLACK_S + extra_s

    @property
    def hang_s(self) -> float:
        return self.master_timeout_s + self.peer_timeout_s + self.grace_s


@dataclass
class Standstill:
    """The longest time between two steps, whatever the reason, for the summary."""

    seconds: float = 0.0
    at_s: float = 0.0
    per_peer: dict[str, float] = field(default_factory=dict)


def check(world: World, histories: Mapping[str, Sequence[Event]]) -> list[Violation]:
    return [*_standstills(world, histories), *_hangs(world, histories)]


def longest(world: World, histories: Mapping[str, Sequence[Event]]) -> Standstill:
    steps = sorted(event.at_s for history in histories.values() for event in history if event.kind in PROGRESS)
    moments = [world.begin_s, *(at for at in steps if world.begin_s < at < world.end_s), world.end_s]
    found = Standstill()
    for before, after in pairwise(moments):
        if after - before > found.seconds:
            found.seconds, found.at_s = after - before, before
    return found


def _standstills(world: World, histories: Mapping[str, Sequence[Event]]) -> Iterator[Violation]:
    hosts = {name: int(name.partition(".")[0]) for name in histories}
    for begin_s, end_s in calm_times(world):
        able = able_hosts(world, begin_s, end_s)
        if end_s - begin_s < world.grace_s or not able:
            continue
        # A grace again for everybody: one that has just lost a peer may need it, though no change follows.
        at = [begin_s]
        for name, history in histories.items():
            if hosts[name] in able:
                at += [event.at_s for event in history if event.kind in PROGRESS and begin_s < event.at_s < end_s]
        for before, after in pairwise([*sorted(at), end_s]):
            if after - before > world.grace_s:
                who = ", ".join(f"host {host}" for host in sorted(able))
                text = f"{who} can all reach each other and a master, and made no step for {after - before:.1f} s"
                yield Violation(before + world.grace_s, "progress", "", f"{text} (limit {world.grace_s:.1f} s)")


def calm_times(world: World) -> list[tuple[float, float]]:
    changes = {world.begin_s, world.end_s}
    for span in world.spans:
        changes |= {span.begin_s, span.end_s}
    for life in world.lives:
        changes |= {life.begin_s, life.ready_s, life.end_s}
    inside = sorted(at for at in changes if world.begin_s <= at <= world.end_s)
    return list(pairwise(inside))


def able_hosts(world: World, begin_s: float, end_s: float) -> frozenset[int]:
    """Return the largest set of hosts whose peers must go on in this calm time; empty if none is a majority."""
    now = (begin_s + end_s) / 2
    spans = [span for span in world.spans if span.begin_s <= now < span.end_s]
    frozen = {host for span in spans for host in span.frozen}
    cut = {pair for span in spans for pair in span.cut}
    lives = [life for life in world.lives if max(life.begin_s, life.ready_s) <= now < life.end_s]
    alive = [life for life in lives if life.host not in frozen]
    peers = sorted({life.host for life in alive if not life.is_master})
    masters = {life.host for life in alive if life.is_master}

    def are_joined(a: int, b: int) -> bool:
        return (a, b) not in cut and (b, a) not in cut

    least = len(world.peer_hosts) // 2 + 1
    for size in range(len(peers), max(least, 2) - 1, -1):
        for group in combinations(peers, size):
            if not all(are_joined(a, b) for a, b in combinations(group, 2)):
                continue
            # A master that hears some of them only, or is heard by them only, may lead them to no master.
            whole = {master for master in masters if all(are_joined(master, peer) for peer in group)}
            none = {
                master for master in masters if all((master, peer) in cut and (peer, master) in cut for peer in group)
            }
            if whole and whole | none == masters:
                return frozenset(group)
    return frozenset()


def _hangs(world: World, histories: Mapping[str, Sequence[Event]]) -> Iterator[Violation]:
    changes = sorted({at for span in world.spans for at in (span.begin_s, span.end_s)})
    lives = {life.name: life for life in world.lives if not life.is_master}
    for name, history in histories.items():
        life = lives.get(name)
        if life is None:
            continue
        end_s = min(life.end_s, world.end_s)
        moments = sorted([life.ready_s, *(event.at_s for event in history if event.kind != "leaving"), *changes, end_s])
        moments = [at for at in moments if max(life.begin_s, life.ready_s) <= at <= end_s]
        for before, after in pairwise(moments):
            frozen = any(life.host in s.frozen and s.begin_s <= before < s.end_s for s in world.spans)
            if after - before > world.hang_s and not frozen:
                last = [event for event in history if event.at_s <= before]
                doing = last[-1].kind if last else "its start"
                text = f"no event for {after - before:.1f} s after {doing} (limit {world.hang_s:.1f} s)"
                yield Violation(before + world.hang_s, "hang", name, text)
