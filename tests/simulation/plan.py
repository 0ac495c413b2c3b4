"""Plans: how large a simulated run is, and what is done to it, one step after the other.

Each step has a seed of its own for the nodes that it concerns and in what order things are delivered after it, so a
plan goes on
making sense when steps are taken out: that is how `shrink` finds the few that matter. `Plan.of_seed` makes a plan of a
number; so does Hypothesis.
"""

from __future__ import annotations

import json
import random
from typing import NamedTuple

PEERS_MAX = 5
LARGE_PEERS_MAX = 9
"""The bound for one run in twenty."""
GROUPS_MAX = 3
MASTERS_MAX = 3
DELIVERIES = (0, 1, 3, 10, 40, 100, 300)
SEEDS = 2**16
"""The number of seeds that a step may have."""

USES = {
    "add": 8,
    "leave": 0.5,
    "launch_one": 3,
    "launch_all": 20,
    "launch_pair": 8,
    "catch_up": 14,
    "cancel": 1,
    "give_up": 1,
    "group_call_by_one": 1,
    "group_call_by_all": 1,
    "update": 12,
    "sync": 5,
    "optimize": 2,
    "cancel_group_call": 0.5,
    "interrupt": 0.5,
    "impatience": 1.5,
    "wait": 1,
    "rest": 4,
    "thaw": 8,
    "heal": 3,
    "thaw_master": 3,
}
"""What users do, each step with its weight in a random plan."""
FAULTS = {
    "kill": 3,
    "sever": 0.5,
    "reset": 4,
    "reset_all": 1,
    "freeze": 2,
    "hang": 1,
    "thaw": 2,
    "break_link": 6,
    "break_connection": 3,
    "break_heartbeats": 0.5,
    "part": 2,
    "mend": 2,
    "block": 1,
    "cut": 1,
    "block_master": 1,
    "cut_master": 1,
    "isolate": 1,
    "heal": 3,
    "slow": 1,
    "quicken": 0.5,
    "freeze_master": 0.15,
    "thaw_master": 0.3,
    "kill_master": 0.1,
    "long_wait": 1.5,
    "open_hole": 1,
    "slow_node": 1,
    "quick_wait": 1,
    "slow_wait": 0.5,
    "stop_within": 1.5,
    "kill_within": 1.5,
}
"""What happens to peers, networks and clocks."""
FAILOVERS = {
    "kill_master": 3,
    "restart_master": 5,
    "replace_master": 3,
    "freeze_master": 1,
    "thaw_master": 2,
    "cut_master_off": 1,
    "split": 2,
    "wedge_master": 1,
    "bereave": 0.3,
    "stop_master_within": 1.5,
    "kill_master_within": 3,
    "slow_master": 0.5,
}
"""What happens to masters, where peers outlive them."""
REROUTES = {"reroute": 4.0, "reroute_all": 1.0}
"""What happens to the name behind which there are several masters."""
SCENES = {"late_engines": 1}
"""Several things at once that rarely meet by chance."""
SCENE_SHARE = 0.25
SCENES_MAX = 4
STREAM = "stream"
"""Callers launch op after op for a while, as most of a real run does: so they come while engines rest."""
STREAM_DELIVERIES = (100, 300, 1000)
STREAMS_MAX = 8
STREAMS_SHARE = 0.5
"""The share of plans for the engine that ships where callers do little else."""
ACTIONS = tuple(dict.fromkeys((*USES, *FAULTS, *FAILOVERS, *REROUTES, *SCENES)))

DRIFT = "drift"
"""The clocks of nodes and masters go at different rates."""
ONE_NAME = "one name"
"""All masters are behind one name, which leads each peer to one of them, now to this, now to that."""
TRAITS = (DRIFT, ONE_NAME)
DRIFT_SHARE = 0.3
ONE_NAME_SHARE = 0.3
FOUNDERS_SHARE = 0.3
"""The probability that several peers found the run together."""


class Step(NamedTuple):
    action: str
    seed: int
    deliveries: int


