"""What happens to a simulated run, step by step: to processes, links, networks, clocks and masters."""

from __future__ import annotations

import random
from collections.abc import Callable

from pccl.protocol.messages import Kind
from tests.simulation.master_host import MasterHost
from tests.simulation.node import Node
from tests.simulation.plan import Plan
from tests.simulation.world import World

DELIVERIES_MEANWHILE = 60
EFFECTS = (0, 1, 2, 3, 5, 8, 13, 30)
"""The effects that a process lives to carry out before it is stopped or killed."""
TAGS = (1, 2, 3)
IMPATIENCE = 0.15
"""The probability that a caller gives up before a delivery, while callers do."""
STRATEGIES = ("enforce_popular", "enforce_popular", "enforce_popular", "receive_only", "send_only")


class Faults:
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
        if self._runs(node) and all((node.launched[op][0], node.pairs.get(op)) != name for op in node.open_ops):
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

    def stream(self) -> None:
        """For a while all launch one op after the other, and so do two of them with each other."""
        tag, pair_tag = self.rng.choice(TAGS), self.rng.choice(TAGS)
        nodes = self.world.accepted
        pair = self.rng.sample(nodes, 2) if len(nodes) > 1 and self.chance(0.5) else []

        def launch_next() -> None:
            if node := self.one():
                self._launch(node, tag, is_sound=True)
            if pair and all(each in self.world.accepted for each in pair):
                at = self.rng.randrange(2)
                node, other = pair[at], pair[1 - at]
                if other.number in node.view.ring:
                    self._launch(node, pair_tag, True, (other, at == 0))

        self.between, self.is_streaming = launch_next, True

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
                    # A peer that only asks gets no, and so need not be met there.
                    kind = min(waiting, key=lambda kind: kind == Kind.ARE_PEERS_PENDING)
                    self._group_call(node, kind, is_sound)

    def _company(self, node: Node) -> list[Node]:
        return self.world.ring_nodes(node)

    def cancel(self) -> None:
        if (node := self.one()) and node.open_ops and not node.is_frozen:
            self.world.cancel(node, self.rng.choice(node.open_ops))

    def give_up(self) -> None:
        if (node := self.one()) and node.open_ops and not node.is_frozen:
            self.world.give_up(node, self.rng.choice(node.open_ops))

    def _group_call(self, node: Node, kind: str, is_sound: bool = False) -> None:
        if not self._runs(node) or (node.open_calls and self.chance(0.9)):
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
        self.world.group_call(node, kind)

    def group_call_by_one(self) -> None:
        if node := self.one():
            self._group_call(node, self.rng.choice(Kind.ALL))

    def group_call_by_all(self, *kinds: str) -> None:
        nodes = self.world.accepted
        self.rng.shuffle(nodes)
        kind = self.rng.choice(kinds or Kind.ALL)
        for node in nodes:
            self._group_call(node, kind)

    def update(self) -> None:
        if self.world.master.state.pending or self.chance(0.3):
            self.group_call_by_all(Kind.UPDATE_TOPOLOGY)

    def sync(self) -> None:
        self.group_call_by_all(Kind.SYNC)

    def optimize(self) -> None:
        for a in self.world.alive:
            for b in self.world.alive:
                self.world.network.costs[frozenset((a.name, b.name))] = self.rng.randint(1, 1000)
                self.world.network.rates[a.name, b.name] = self.rng.choice((1e3, 1e6, 2.5e6, 25e6, float("nan")))
        self.group_call_by_all(Kind.OPTIMIZE_TOPOLOGY)

    def cancel_group_call(self) -> None:
        if (node := self.one()) and node.open_calls and not node.is_frozen:
            self.world.cancel_group_call(node, self.rng.choice(node.open_calls))

    def interrupt(self) -> None:
        """Ctrl-C comes: all that its callers wait for is given up, and it may end."""
        if (node := self.one()) and not node.is_frozen:
            for op in node.open_ops:
                if self._runs(node):
                    self.world.give_up(node, op)
            for call in node.open_calls:
                if self._runs(node):
                    self.world.cancel_group_call(node, call)
            if self.chance(0.5) and self._runs(node):
                self.world.leave(node)

    def impatience(self) -> None:
        """For a while callers give up at any moment."""
        self.between = self._lose_patience

    def _lose_patience(self) -> None:
        if self.chance(IMPATIENCE):
            self.rng.choice((self.cancel, self.give_up, self.cancel_group_call))()

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

    def stop_within(self) -> None:
        """Stop a peer between two effects of its machine, soon."""
        if node := self._some():
            self.world.stop_within(node, self.rng.choice(EFFECTS))

    def kill_within(self) -> None:
        if node := self._some():
            self.world.kill_within(node, self.rng.choice(EFFECTS))

    def stop_master_within(self) -> None:
        self.world.stop_master_within(self._host(), self.rng.choice(EFFECTS))

    def kill_master_within(self) -> None:
        self.world.kill_master_within(self._host(), self.rng.choice(EFFECTS))

    def hang(self) -> None:
        if node := self._some():
            self.world.hang(node)

    def thaw(self) -> None:
        for node in self.world.nodes:
            if node.is_alive and node.is_frozen:
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
        self.world.network.slow_machines.clear()

    def slow_node(self) -> None:
        """All that concerns a peer happens late, while everything else goes on."""
        if node := self._some():
            self.world.network.slow_machines.add(node.name)

    def late_engines(self) -> None:
        """Some hear late of what engines have done, theirs or others', so that verdicts come before, while callers
        give up."""
        if (first := self.one()) and len(first.view.ring) > 1:
            ring = self.world.ring_nodes(first)
            late = self.rng.choice([node for node in ring if node is not first])
            for node in ring:
                if node not in (first, late):
                    self.world.network.slow.add((node.name, node.name))
                if self.chance(0.5):
                    self.world.network.slow.add((node.name, late.name))
        self.launch_all()
        self.between = self._disturb_ops

    def _disturb_ops(self) -> None:
        if self.chance(0.3):
            for node in self.world.alive:
                for op in node.open_ops:
                    if self._is_over_elsewhere(node, op) and not node.is_frozen:
                        self.world.cancel(node, op)
                        if self.chance(0.3):
                            self.break_link()
                        return
        elif self.chance(0.02):
            self.rng.choice((self.cancel, self.break_link, self.kill))()

    def _is_over_elsewhere(self, node: Node, op: int) -> bool:
        """Whether another node has forgotten an op while this one does not know that all are done."""
        key = node.keys.get(op)
        if key not in node.submitted or ("agreed", op) in node.reports:
            return False
        others = [other for other in self.world.ring_nodes(node) if other is not node and other.is_alive]
        return any(key in other.keys.values() and key not in other.submitted for other in others)

    def slow_master(self) -> None:
        self.world.network.slow_machines.add(self._host().name)

    def open_hole(self) -> None:
        """Only small packets get from one peer to another any more, or to any other."""
        if pair := self._pair():
            others = [pair[1]] if self.chance(0.6) else [other for other in self.world.alive if other is not pair[0]]
            for other in others:
                self.world.open_hole(pair[0], other)
                if self.chance(0.3):
                    self.world.open_hole(other, pair[0])

    def quick_wait(self) -> None:
        """So little time passes that only some of those that wait for the same find that it is over."""
        self.world.wait(self.rng.choice((0.01, 0.3, 4.7, 5.0, 5.1)))

    def freeze_master(self) -> None:
        if not (host := self._host()).is_away:
            self.world.freeze_master(host)

    def thaw_master(self) -> None:
        for host in self.world.hosts:
            if host.is_frozen:
                self.world.thaw_master(host)
            elif host.is_wedged:
                self.world.unwedge_master(host)

    def wedge_master(self) -> None:
        """A master reads no more, but its heartbeats go on."""
        if not (host := self._host()).is_away:
            self.world.wedge_master(host)

    def reroute(self) -> None:
        """The name leads one peer to another master from now on."""
        if node := self._some():
            node.route = self.rng.randrange(len(self.world.hosts))

    def reroute_all(self) -> None:
        """The name leads all, or nearly all, to one master."""
        route = self.rng.randrange(len(self.world.hosts))
        for node in self.world.alive:
            if self.chance(0.9):
                node.route = route

    def split(self) -> None:
        """The network falls apart into two sides, each with some of the peers and masters."""
        world = self.world
        sides: tuple[list[str], list[str]] = [], []
        for name in [*(node.name for node in world.alive), *(host.name for host in world.hosts)]:
            sides[self.chance(0.5)].append(name)
        for here in sides[0]:
            for there in sides[1]:
                world.cut(here, there)

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

    def bereave(self) -> None:
        """No peer of the run is left, or few, its master is replaced, and newcomers come for long enough."""
        for node in self.world.alive:
            if self.chance(0.8):
                self.world.kill(node)
        self.replace_master()
        self.add()
        self.slow_wait()

    def slow_wait(self) -> None:
        """Time passes little by little, so that all that wait for something do what they do."""
        for _ in range(self.rng.choice((2, 4, 8))):
            for _ in range(DELIVERIES_MEANWHILE):
                if not self.world.step():
                    break
            self.world.wait(2.5)

    def long_wait(self) -> None:
        self.world.wait(self.rng.choice((6.0, 11.0, 95.0)))
