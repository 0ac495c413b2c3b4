"""Chooses faults: peers to disturb, partitions, kills of masters. It does no I/O; time and generator are arguments.

A partition blocks directions between processes. A peer is identified by its slot, the master by MASTER, and standbys by
smaller numbers. A partition has one of four kinds:

    pair    between two peers
    peer    between a peer and all other processes including masters, as if its cable were pulled
    master  between a peer and one or all of the masters
    half    between some peers and the others, with each master on either side
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeAlias, get_args

from pccl.tools.stress.plan import Doing, Interval, Plan

AIM_CHANCE = 0.5
"""The chance that a peer is hit at the start of a chosen activity instead of at any time."""
EXTINCTION_CHANCE = 0.1
"""The chance that even the last peer may be removed, if others may join."""
AIMS: tuple[Doing, ...] = tuple(doing for doing in get_args(Doing) if doing not in ("starting", "resting", "leaving"))

MASTER = -1
PARTITIONS_AT_ONCE_MAX = 2
ONE_WAY_CHANCE = 0.25
"""For each of the two directions, the chance that only that direction is blocked."""
Kind: TypeAlias = Literal["pair", "peer", "master", "half"]
WEIGHTS: dict[Kind, float] = {"pair": 4, "peer": 2, "master": 2, "half": 1}


class Schedule:
    def __init__(self, every: Interval | None, random: Random, now: float) -> None:
        self._every = every
        self._random = random
        self.next_at = now + self._pause()

    def is_due(self, now: float) -> bool:
        """Return whether the next fault is due. If so, draw the time of the following one."""
        if now < self.next_at:
            return False
        self.next_at = now + self._pause()
        return True

    def _pause(self) -> float:
        every = self._every
        return float("inf") if every is None else self._random.uniform(every.least_s, every.most_s)


@dataclass(frozen=True)
class Start:
    group: int


@dataclass(frozen=True)
class Hit:
    """Kill or freeze a peer when it begins the activity `aim`, or immediately if that is None."""

    peer: int
    freeze_s: float | None
    """The duration of the freeze, or None to kill the peer."""
    aim: Doing | None


@dataclass(frozen=True)
class Dismiss:
    peer: int


Action: TypeAlias = Start | Hit | Dismiss


def disturbance(plan: Plan, random: Random, running: int, doomed: int, targets: Sequence[int]) -> Action | None:
    """Return the next fault. `doomed` of the `running` peers are about to end; `targets` are undisturbed."""
    least = 2 if not plan.join else 1 if random.random() >= EXTINCTION_CHANCE else 0
    spare = max(0, running - doomed - least)
    weights = {
        "join": max(0.0, plan.join * (plan.peers_max - running)),
        "kill": plan.kill * spare * bool(targets),
        "leave": plan.leave * spare * bool(targets) * 0.3,
        "freeze": plan.freeze * len(targets) * 0.5,
    }
    if not any(weights.values()):
        return None
    what = random.choices(list(weights), weights=list(weights.values()))[0]
    if what == "join":
        return Start(random.randrange(plan.groups))
    peer = random.choice(targets)
    if what == "leave":
        return Dismiss(peer)
    freeze_s = random.uniform(plan.freeze_for.least_s, plan.freeze_for.most_s) if what == "freeze" else None
    return Hit(peer, freeze_s, random.choice(AIMS) if random.random() < AIM_CHANCE else None)


@dataclass(frozen=True)
class Partition:
    kind: Kind
    island: frozenset[int]
    blocked: frozenset[tuple[int, int]]
    """The (sender, receiver) of each blocked direction."""
    seconds: float

    def __str__(self) -> str:
        blocked = ", ".join(f"{sender} to {receiver}" for sender, receiver in sorted(self.blocked))
        return f"partition ({self.kind}) for {self.seconds:.2f} s: {blocked}"


class Partitions:
    def __init__(self, plan: Plan, random: Random) -> None:
        self._duration = plan.partition_for
        self._random = random
        self._masters = [MASTER - number for number in range(1 + plan.standbys)]
        self._healed_at: dict[Partition, float] = {}

    @property
    def active(self) -> Collection[Partition]:
        return self._healed_at.keys()

    @property
    def heals_at(self) -> float:
        return min(self._healed_at.values(), default=float("inf"))

    def begin(self, now: float, slots: Sequence[int]) -> Partition | None:
        """Begin and return a partition among peers in these slots, or return None if there are already enough."""
        if not slots or len(self._healed_at) >= PARTITIONS_AT_ONCE_MAX:
            return None
        random = self._random
        kinds = [kind for kind in WEIGHTS if len(slots) > 1 or kind in ("peer", "master")]
        kind = random.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
        island = set(random.sample(list(slots), random.randint(1, max(1, len(slots) // 2)) if kind == "half" else 1))
        others = set(slots) - island
        if kind == "pair":
            others = {random.choice(sorted(others))}
        elif kind == "master":
            others = set(self._masters if random.random() < 0.5 else (random.choice(self._masters),))
        else:
            near = {master for master in self._masters if kind == "half" and random.random() < 0.5}
            island |= near
            others |= set(self._masters) - near
        outwards = {(a, b) for a in island for b in others}
        inwards = {(b, a) for a, b in outwards}
        chance = random.random()
        blocked = (
            outwards if chance < ONE_WAY_CHANCE else inwards if chance < 2 * ONE_WAY_CHANCE else outwards | inwards
        )
        seconds = random.uniform(self._duration.least_s, self._duration.most_s)
        made = Partition(kind, frozenset(island), frozenset(blocked), seconds)
        self._healed_at[made] = now + seconds
        return made

    def heal(self, now: float) -> list[Partition]:
        healed = [partition for partition, at in self._healed_at.items() if now >= at]
        for partition in healed:
            del self._healed_at[partition]
        return healed

    def blocked_for(self, receiver: int) -> list[int]:
        """Return the senders whose packets this process must not receive."""
        return sorted({sender for each in self.active for sender, other in each.blocked if other == receiver})
