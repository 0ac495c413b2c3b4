"""Joint calls whose master dies, or gives a peer up, when some have heard how they end, or have half of a state."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.node import Node
from tests.simulation.trials.base import MARGIN_S, TICK_S
from tests.simulation.trials.membership import Membership
from tests.simulation.trials.ops import WithoutMaster

TIED_MAX = 3
"""Number of peers that as many newcomers may contradict."""


class _Calls(WithoutMaster):
    def _call(self, nodes: list[Node], kind: str) -> dict[Node, int]:
        for node in nodes:
            node.strategy, node.fails_to_fetch = "enforce_popular", False
        return {node: self._world.joint(node, kind) for node in nodes}

    def _all_come_through(self, calls: dict[Node, int]) -> None:
        for node, call in calls.items():
            if node.is_reachable:
                assert call in node.calls, f"{node} waits in {node.kinds[call]}, which all have called"
                assert node.call(call) is Result.SUCCESS, f"{node.kinds[call]} of {node}: {node.calls[call]}"

    def _hear_nothing(self, nodes: list[Node]) -> None:
        """What masters say gets to none of these."""
        for host in self._world.hosts:
            for node in nodes:
                self._world.block(host.name, node)

    def _say_nothing(self, nodes: list[Node]) -> None:
        """What these say gets to no master."""
        for host in self._world.hosts:
            for node in nodes:
                self._world.block(node, host.name)

    def _restart(self) -> None:
        for host in self._world.hosts:
            self._world.restart_master(host)

    def _until_next(self, kind: type[m.Message]) -> None:
        """Have masters begin anew, and let time pass until one says this."""
        world = self._world
        self._restart()
        said = len(world.from_masters)
        end_at = world.now + 4 * self._timeout_s
        while not any(isinstance(message, kind) for _, message in world.from_masters[said:]) and world.now < end_at:
            if not world.step():
                world.wait(TICK_S)

    def _are_led(self) -> None:
        world = self._world
        self._all_are_led(world.accepted, world.accepted[0].run, 20 * self._timeout_s * self._slack)


class UnheardEnd(_Calls):
    """A call has ended, and some have not heard of it when their master dies. The next one tells them that end,
    whatever the others call by then, and waits for none of them who dies before."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(rng.choice((2, 3, 4)))
        if not world.masters or any(node.site for node in world.alive):
            return
        kind = rng.choice((Kind.SYNC, Kind.OPTIMIZE_TOPOLOGY, Kind.ARE_PEERS_PENDING))
        callers = nodes if kind == Kind.SYNC else world.accepted
        calls = self._call(callers, kind)
        self._until_said(m.JointResult)
        deaf = self._some(callers, rng.randint(1, len(callers) - 1))
        self._hear_nothing(deaf)
        self._drain()
        self._kill_all()
        world.heal()
        informed = [node for node in callers if node not in deaf]
        again = self._call(informed, kind)
        gone = rng.choice(deaf)
        dies = rng.random() < 0.5 and len(world.accepted) > 2
        self._until_next(m.Resumed)
        if dies:
            world.kill(gone, rng.choice((0, 1000)))
            self._pass(2 * self._timeout_s * self._slack)
        self._are_led()
        self._all_come_through(calls)
        again.update(self._call([node for node in deaf if node.is_reachable], kind))
        world.run()
        self._all_come_through(again)
        self._be_whole()


