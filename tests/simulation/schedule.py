"""Schedules: lists of steps that are done to a run, with deliveries between them.

A plan says how large the run is and what is done to it, one step after the other. Each step has a seed of its own for
whom it concerns and in what order things are delivered after it, so a plan goes on making sense when steps are taken
out: that is how `shrink` finds the few that matter. `Plan.of_seed` makes a plan of a number; so does Hypothesis.

When the steps are done, all faults stop. Then everything must come to rest in bounded time, whoever waits gets through
once the others do what he waits for, and closing calls all succeed. `checks` looks at every step before.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.master_host import MasterHost, Memory
from tests.simulation.node import Node
from tests.simulation.world import MASTER_TIMEOUT_S, World

PEERS_MAX = 5
LARGE_PEERS_MAX = 9
"""The bound for one run in twenty."""
GROUPS_MAX = 3
DELIVERIES = (0, 1, 3, 10, 40, 100, 300)
SEEDS = 2**16
"""The number of seeds that a step may have."""
TAGS = (1, 2, 3)
CLOSING_TAGS = (11, 12)
"""Unused before: a verdict may have ended a use of the others that some peers have yet to make."""
STRATEGIES = ("enforce_popular", "enforce_popular", "enforce_popular", "receive_only", "send_only")
LED_AGAIN_MAX = 3
"""The number of times that a run may be led once more, and lose its majority, after faults have stopped."""
SETTLED_AFTER_S = 30.0
"""All that faults have left behind is over by then."""
CATCH_UPS_MAX = 30
"""Rounds in which everybody does what others wait for. Each may end only one of several waits of each peer."""


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
    """0: there is one, and the peers end with it. Otherwise there are so many, and others after them."""

    @classmethod
    def of_seed(cls, seed: int, masters: int | None = None) -> Plan:
        """Each does more of this and nothing of that: together they reach more than an even mixture."""
        rng = random.Random(seed)
        peers = rng.randint(2, PEERS_MAX) if rng.random() < 0.3 else PEERS_MAX
        if rng.random() < 0.05:
            peers = rng.randint(PEERS_MAX, LARGE_PEERS_MAX)
        calm = rng.uniform(0.3, 1.0)

        def some_of(actions: dict[str, float]) -> tuple[list[str], list[float]]:
            return list(actions), [weight * rng.choice((0.01, 1, 1, 5)) for weight in actions.values()]

        uses, faults = some_of(Schedule.USES), some_of(Schedule.FAULTS)
        drawn = rng.choice((0, 1, 1, 2))
        masters = drawn if masters is None else masters
        if masters:
            names, weights = some_of(Schedule.FAILOVERS)
            faults[0].extend(names)
            faults[1].extend(weights)
            uses[0].append("restart_master")
            uses[1].append(2)
        steps = []
        for _ in range(rng.randint(10, 140)):
            names, weights = faults if rng.random() > calm else uses
            steps.append(Step(rng.choices(names, weights)[0], rng.randrange(SEEDS), rng.choice(DELIVERIES)))
        groups = rng.choice((1, 1, 1, 2, 2, GROUPS_MAX))
        return cls(rng.randrange(SEEDS), groups, peers, rng.random() < 0.9, tuple(steps), masters)

    def dumps(self) -> str:
        return json.dumps(self, separators=(",", ":"))

    @classmethod
    def loads(cls, text: str) -> Plan:
        seed, groups, peers, is_admitted, steps, *masters = json.loads(text)
        return cls(seed, groups, peers, is_admitted, tuple(Step(*step) for step in steps), *masters)


class Schedule:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed)
        memory = (Memory.NONE, Memory.DISK, Memory.WAIVED)[plan.seed // 2 % 3]
        self.world = World(self.rng, masters=plan.masters, has_fast_path=plan.seed % 2 == 1, memory=memory)
        self.weak: tuple[Node, Node] | None = None
        """A pair whose link breaks again and again."""

    def run(self) -> None:
        self.add()
        if self.plan.is_admitted:
            self.world.admit_all()
        for step in self.plan.steps:
            self.rng.seed(step.seed)
            getattr(self, step.action)()
            for _ in range(step.deliveries):
                if not self.world.step():
                    break
        self.rng.seed(self.plan.seed)
        self.close()

    def one(self) -> Node | None:
        nodes = self.world.accepted
        return self.rng.choice(nodes) if nodes else None

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # What users do.

    def add(self) -> None:
        while len(self.world.alive) < self.plan.peers and not all(host.is_dead for host in self.world.hosts):
            if self.plan.groups > 1 and self.chance(0.3):
                self.add_site()
            else:
                self.world.add(self.rng.randrange(self.plan.groups), self.rng.randint(1, 3))

    def add_site(self) -> None:
        """A rank for each group; not always all of them."""
        name, ranks = f"site {len(self.world.nodes)}", list(range(self.plan.groups))
        self.rng.shuffle(ranks)
        for rank in ranks[: self.rng.choice((None, None, None, 1))]:
            self.world.add(rank, self.rng.randint(1, 3), name, self.plan.groups)

    def leave(self) -> None:
        if (node := self.one()) and not node.is_frozen:
            self.world.leave(node)

    def _launch(self, node: Node, tag: int, is_sound: bool = False, pair: tuple[Node, bool] | None = None) -> None:
        name = tag, (pair[0].number, pair[1]) if pair else None
        if not node.is_frozen and all((node.launched[op][0], node.pairs.get(op)) != name for op in node.open_ops):
            arguments = "other" if not is_sound and self.chance(0.03) else ""
            self.world.launch(node, tag, arguments, not is_sound and self.chance(0.02), pair)

    def launch_pair(self) -> None:
        if node := self.one():
            company = [other for other in self._company(node) if other in self.world.accepted]
            others = [other for other in company if other is not node and other.number in node.view.ring]
            if others:
                other = self.rng.choice(others)
                tag, sends = self.rng.choice(TAGS), self.chance(0.5)
                for one, two, is_sender in ((node, other, sends), (other, node, not sends)):
                    if self.chance(0.95):
                        self._launch(one, tag, pair=(two, is_sender))

    def launch_one(self) -> None:
        if node := self.one():
            self._launch(node, self.rng.choice(TAGS))

    def launch_all(self) -> None:
        nodes = self.world.accepted
        self.rng.shuffle(nodes)
        tag = self.rng.choice(TAGS)
        for node in nodes:
            if self.chance(0.95):
                self._launch(node, tag)

    def catch_up(self, is_sound: bool = False) -> None:
        """Everybody launches and calls what others wait for."""
        for node in self.world.accepted:
            open_ops = [(other, op) for other in self._company(node) for op in other.open_ops]
            for tag in sorted({other.launched[op][0] for other, op in open_ops if op not in other.pairs}):
                self._launch(node, tag, is_sound)
            for other, op in open_ops:
                number, is_sender = other.pairs.get(op, (0, False))
                if number == node.number:
                    self._launch(node, other.launched[op][0], is_sound, (other, not is_sender))
            if not node.open_calls:
                waits = ((other, other.kinds[other.open_calls[0]]) for other in self.world.accepted if other.open_calls)
                waiting = [kind for other, kind in waits if kind != Kind.SYNC or other.group == node.group]
                if waiting:
                    # Who only asks is told no, and so need not be met there.
                    kind = min(waiting, key=lambda kind: kind == Kind.ARE_PEERS_PENDING)
                    self._joint(node, kind, is_sound)

    def _company(self, node: Node) -> list[Node]:
        return self.world.ring_nodes(node)

    def cancel(self) -> None:
        if (node := self.one()) and node.open_ops and not node.is_frozen:
            self.world.cancel(node, self.rng.choice(node.open_ops))

    def give_up(self) -> None:
        if (node := self.one()) and node.open_ops and not node.is_frozen:
            self.world.give_up(node, self.rng.choice(node.open_ops))

    def _joint(self, node: Node, kind: str, is_sound: bool = False) -> None:
        if node.is_frozen or (node.open_calls and self.chance(0.9)):
            return
        if kind in Kind.EXCLUSIVE and node.open_ops and self.chance(0.8):
            return  # it would be refused at once
        if kind == Kind.SYNC:
            if any(node.kinds[call] == Kind.SYNC for call in node.open_calls):
                return
            node.strategy = self.rng.choice(STRATEGIES)
            node.fails_to_fetch = not is_sound and self.chance(0.1)
            if self.chance(0.6):
                node.revision += self.rng.randint(1, 3)
                node.root = self.rng.choice([b"a", b"b"])
        self.world.joint(node, kind)

    def joint_one(self) -> None:
        if node := self.one():
            self._joint(node, self.rng.choice(Kind.ALL))

    def joint_all(self, *kinds: str) -> None:
        nodes = self.world.accepted
        self.rng.shuffle(nodes)
        kind = self.rng.choice(kinds or Kind.ALL)
        for node in nodes:
            self._joint(node, kind)

    def update(self) -> None:
        if self.world.master.pending or self.chance(0.3):
            self.joint_all(Kind.UPDATE_TOPOLOGY)

    def sync(self) -> None:
        self.joint_all(Kind.SYNC)

    def optimize(self) -> None:
        for a in self.world.alive:
            for b in self.world.alive:
                self.world.network.costs[frozenset((a.name, b.name))] = self.rng.randint(1, 1000)
                self.world.network.rates[a.name, b.name] = self.rng.choice((1e3, 1e6, 2.5e6, 25e6, float("nan")))
        self.joint_all(Kind.OPTIMIZE_TOPOLOGY)

    def cancel_joint(self) -> None:
        if (node := self.one()) and node.open_calls and not node.is_frozen:
            self.world.cancel_joint(node, self.rng.choice(node.open_calls))

    def wait(self) -> None:
        self.world.wait(self.rng.choice((0.1, 1.0, 3.0)))

    def rest(self) -> None:
        world = self.world
        world.run()
        if self.plan.masters and (
            self.plan.masters > 1 or any(node.masterless_since is not None for node in world.alive)
        ):
            return
        if not (any(node.is_frozen for node in world.alive) or world.network.blocked or world.is_master_away):
            world.check_rest()

    # Faults.

    def _some(self) -> Node | None:
        return self.rng.choice(self.world.alive) if self.world.alive else None

    def _pair(self) -> tuple[Node, Node] | None:
        return tuple(self.rng.sample(self.world.alive, 2)) if len(self.world.alive) > 1 else None  # type: ignore

    def kill(self) -> None:
        if node := self._some():
            self.world.kill(node, self.rng.choice((0, 0, 1, 30, 1000)))

    def sever(self) -> None:
        if node := self._some():
            self.world.sever(node, self.rng.choice((0, 0, 1, 30)))

    def reset(self) -> None:
        if node := self._some():
            self.world.reset(node)

    def reset_all(self) -> None:
        for node in self.world.alive:
            self.world.reset(node)
            if self.chance(0.5):
                self.world.break_heartbeats(node)

    def freeze(self) -> None:
        if node := self._some():
            self.world.freeze(node)

    def hang(self) -> None:
        if node := self._some():
            self.world.hang(node)

    def thaw(self) -> None:
        for node in self.world.alive:
            if node.is_frozen:
                self.world.thaw(node)

    def break_link(self) -> None:
        if (node := self.one()) and len(node.view.ring) > 1 and self.chance(0.5):
            self.weak = node, self.rng.choice([n for n in self.world.ring_nodes(node) if n is not node])
        if self.weak:
            self.world.break_link(*self.weak)

    def break_connection(self) -> None:
        if (node := self.one()) and len(node.view.ring) > 1:
            self.world.break_connection(
                node, self.rng.choice([n for n in self.world.ring_nodes(node) if n is not node])
            )

    def break_heartbeats(self) -> None:
        if node := self._some():
            self.world.break_heartbeats(node)

    def part(self) -> None:
        """Connections between two can no more be made; those that are stay."""
        if pair := self._pair():
            self.world.network.unreachable ^= {frozenset((pair[0].name, pair[1].name))}

    def mend(self) -> None:
        self.world.network.unreachable.clear()

    def block(self) -> None:
        if pair := self._pair():
            self.world.block(*pair)

    def cut(self) -> None:
        if pair := self._pair():
            self.world.cut(*pair)

    def block_master(self) -> None:
        if node := self._some():
            master = self._host().name
            self.world.block(*((node, master) if self.chance(0.5) else (master, node)))

    def cut_master(self) -> None:
        if node := self._some():
            self.world.cut(node, self._host().name)

    def isolate(self) -> None:
        if node := self._some():
            self.world.isolate(node)

    def heal(self) -> None:
        self.world.heal()

    def slow(self) -> None:
        if pair := self._pair():
            a = pair[0].name
            b = self.rng.choice((pair[1].name, self._host().name, a))
            self.world.network.slow |= {(a, b), (b, a)}

    def quicken(self) -> None:
        self.world.network.slow.clear()

    def _host(self) -> MasterHost:
        return self.rng.choice(self.world.hosts)

    def freeze_master(self) -> None:
        if not (host := self._host()).is_away:
            self.world.freeze_master(host)

    def thaw_master(self) -> None:
        for host in self.world.hosts:
            if host.is_frozen:
                self.world.thaw_master(host)

    def cut_master_off(self) -> None:
        """Pull the cable of its machine, in both directions or one. Some peers may be on that machine."""
        name = self._host().name
        ways = self.rng.choice(((True, True), (True, True), (True, False), (False, True)))
        for node in self.world.alive:
            if self.chance(0.9):
                for is_cut, (sender, receiver) in zip(ways, ((node, name), (name, node)), strict=True):
                    if is_cut:
                        self.world.block(sender, receiver)

    def kill_master(self) -> None:
        host = self._host()
        if not host.is_dead and (self.plan.masters or (not host.is_frozen and self.chance(0.2))):
            self.world.kill_master(host, self.rng.choice((0, 0, 1, 5)) if self.plan.masters else 0)

    def restart_master(self) -> None:
        for host in self.world.hosts:
            if self.plan.masters and host.is_dead and self.chance(0.7):
                self.world.restart_master(host)

    def replace_master(self) -> None:
        """Kills it and lets another begin at once."""
        self.kill_master()
        self.restart_master()

    def long_wait(self) -> None:
        self.world.wait(self.rng.choice((6.0, 11.0, 95.0)))

    USES: ClassVar[dict[str, float]] = {
        "add": 8,
        "leave": 0.5,
        "launch_one": 3,
        "launch_all": 20,
        "launch_pair": 8,
        "catch_up": 14,
        "cancel": 1,
        "give_up": 1,
        "joint_one": 1,
        "joint_all": 1,
        "update": 12,
        "sync": 5,
        "optimize": 2,
        "cancel_joint": 0.5,
        "wait": 1,
        "rest": 4,
        "thaw": 8,
        "heal": 3,
        "thaw_master": 3,
    }
    FAULTS: ClassVar[dict[str, float]] = {
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
    }

    FAILOVERS: ClassVar[dict[str, float]] = {
        "kill_master": 3,
        "restart_master": 5,
        "replace_master": 3,
        "freeze_master": 1,
        "thaw_master": 2,
        "cut_master_off": 1,
    }

    # The end.

    def close(self) -> None:
        """Faults have stopped: what everybody does now must succeed."""
        world = self.world
        self.mend()
        self.quicken()
        self.heal()
        self.thaw()
        self.thaw_master()
        if self.plan.masters and self.chance(0.8):
            for host in world.hosts:
                if host.is_dead and (len(world.hosts) == 1 or self.chance(0.7)):
                    world.restart_master(host)
        self._settle()
        world.checks.agreement()
        if self.plan.masters:
            self._give_up()
        if all(host.is_dead for host in world.hosts) or (self.plan.masters and not world.accepted):
            assert not world.alive or self.plan.masters, "they have not noticed that the master is gone"
            self._nobody_waits()
            return
        world.check_rest()
        if self.chance(0.7):
            self._catch_up()
        world.cancel_all()
        world.check_rest()
        self._nobody_waits()
        while world.master.admissible:
            self._all_succeed(lambda node: world.joint(node, Kind.UPDATE_TOPOLOGY))
        assert all(world.node_of(peer).machine.site for peer in world.master.pending)
        for tag in CLOSING_TAGS:
            for node in self.rng.sample(world.accepted, len(world.accepted)):
                world.launch(node, tag)
        world.run()
        for node in world.accepted:
            codes = [node.result(op) for op in list(node.launched)[-2:]]
            assert codes == [Result.SUCCESS if node.view.world_size > 1 else Result.TOO_FEW_PEERS] * 2
        for node in world.accepted:
            node.strategy, node.fails_to_fetch = "enforce_popular", False
        self._all_succeed(lambda node: world.joint(node, Kind.SYNC))
        self._all_succeed(lambda node: world.joint(node, Kind.OPTIMIZE_TOPOLOGY))
        self._all_succeed(lambda node: world.joint(node, Kind.ARE_PEERS_PENDING))
        world.check_rest()
        world.checks.agreement()
        for node in world.alive:
            world.leave(node)
        world.run()
        assert not any(host.is_leading for host in world.hosts)
        assert world.master.deadline() is None or self.plan.masters

    def _give_up(self) -> None:
        """Wait until one of several masters leads, and until all who have found none or have no majority have given
        up."""
        world = self.world
        patience_s = MASTER_TIMEOUT_S + 2.5
        self._pass(patience_s)
        for _ in range(LED_AGAIN_MAX):
            # A run that is led once more and loses its majority for good has its peers begin to wait anew.
            since = [node.masterless_since for node in world.accepted if node.masterless_since is not None]
            self._pass(max(since, default=world.now - patience_s) + patience_s - world.now)
        leading = [host.machine.run for host in world.hosts if host.is_leading]
        assert len(leading) == len(set(leading)), f"two masters lead: {leading}"
        for node in world.accepted:
            assert node.masterless_since is None, f"{node} has waited for a master for too long"
        ours = world.master.run
        while others := [node for node in world.alive if node.machine.run not in (ours, "")]:
            for node in others:
                world.leave(node)  # another run, founded when this one could not be found
            world.run()

    def _pass(self, seconds: float) -> None:
        end_at = self.world.now + seconds
        while self.world.now < end_at:
            self.world.wait(2.5)
            self.world.run()

    def _settle(self) -> None:
        """Everything comes to rest, and what time alone can end has ended."""
        world = self.world
        world.run()
        # Without a memory, a master that began anew waits for all as long as the peers do.
        patience_s = MASTER_TIMEOUT_S if world.memory is Memory.NONE and self.plan.masters == 1 else 0.0
        end_at = world.now + patience_s
        while world.now < end_at and any(node.masterless_since is not None for node in world.alive):
            world.wait(2.5)
            world.run()
        begun_at = world.now
        while world.now < begun_at + SETTLED_AFTER_S / 2:
            world.wait(2.5)
            world.run()
        assert world.now < begun_at + SETTLED_AFTER_S, "it takes too long"

    def _catch_up(self) -> None:
        """Whoever waits gets through, once all others do what he waits for."""
        for _ in range(CATCH_UPS_MAX):
            if not any(node.open_ops or node.open_calls for node in self.world.accepted):
                return
            self.catch_up(is_sound=True)
            self.world.run()
            self.world.wait(2.5)
            self.world.run()
        waits = {node: (node.open_ops, node.open_calls) for node in self.world.accepted}
        raise AssertionError(f"whatever they do, they wait: {waits}")

    def _nobody_waits(self) -> None:
        for node in self.world.nodes:
            if node.is_alive:
                assert not node.open_ops, f"{node} waits for ops that are over"
                assert not node.open_calls, f"{node} waits for calls that are over"

    def _all_succeed(self, call: Callable[[Node], int]) -> None:
        made = [(node, call(node)) for node in self.rng.sample(self.world.accepted, len(self.world.accepted))]
        self.world.run()
        for node, number in made:
            result = node.calls[number]
            assert result.code is Result.SUCCESS, f"{node}: {result}"


ACTIONS = tuple(dict.fromkeys((*Schedule.USES, *Schedule.FAULTS, *Schedule.FAILOVERS)))


def play(plan: Plan) -> World:
    schedule = Schedule(plan)
    try:
        schedule.run()
    except Exception as error:
        error.add_note("the master's last words:\n" + "\n".join(schedule.world.log[-20:]))
        error.add_note(f"python -m tests.simulation --plan '{plan.dumps()}'")
        raise
    return schedule.world
