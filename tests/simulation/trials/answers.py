"""Views that several masters have prepared one after the other: what peers say of them, and to whom."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from tests.simulation.master_host import MasterHost
from tests.simulation.trials.chain import Chain
from tests.simulation.trials.ops import TAG, WithoutMaster
from tests.simulation.trials.weak_links import WeakLinks


class _Answers(Chain, WeakLinks):
    def _dies(self, leader: MasterHost | None) -> None:
        world = self._world
        for host in world.hosts:
            if not host.is_dead and (leader is None or host is leader):
                world.kill_master(host, 9)
        world.heal()
        for host in world.hosts:
            if host.is_dead:
                world.restart_master(host)


class AnsweredViews(_Answers):
    """All have answered a view that comes into force nowhere. The next masters die before theirs does, with all peers
    or without one: what peers say of each is so as long as no master has ruled it out, and no longer."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(4)
        run = nodes[0].run
        if not world.masters or self._needs_all or any(node.site for node in world.alive):
            return
        away = rng.choice(nodes)
        one, other, *_ = rng.sample([node for node in nodes if node is not away], 3)
        leader = self._until_led()
        assert leader is not None
        self._break_until(one, other, m.Prepare, at_once=True)
        world.block(away, leader.name)
        self._drain()
        is_away = rng.random() < 0.6
        self._dies(leader)
        if is_away:
            for host in world.hosts:
                world.cut(away, host.name)
        for _ in range(2):
            leader = self._until_led()
            here = [node for node in nodes if node.is_reachable and node is not away]
            if leader is None or not here:
                break
            world.block(rng.choice(here), leader.name)
            self._drain()
            self._dies(leader)
        self._all_have_an_end()
        self._go_on(run)


class AnswerToTheDead(_Answers):
    """A peer makes a link for a view whose master has died, and the link is refused or made under the next one: it
    answers that one's view, and no other."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(3)
        run = nodes[0].run
        if not world.masters or self._needs_all or any(node.site for node in world.alive):
            return
        one, other = sorted(rng.sample(nodes, 2), key=lambda node: node.number)
        self._break_until(one, other, m.Prepare, at_once=True)
        for host in world.hosts:
            world.block(host.name, one)
        self._drain()
        self._dies(None)
        leader = self._until_led()
        if leader is None:
            return
        world.block(one, leader.name)
        self._drain()
        world.block(leader.name, other)
        world.network.blocked.discard((one.name, leader.name))
        self._drain()
        world.heal()
        self._all_have_an_end()
        self._go_on(run)


class KeptRing(WithoutMaster):
    """One group keeps its ring in a view that another group's loss begins, under a master that was not there when the
    ring was made. Its peers hear of that view at different times, and go on choosing algorithms alike."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        if not world.masters or any(node.site for node in world.alive):
            return
        nodes = self._company_of(2)
        others = [world.add(nodes[0].group + 1) for _ in range(2)]
        self._be_whole()
        self._all_succeed(Kind.OPTIMIZE_TOPOLOGY)
        epoch = nodes[0].view.epoch
        while nodes[0].view.epoch == epoch:
            world.break_link(nodes[0], nodes[1])
            world.run()
        self._kill_all()
        self._begin_anew()
        nodes = [node for node in world.accepted if node.group == nodes[0].group]
        late = self._some(nodes, rng.randint(1, len(nodes) - 1))
        world.leave(rng.choice(others))
        self._until_said(m.Install)
        for host in world.hosts:
            for node in late:
                world.block(host.name, node)
        self._drain()
        ops = {node: world.launch(node, TAG) for node in rng.sample(nodes, len(nodes))}
        self._drain()
        world.heal()
        world.run()
        for node, op in ops.items():
            assert op in node.results, f"{node} waits in an op that all have launched"
        self._be_whole()
