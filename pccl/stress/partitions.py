"""Decides who is cut off from whom, when, and for how long, and knows who is at any moment. No I/O; time and the
generator are arguments.

A *partition* blocks ways between processes, each named by its sender and its receiver: a peer's slot, or a master:
MASTER, and its standbys below that. It is one of four kinds:

    pair    two peers
    peer    a peer and everybody else, masters too, as by pulling its cable
    master  a peer and one of the masters, or all
    half    some peers and the others; each master is on either side

in both directions or in one. A slot stays cut off when another peer starts in it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, TypeAlias

from pccl.stress.plan import Plan

MASTER = -1
AT_ONCE_MAX = 2
ONE_WAY_CHANCE = 0.25
"""The chance that only one way is blocked, for each of the two ways."""

Kind: TypeAlias = Literal["pair", "peer", "master", "half"]
WEIGHTS: dict[Kind, float] = {"pair": 4, "peer": 2, "master": 2, "half": 1}


@dataclass(frozen=True)
class Partition:
    """Ways that are blocked together."""

    kind: Kind
    island: frozenset[int]
    """The processes on one side."""
    blocked: frozenset[tuple[int, int]]
    """(sender, receiver) of each blocked way."""
    seconds: float

    @property
    def involved(self) -> frozenset[int]:
        """The slots on either side, without masters."""
        return frozenset(each for way in self.blocked for each in way if each > MASTER)

    def __str__(self) -> str:
        outwards = any(sender in self.island for sender, _ in self.blocked)
        inwards = any(receiver in self.island for _, receiver in self.blocked)
        way = "both ways" if outwards and inwards else "outwards" if outwards else "inwards"
        others = _names({each for pair in self.blocked for each in pair} - self.island)
        return f"partition ({self.kind}) for {self.seconds:.2f} s: {_names(self.island)} from {others}, {way}"


def _names(members: Collection[int]) -> str:
    return ", ".join(
        f"slot {each}" if each > MASTER else "the master" if each == MASTER else f"standby {MASTER - each}"
        for each in sorted(members)
    )


class Partitions:
    """The partitions of a run: those that are active, and when the next begins."""

    def __init__(self, plan: Plan, random: Random, now: float) -> None:
        self._plan = plan
        self._random = random
        self._masters = [MASTER - number for number in range(1 + plan.standbys)]
        self._healed_at: dict[Partition, float] = {}
        self.next_at = float("inf")
        """When to call `begin` again."""
        self._pause(now)

    @property
    def active(self) -> Collection[Partition]:
        return self._healed_at.keys()

    @property
    def heals_at(self) -> float:
        """When to call `heal` next."""
        return min(self._healed_at.values(), default=float("inf"))

    def begin(self, now: float, slots: Sequence[int]) -> Partition | None:
        """Begin a partition among peers in these slots and return it; None if there is to be none this time."""
        self._pause(now)
        if not slots or len(self._healed_at) >= AT_ONCE_MAX:
            return None
        random, duration = self._random, self._plan.partition_for
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
        seconds = random.uniform(duration.least_s, duration.most_s)
        made = Partition(kind, frozenset(island), frozenset(blocked), seconds)
        self._healed_at[made] = now + seconds
        return made

    def heal(self, now: float) -> list[Partition]:
        """End the partitions whose time is over, and return them."""
        healed = [partition for partition, at in self._healed_at.items() if now >= at]
        for partition in healed:
            del self._healed_at[partition]
        return healed

    def blocked_for(self, receiver: int) -> list[int]:
        """Return the senders whose packets the process in this slot, or this master, must not receive."""
        return sorted({sender for each in self.active for sender, other in each.blocked if other == receiver})

    def _pause(self, now: float) -> None:
        every = self._plan.partition
        if every is not None:
            self.next_at = now + self._random.uniform(every.least_s, every.most_s)


def may_be_lost(partition: Partition, groups: Mapping[int, int]) -> frozenset[int]:
    """Return the slots whose peers may lose their places by this partition, given the group of each peer that takes
    part in ops.

    1. Who is cut off from the master may lose its place, and nobody else: the master hears the others.
    2. Where one peer is cut off from all others it is that one alone: two neighbours miss it, and the master evicts as
       few as explain what is reported. In a ring of two it may be either.
    3. In all other cases it may be anybody on either side.
    """
    if partition.kind == "master":
        return partition.island
    if partition.kind == "peer":
        (slot,) = partition.island
        company = sum(group == groups.get(slot) for group in groups.values())
        return partition.island if company > 2 else partition.involved
    return partition.involved
