"""A master dies while a view comes into force: in force here, prepared there, and not heard of elsewhere."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from tests.simulation.node import Node
from tests.simulation.scene import MASTER_TIMEOUT_S
from tests.simulation.trials.base import MARGIN_S, SEARCH_TIMEOUTS, Trial

APART_TIMEOUTS = 3.5
"""Number of peer timeouts for which the network is apart."""


class TornView(Trial):
    """Those who may go on do, and nobody else. All who can come are led on."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = world.accepted
        run = peers[0].run
        self._victims: list[Node] = []
        self._newcomers_here: list[Node] = []
        rounds = rng.choice((1, 1, 2))
        for at in range(rounds):
            changing = self._begin_change([node for node in peers if node not in self._victims])
            self._tear(changing, is_last=at == rounds - 1)
        survivors = [node for node in peers if node not in self._victims]
        everybody = [*survivors, *self._newcomers_here]
        course = rng.choice(("all", "all", "some", "apart") if len(world.hosts) > 1 else ("all", "all", "some"))
        if course == "apart":
            self._fall_apart(everybody)
        else:
            self._begin_masters(all_of_them=True)
            if course == "some":
                for node in self._some(everybody, rng.randint(1, len(everybody) - 1)):
                    self._cut_off(node, APART_TIMEOUTS * self._timeout_s)
            elif rounds == 1 and self._can_go_on(peers, survivors):
                self._all_are_led(survivors, run, self._bound_s() * self._slack)
        self._all_have_an_end()
        self._go_on(run)

    def _begin_change(self, peers: list[Node]) -> int:
        """Have newcomers be admitted, or have one be lost in the middle of ops. Return the group that changes."""
        world, rng = self._world, self._rng
        n = len(peers)
        if n < 3 or self._victims or rng.random() < 0.6:
            group = rng.randrange(self._groups)
            newcomers = []
            for _ in range(rng.randint(1, n + 1)):
                newcomers.append(world.add(group if rng.random() < 0.7 else rng.randrange(self._groups)))
            self._newcomers_here += newcomers
            world.run_while_any()
            for node in peers:
                if node.is_reachable:
                    world.joint(node, Kind.UPDATE_TOPOLOGY)
            return group
        for tag in (33, 34):
            for node in peers:
                if rng.random() < 0.9:
                    world.launch(node, tag)
        self._deliver(rng.choice((0, 3, 10, 30)))
        self._victims = self._some(peers, 1)
        world.kill(self._victims[0], rng.choice((0, 30, 1000)))
        return self._victims[0].group

    def _tear(self, changing: int, is_last: bool) -> None:
        """Have the master die while some hear nothing, and perhaps all newcomers with it."""
        world, rng = self._world, self._rng
        self._until_said(rng.choice((m.Prepare, m.Prepare, m.Install, m.Install, m.JointResult)))
        leader = next((host for host in world.hosts if host.is_leading), None)
        if leader is None:
            return
        everybody = [node for node in world.alive if node.is_reachable]
        if rng.random() < 0.4:
            self._deaf = [node for node in everybody if node.group != changing]
        else:
            self._deaf = self._some(everybody, rng.randint(0, len(everybody) - 1))
        for node in self._deaf:
            world.block(leader.name, node)
        self._deliver(rng.choice((0, 1, 2, 4, 8, 20, 60, 120)))
        world.kill_master(leader, rng.choice((0, 0, 1)))
        world.heal()
        if rng.random() < 0.4:
            for node in self._newcomers_here:
                world.kill(node)
            self._victims += self._newcomers_here
            self._newcomers_here = []
        if not is_last:
            self._begin_masters(all_of_them=True)

    def _can_go_on(self, peers: list[Node], survivors: list[Node]) -> bool:
        """Whether survivors are enough of all views that may be in force."""
        if self._slack > 1 and len(survivors) < len(peers):
            return False
        n = len(peers)
        if 2 * len(survivors) <= n:
            return self._is_recorded
        dead = [node for node in self._victims if node not in peers]
        if not dead or self._is_recorded:
            return not dead
        announced = max((leader.prepared for leader in (node.leader for node in survivors) if leader), default=0)
        changed = {node.group for node in dead}
        return any(node.ready < announced and node.group in changed for node in survivors)

    def _fall_apart(self, everybody: list[Node]) -> None:
        """The network is apart for a while, with masters on both sides where there are several."""
        world, rng = self._world, self._rng
        for host in world.hosts:
            if host.is_dead:
                world.restart_master(host)
        hosts = [host.name for host in world.hosts]
        rng.shuffle(hosts)
        names = [node.name for node in everybody]
        rng.shuffle(names)
        cut = rng.randint(1, len(names) - 1) if len(names) > 1 else 1
        here = names[:cut]
        if rng.random() < 0.5:
            here = [node.name for node in everybody if node in self._deaf]
        here, there = [*here, hosts[0]], [*(name for name in names if name not in here), *hosts[1:]]
        for one in here:
            for other in there:
                world.cut(one, other)
        self._pass(APART_TIMEOUTS * self._timeout_s)
        world.heal()

    def _bound_s(self) -> float:
        world = self._world
        if self._victims and world.addresses == 1:
            return MASTER_TIMEOUT_S
        return MARGIN_S + (3 + (SEARCH_TIMEOUTS if world.addresses > 1 else 0.0)) * self._timeout_s
