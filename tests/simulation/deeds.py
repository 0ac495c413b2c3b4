"""The base of all that the steps of a plan do to a run: chance, and the choice of the nodes that a step concerns."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.simulation.master_host import MasterHost
from tests.simulation.node import Node
from tests.simulation.plan import Plan
from tests.simulation.world import World


class Deeds:
    def __init__(self, plan: Plan, world: World, rng: random.Random) -> None:
        self.plan = plan
        self.rng = rng
        self.world = world
        self.weak: tuple[Node, Node] | None = None
        """A pair whose link breaks again and again."""
        self.between: Callable[[], None] | None = None
        """Something that may happen between any two deliveries that follow a step."""
        self.is_streaming = False
        """It does not depend on anything being under way."""

    def one(self) -> Node | None:
        nodes = self.world.accepted
        return self.rng.choice(nodes) if nodes else None

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def _some(self) -> Node | None:
        return self.rng.choice(self.world.alive) if self.world.alive else None

    def _runs(self, node: Node) -> bool:
        """Whether a node is neither dead nor stopped, as it may be since it was chosen."""
        return node.is_reachable and not node.is_frozen

    def _pair(self) -> tuple[Node, Node] | None:
        return tuple(self.rng.sample(self.world.alive, 2)) if len(self.world.alive) > 1 else None  # type: ignore

    def _host(self) -> MasterHost:
        return self.rng.choice(self.world.hosts)
