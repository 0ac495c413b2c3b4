"""Chooses the peers to disturb. It does no I/O; time and generator are arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias, get_args

from pccl.tools.stress.plan import Doing, Interval, Plan

AIM_CHANCE = 0.5
"""The chance that a peer is hit at the start of a chosen activity instead of at any time."""
EXTINCTION_CHANCE = 0.1
"""The chance that even the last peer may be removed, if others may join."""
AIMS: tuple[Doing, ...] = tuple(doing for doing in get_args(Doing) if doing not in ("starting", "resting", "leaving"))


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