class NotYetAccepted(_Calls):
    """A newcomer is in the run, and has not heard of it when the master dies. The next calls of the others wait for
    it."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        if not world.masters or any(node.site for node in world.alive):
            return
        group = rng.choice(world.accepted).group
        newcomer = world.add(group)
        world.run()
        calls = self._call(world.accepted, Kind.UPDATE_TOPOLOGY)
        self._until_said(m.Install)
        self._hear_nothing([newcomer])
        self._drain()
        if newcomer.views:
            return
        self._kill_all()
        world.heal()
        self._all_come_through(calls)
        kind = rng.choice((Kind.SYNC, Kind.ARE_PEERS_PENDING))
        calls = self._call([node for node in world.accepted if kind in Kind.GLOBAL or node.group == group], kind)
        self._until_next(m.Resumed)
        self._say_nothing([newcomer])
        self._drain()
        if not newcomer.views:
            for node, call in calls.items():
                assert call not in node.calls, f"{kind} of {node} ends without {newcomer}, which is in the run"
        world.heal()
        self._are_led()
        world.run()
        calls |= self._call([newcomer], kind)
        world.run()
        self._all_come_through(calls)
        self._be_whole()


class GivenUpInSync(_Calls):
    """A master gives a peer up that was to fetch a state, and dies before it has announced the view without it. The
    peer is back at the next one: it has the state when its call ends, as all others."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(rng.choice((3, 4)))
        if not world.masters or any(node.site for node in world.alive):
            return
        behind = rng.choice(nodes)
        revision = max(node.revision for node in nodes) + 1
        for node in nodes:
            if node is not behind:
                node.revision, node.root = revision, b"new"
        calls = self._call(nodes, Kind.SYNC)
        self._until_said(m.SyncPlan)
        for host in world.hosts:
            world.cut(behind, host.name)
        self._drain()
        said = len(world.from_masters)
        end_at = world.now + 3 * self._timeout_s * self._slack
        while not any(isinstance(message, m.Flush) for _, message in world.from_masters[said:]) and world.now < end_at:
            self._drain()
            world.wait(TICK_S)
        self._say_nothing([node for node in nodes if node is not behind])
        self._drain()
        self._kill_all()
        world.heal()
        self._restart()
        self._all_have_an_end()
        for node, call in calls.items():
            assert call in node.calls or not node.is_reachable, f"{node} waits in a sync, which all have called"
            if call in node.calls and node.call(call) is Result.SUCCESS:
                assert node.root == b"new", f"{node} has {node.root!r} after a sync"
        self._be_whole()


class LateFetch(_Calls):
    """A transfer that one master has asked for fails when the next one has asked for another: that one counts."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(rng.choice((2, 3, 4)))
        if not world.masters or any(node.site for node in world.alive):
            return
        behind = rng.choice(nodes)
        revision = max(node.revision for node in nodes) + 1
        donors = [node for node in nodes if node is not behind]
        for node in donors:
            node.revision, node.root = revision, b"new"
        calls = self._call(nodes, Kind.SYNC)
        self._until_said(m.SyncPlan)
        self._hear_nothing(donors)
        self._drain()
        self._kill_all()
        world.heal()
        self._until_next(m.SyncPlan)
        self._hear_nothing([behind])
        self._drain()
        world.heal()
        self._are_led()
        self._all_come_through(calls)
        self._be_whole()


class DoubtedInVain(_Calls):
    """One cannot use those who have a state, and says so when links are made anew already: one view is enough."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(rng.choice((3, 4)))
        if any(node.site for node in world.alive):
            return
        behind, one, other, *_ = rng.sample(nodes, len(nodes))
        donors = [node for node in nodes if node is not behind]
        revision = max(node.revision for node in nodes) + 1
        for node in donors:
            node.revision, node.root = revision, b"new"
        calls = self._call(nodes, Kind.SYNC)
        behind.fails_to_fetch = True
        self._until_said(m.SyncPlan)
        self._hear_nothing(donors)
        self._drain()
        self._break_until(one, other, m.Flush)
        self._say_nothing([behind])
        world.network.blocked -= {(host.name, node.name) for host in world.hosts for node in donors}
        self._drain()
        world.heal()
        world.run()
        for node, call in calls.items():
            assert call in node.calls, f"{node} waits in a sync, which all have called"
        self._be_whole()


class Tie(Membership):
    """As many newcomers as there were peers in the last sync bring another content of its revision: it is not
    adopted."""

    def play(self) -> None:
        world = self._world
        elders = self._company_of(1)
        if any(node.site for node in world.alive) or len(elders) > TIED_MAX:
            return
        root, revision = elders[0].root, elders[0].revision
        for _ in elders:
            newcomer = world.add(elders[0].group)
            newcomer.revision, newcomer.root = revision, b"of newcomers"
        self._admit()
        self._all_succeed(Kind.SYNC)
        for node in elders:
            assert node.root == root, f"{node} has taken on what newcomers have brought"
        self._pass(MARGIN_S)
        self._be_whole()
