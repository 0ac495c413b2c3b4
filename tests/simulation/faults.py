"""What happens to a simulated run, step by step: to processes, links, networks, clocks and masters."""

from __future__ import annotations

from tests.simulation.node import Node
from tests.simulation.uses import Uses

DELIVERIES_MEANWHILE = 60
EFFECTS = (0, 1, 2, 3, 5, 8, 13, 30)
"""The effects that a process lives to carry out before it is stopped or killed."""


class Faults(Uses):
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
