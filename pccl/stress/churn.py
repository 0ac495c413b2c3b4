"""Decides whom to disturb, how and when. No I/O; time and the generator are arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias, get_args

from pccl.stress.messages import Doing
from pccl.stress.plan import Plan

TWICE_CHANCE = 0.15
"""The chance that two disturbances come at the same moment."""
AIM_CHANCE = 0.5
"""The chance that a peer is hit where it next begins to do something chosen, instead of at any moment."""
AIM_S_MAX = 0.03
"""The longest time from that beginning to the hit."""
AIM_FOR_S = 3.0
"""The longest time that a hit waits for its aim."""
EXTINCTION_CHANCE = 0.1
"""The chance that the last peer may go too, where others may join."""
AIMS: tuple[Doing, ...] = tuple(doing for doing in get_args(Doing) if doing not in ("starting", "resting", "leaving"))


@dataclass(frozen=True)
class Start:
    """A new peer."""

    group: int


@dataclass(frozen=True)
class Hit:
    """Kill a peer, or freeze it for a while: `delay_s` after it has begun to do `aim`, or now."""

    peer: int
    freeze_s: float | None
    """The time that the peer is frozen for; None: it is killed."""
    aim: Doing | None
    delay_s: float


@dataclass(frozen=True)
class Dismiss:
    """Have a peer leave."""

    peer: int


Action: TypeAlias = Start | Hit | Dismiss


class Churn:
    def __init__(self, plan: Plan, random: Random, now: float) -> None:
        self._plan = plan
        self._random = random
        self.next_at = now
        """When to call `disturb` again."""
        self._pause(now)

    def initial(self) -> list[Start]:
        return [Start(index % self._plan.groups) for index in range(self._plan.peers)]

    def disturb(self, now: float, running: int, doomed: int, targets: Sequence[int]) -> list[Action]:
        """Return what to do now. `running` counts all peers, `doomed` those of them that are about to end, `targets`
        are those that nothing is being done to."""
        self._pause(now)
        actions: list[Action] = []
        targets = list(targets)
        for _ in range(2 if self._random.random() < TWICE_CHANCE else 1):
            action = self._choose(running, doomed, targets)
            if isinstance(action, Start):
                running += 1
            elif action is not None:
                doomed += isinstance(action, Dismiss) or action.freeze_s is None
                targets.remove(action.peer)
            if action is not None:
                actions.append(action)
        return actions

    def _pause(self, now: float) -> None:
        every = self._plan.disturb_every
        self.next_at = now + self._random.uniform(every.least_s, every.most_s)

    def _choose(self, running: int, doomed: int, targets: Sequence[int]) -> Action | None:
        plan, random = self._plan, self._random
        # Where nobody joins, enough stay for there to be something to reduce.
        few = 2 if not plan.join else 1 if random.random() >= EXTINCTION_CHANCE else 0
        spare = max(0, running - doomed - few)
        weights = {
            "join": plan.join * (plan.peers_max - running),
            "kill": plan.kill * spare * bool(targets),
            "leave": plan.leave * spare * bool(targets) * 0.3,
            "freeze": plan.freeze * len(targets) * 0.5,
        }
        weights = {what: max(0.0, weight) for what, weight in weights.items()}
        if not any(weights.values()):
            return None
        what = random.choices(list(weights), weights=list(weights.values()))[0]
        if what == "join":
            return Start(random.randrange(plan.groups))
        peer = random.choice(targets)
        if what == "leave":
            return Dismiss(peer)
        freeze_s = random.uniform(plan.freeze_for.least_s, plan.freeze_for.most_s) if what == "freeze" else None
        aim = random.choice(AIMS) if random.random() < AIM_CHANCE else None
        return Hit(peer, freeze_s, aim, random.uniform(0, AIM_S_MAX) if aim is not None else 0.0)