class Plan(NamedTuple):
    seed: int
    groups: int
    peers: int
    """The number of peers that live at a time, at most."""
    is_admitted: bool
    """The first peers are accepted before the steps begin."""
    steps: tuple[Step, ...]
    masters: int = 0
    """0: there is one, and the peers end with it. Otherwise there are that many, and others after them."""
    traits: tuple[str, ...] = ()
    """Those of `TRAITS` that the run's world has."""
    founders: int = 1
    """The number of peers that found a run together, unless a name leads each of them to another master."""

    @classmethod
    def of_seed(cls, seed: int, masters: int | None = None, traits: tuple[str, ...] | None = None) -> Plan:
        """Plans differ in their shares of steps: together they reach more than an even mixture."""
        rng = random.Random(seed)
        peers = rng.randint(2, PEERS_MAX) if rng.random() < 0.3 else PEERS_MAX
        if rng.random() < 0.05:
            peers = rng.randint(PEERS_MAX, LARGE_PEERS_MAX)
        calm = rng.uniform(0.3, 1.0)

        def some_of(actions: dict[str, float]) -> tuple[list[str], list[float]]:
            return list(actions), [weight * rng.choice((0.01, 1, 1, 5)) for weight in actions.values()]

        uses, faults = some_of(USES), some_of(FAULTS)
        drawn = rng.choice((0, 0, 1, 1, 2, 2, 2, 3))
        masters = drawn if masters is None else masters
        if traits is None:
            is_named_once = masters > 1 and rng.random() < ONE_NAME_SHARE
            traits = (DRIFT,) * (rng.random() < DRIFT_SHARE) + (ONE_NAME,) * is_named_once
        if masters:
            names, weights = some_of(FAILOVERS | REROUTES if ONE_NAME in traits else FAILOVERS)
            faults[0].extend(names)
            faults[1].extend(weights)
            uses[0].append("restart_master")
            uses[1].append(2)
        steps = []
        for _ in range(rng.randint(10, 140)):
            names, weights = faults if rng.random() > calm else uses
            steps.append(Step(rng.choices(names, weights)[0], rng.randrange(SEEDS), rng.choice(DELIVERIES)))
        groups = rng.choice((1, 1, 1, 2, 2, GROUPS_MAX))
        _put_in_scenes(steps, random.Random(f"scenes of {seed}"))
        chance = random.Random(f"founders {seed}")  # a stream of its own, so that the rest stays the same
        founders = chance.randint(2, peers) if chance.random() < FOUNDERS_SHARE else 1
        own_seed, is_admitted = rng.randrange(SEEDS), rng.random() < 0.9
        return cls(own_seed, groups, peers, is_admitted, tuple(steps), masters, traits, founders)

    def with_streams(self) -> Plan:
        """Return this plan, or one of streams of ops with some of its steps between them. Only the engine that ships
        does more in streams than in single ops: then callers come back while it rests."""
        rng = random.Random(f"streams of {self.seed}")
        if rng.random() >= STREAMS_SHARE:
            return self
        steps = []
        for _ in range(rng.randint(1, STREAMS_MAX)):
            steps.append(Step(STREAM, rng.randrange(SEEDS), rng.choice(STREAM_DELIVERIES)))
            steps.extend(rng.sample(self.steps, min(len(self.steps), rng.choice((0, 0, 1, 1, 2)))))
        return self._replace(steps=tuple(steps), seed=self.seed | 1)  # with a fast path

    def dumps(self) -> str:
        return json.dumps(self, separators=(",", ":"))

    @classmethod
    def loads(cls, text: str) -> Plan:
        parts = json.loads(text)
        *parts, masters, traits, founders = parts + [0, [], 1][len(parts) - 5 :]
        seed, groups, peers, is_admitted, steps = parts
        steps = tuple(Step(*step) for step in steps)
        return cls(seed, groups, peers, is_admitted, steps, masters, tuple(traits), founders)


def _put_in_scenes(steps: list[Step], rng: random.Random) -> None:
    if rng.random() < SCENE_SHARE:
        for _ in range(rng.randint(1, SCENES_MAX)):
            action = rng.choices(list(SCENES), list(SCENES.values()))[0]
            steps.insert(rng.randint(0, len(steps)), Step(action, rng.randrange(SEEDS), rng.choice(DELIVERIES)))
