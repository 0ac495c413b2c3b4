"""Real machines under random faults and random delivery: whatever happens, everybody agrees and nobody hangs.

A schedule is a seed. It builds a world of a few peers in a few groups, does random things to it while delivering what
is under way in random order, lets the faults stop, and closes with calls that must all succeed. `checks` looks
at every step. A failure names its seed, which replays it:

    python -m tests.simulation.test_schedules SEED
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import ClassVar

import pytest

from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.node import Node
from tests.simulation.world import World

BLOCK = 50
"""Schedules of one test."""
SCHEDULES = 500
SLOW_SCHEDULES = 5_000
PEERS_MAX = 5
TAGS = (1, 2, 3)
CLOSING_TAGS = (11, 12)
"""Unused before: a verdict may have ended a use of the others that some peers have yet to make."""
STRATEGIES = ("enforce_popular", "enforce_popular", "enforce_popular", "receive_only", "send_only")


Action = Callable[["Schedule"], None]


class Schedule:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.world = World(self.rng)
        self.groups = self.rng.choice((1, 1, 1, 2, 2, 3))
        self.peers = self.rng.randint(2, PEERS_MAX) if self.rng.random() < 0.3 else PEERS_MAX
        self.calm = self.rng.uniform(0.5, 1.0)
        """How rare faults are."""
        self.uses = self.some_of(self.USES)
        self.faults = self.some_of(self.FAULTS)
        self.weak: tuple[Node, Node] | None = None
        """A pair whose link breaks again and again."""
        self.done: list[str] = []

    def some_of(self, actions: dict[Action, float]) -> dict[Action, float]:
        """Each schedule does more of this and nothing of that: together they reach more than an even mixture."""
        return {action: weight * self.rng.choice((0.01, 1, 1, 5)) for action, weight in actions.items()}

    def run(self) -> None:
        for _ in range(self.peers):
            self.add()
        if self.rng.random() < 0.8:
            self.world.admit_all()
        for _ in range(self.rng.randint(5, 80)):
            faulty = self.rng.random() > self.calm
            actions = self.faults if faulty else self.uses
            action = self.rng.choices(list(actions), list(actions.values()))[0]
            self.done.append(action.__name__)
            action(self)
            for _ in range(self.rng.choice((0, 1, 3, 10, 40, 100, 200))):
                self.world.step()
        self.close()

    def one(self) -> Node | None:
        nodes = self.world.accepted
        return self.rng.choice(nodes) if nodes else None

    # What users do.

    def add(self) -> None:
        while len(self.world.alive) < self.peers:
            self.world.add(self.rng.randrange(self.groups), self.rng.randint(1, 3))

    def leave(self) -> None:
        if (node := self.one()) and not node.is_frozen:
            self.world.leave(node)

    def launch(self, node: Node, tag: int) -> None:
        if not node.is_frozen and all(node.launched[op][0] != tag for op in node.open_ops):
            arguments = self.rng.choice([""] * 30 + ["other"])
            self.world.launch(node, tag, arguments, refused=self.rng.random() < 0.02)

    def launch_one(self) -> None:
        if node := self.one():
            self.launch(node, self.rng.choice(TAGS))

    def launch_all(self) -> None:
        nodes = self.world.accepted
        self.rng.shuffle(nodes)
        tag = self.rng.choice(TAGS)
        for node in nodes:
            if self.rng.random() < 0.95:
                self.launch(node, tag)

    def catch_up(self) -> None:
        """Everybody launches and calls what others wait for."""
        for node in self.world.accepted:
            for tag in {other.launched[op][0] for other in self.world.ring_nodes(node) for op in other.open_ops}:
                self.launch(node, tag)
            if not node.open_calls:
                waiting = [other.kinds[call] for other in self.world.accepted for call in other.open_calls]
                if waiting:
                    self.joint(node, waiting[0])

    def cancel(self) -> None:
        if (node := self.one()) and node.open_ops and not node.is_frozen:
            self.world.cancel(node, self.rng.choice(node.open_ops))

    def joint(self, node: Node, kind: str) -> None:
        if node.is_frozen or (node.open_calls and self.rng.random() < 0.9):
            return
        if kind == Kind.SYNC:
            if any(node.kinds[call] == Kind.SYNC for call in node.open_calls):
                return
            node.strategy = self.rng.choice(STRATEGIES)
            node.fails_to_fetch = self.rng.random() < 0.1
            if self.rng.random() < 0.6:
                node.revision += self.rng.randint(1, 3)
                node.root = self.rng.choice([b"a", b"b"])
        self.world.joint(node, kind)

    def joint_one(self) -> None:
        if node := self.one():
            self.joint(node, self.rng.choice(Kind.ALL))

    def joint_all(self, *kinds: str) -> None:
        nodes = self.world.accepted
        self.rng.shuffle(nodes)
        kind = self.rng.choice(kinds or Kind.ALL)
        for node in nodes:
            self.joint(node, kind)

    def update(self) -> None:
        if self.world.master.pending or self.rng.random() < 0.3:
            self.joint_all(Kind.UPDATE_TOPOLOGY)

    def sync(self) -> None:
        self.joint_all(Kind.SYNC)

    def optimize(self) -> None:
        for a in self.world.alive:
            for b in self.world.alive:
                self.world.costs[frozenset((a.name, b.name))] = self.rng.randint(1, 1000)
        self.joint_all(Kind.OPTIMIZE_TOPOLOGY)

    def cancel_joint(self) -> None:
        if (node := self.one()) and node.open_calls and not node.is_frozen:
            self.world.cancel_joint(node, self.rng.choice(node.open_calls))

    def wait(self) -> None:
        self.world.wait(self.rng.choice((0.1, 1.0, 3.0)))

    def rest(self) -> None:
        self.world.run()
        if not any(node.is_frozen for node in self.world.alive):
            self.world.check_rest()

    # Faults.

    def kill(self) -> None:
        if self.world.alive:
            self.world.kill(self.rng.choice(self.world.alive), self.rng.choice((0, 0, 1, 30, 1000)))

    def sever(self) -> None:
        if self.world.alive:
            self.world.sever(self.rng.choice(self.world.alive), self.rng.choice((0, 0, 1, 30)))

    def freeze(self) -> None:
        if self.world.alive:
            self.world.freeze(self.rng.choice(self.world.alive))

    def thaw(self) -> None:
        for node in self.world.alive:
            if node.is_frozen:
                self.world.thaw(node)

    def break_link(self) -> None:
        if (node := self.one()) and len(node.view.ring) > 1 and self.rng.random() < 0.5:
            self.weak = node, self.rng.choice([n for n in self.world.ring_nodes(node) if n is not node])
        if self.weak:
            self.world.break_link(*self.weak)

    def part(self) -> None:
        if len(self.world.alive) > 1:
            a, b = self.rng.sample(self.world.alive, 2)
            self.world.unreachable ^= {frozenset((a.name, b.name))}

    def mend(self) -> None:
        self.world.unreachable.clear()

    def long_wait(self) -> None:
        self.world.wait(self.rng.choice((11.0, 95.0)))

    USES: ClassVar[dict[Action, float]] = {
        add: 8,
        leave: 0.5,
        launch_one: 3,
        launch_all: 12,
        catch_up: 10,
        cancel: 1,
        joint_one: 1,
        joint_all: 1,
        update: 12,
        sync: 5,
        optimize: 2,
        cancel_joint: 0.5,
        wait: 1,
        rest: 4,
        thaw: 8,
    }
    FAULTS: ClassVar[dict[Action, float]] = {
        kill: 3,
        sever: 0.5,
        freeze: 2,
        thaw: 2,
        break_link: 6,
        part: 2,
        mend: 2,
        long_wait: 0.5,
    }

    # The end.

    def close(self) -> None:
        """Faults have stopped: what everybody does now must succeed."""
        world = self.world
        world.unreachable.clear()
        self.thaw()
        world.run()
        world.check_rest()
        for node in world.accepted:
            for call in node.open_calls:
                world.cancel_joint(node, call)
            for op in node.open_ops:
                world.cancel(node, op)
        world.run()
        world.check_rest()
        for node in world.nodes:
            if node.is_alive:
                assert not node.open_ops, f"{node} waits for ops it has cancelled"
                assert not node.open_calls, f"{node} waits for calls it has cancelled"
        while world.master.pending:
            self.all_succeed(lambda node: world.joint(node, Kind.UPDATE_TOPOLOGY))
        for tag in CLOSING_TAGS:
            for node in self.rng.sample(world.accepted, len(world.accepted)):
                world.launch(node, tag)
        world.run()
        for node in world.accepted:
            codes = [node.result(op) for op in list(node.launched)[-2:]]
            assert codes == [Result.SUCCESS if node.view.world_size > 1 else Result.TOO_FEW_PEERS] * 2
        for node in world.accepted:
            node.strategy, node.fails_to_fetch = "enforce_popular", False
        self.all_succeed(lambda node: world.joint(node, Kind.SYNC))
        self.all_succeed(lambda node: world.joint(node, Kind.OPTIMIZE_TOPOLOGY))
        self.all_succeed(lambda node: world.joint(node, Kind.ARE_PEERS_PENDING))
        world.check_rest()
        for node in world.alive:
            world.leave(node)
        world.run()
        assert not world.master.accepted
        assert world.master.deadline() is None

    def all_succeed(self, call: Callable[[Node], int]) -> None:
        made = [(node, call(node)) for node in self.rng.sample(self.world.accepted, len(self.world.accepted))]
        self.world.run()
        for node, number in made:
            result = node.calls[number]
            assert result.code is Result.SUCCESS, f"{node}: {result}"


def play(seed: int) -> None:
    schedule = Schedule(seed)
    try:
        schedule.run()
    except BaseException as error:
        error.add_note(f"schedule {seed} did: {' '.join(schedule.done)}")
        error.add_note("the master's last words:\n" + "\n".join(schedule.world.log[-20:]))
        raise


def _seeds(first: int, count: int) -> list[range]:
    return [range(start, start + BLOCK) for start in range(first, first + count, BLOCK)]


@pytest.mark.parametrize("seeds", _seeds(0, SCHEDULES), ids=str)
def test_everybody_agrees_and_nobody_hangs(seeds: range) -> None:
    for seed in seeds:
        play(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", _seeds(SCHEDULES, SLOW_SCHEDULES), ids=str)
def test_everybody_agrees_and_nobody_hangs_in_many_more_schedules(seeds: range) -> None:
    for seed in seeds:
        play(seed)


def test_a_schedule_is_replayed_by_its_seed() -> None:
    def logs(seed: int) -> list[str]:
        schedule = Schedule(seed)
        schedule.run()
        return schedule.world.log

    assert logs(7) == logs(7) != logs(8)


if __name__ == "__main__":
    play(int(sys.argv[1]))
