"""Ops and calls that are given up when others are done with them, or whose end some hear late: all hear the same."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from pccl.protocol.peer.op import EARLY_KEPT_MAX
from pccl.types import Result
from tests.simulation.node import Node
from tests.simulation.trials.base import MARGIN_S, TICK_S
from tests.simulation.trials.membership import Membership

TAG = 19
"""One that goes direct in a mesh."""
STALLED_S = 2.0
"""The time after which a peer says that it waits for an op."""
LED_TIMEOUTS = 20.0
"""Number of peer timeouts in which all are led again for whom nothing is in the way."""
LOST = 9
"""More messages than are under way to a peer."""


class _Ops(Membership):
    def _mesh_of(self, size: int) -> list[Node]:
        """Return the peers of a group that is a mesh, by rank; none if there is no such group."""
        nodes = self._company_of(size)
        if not nodes[0].view.is_meshed or any(node.site for node in nodes):
            return []
        return self._world.ring_nodes(nodes[0])

    def _launch(self, nodes: list[Node]) -> dict[Node, int]:
        return {node: self._world.launch(node, TAG) for node in nodes}

    def _all_end(self, ops: dict[Node, int]) -> set[Result]:
        """All ops have ended alike. Return how."""
        for node, op in ops.items():
            assert op in node.results or node.ended, f"{node} waits in an op that is over for others"
        return {node.result(op) for node, op in ops.items() if op in node.results}

    def _hears_nothing_of_its_engine(self, node: Node) -> None:
        self._world.network.blocked.add((node.name, node.name))


class GivenUp(_Ops):
    """A caller gives an op up that it is done with, and another one is not: it ends for all, though a master dies that
    was about to end it."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._mesh_of(rng.choice((2, 3, 4)))
        if not nodes:
            return
        late, by = rng.sample(nodes, 2)
        world.engines.held_back = {late.name}
        ops = self._launch([node for node in nodes if rng.random() < 0.8 or node is by])
        self._drain()
        if ops[by] not in by.results:
            world.cancel(by, ops[by])
        dies = bool(world.masters) and rng.random() < 0.5
        if dies:
            self._until_said(m.AbortVoteRequest)
            self._deliver(rng.choice((0, 2, 5, 10)))
            for host in world.hosts:
                if not host.is_dead:
                    world.kill_master(host)
            self._drain()
            for host in world.hosts:
                world.restart_master(host)
            self._all_are_led(world.accepted, by.run, LED_TIMEOUTS * self._timeout_s * self._slack)
        self._drain()
        for node in nodes:
            if node not in ops:
                ops[node] = world.launch(node, TAG)
        self._drain()
        self._all_end(ops)
        world.engines.release()
        world.run()
        world.check_rest()
        self._be_whole()


class TwoQuestions(_Ops):
    """A peer is asked to promise something and, before its word comes, to stop its ops. It answers both, and nobody
    minds; or it hangs after the first answer, and is missed."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._mesh_of(4)
        if not nodes:
            return
        asked, late, by, other = rng.sample(nodes, 4)
        world.engines.held_back = {late.name}
        ops = self._launch(nodes)
        self._drain()
        self._hears_nothing_of_its_engine(asked)
        for host in world.hosts:
            world.block(asked, host.name)
        if ops[by] not in by.results:
            world.cancel(by, ops[by])
        self._drain()
        self._break_until(by, other, m.Flush)
        for host in world.hosts:
            world.network.blocked.discard((asked.name, host.name))
        self._drain()
        hangs = rng.random() < 0.5
        if hangs:
            world.hang(asked)
        world.network.blocked.discard((asked.name, asked.name))
        world.engines.release()
        self._pass((world.options.answer_limit_s + MARGIN_S) * self._slack)
        others = [node for node in nodes if node is not asked]
        for node in others:
            assert node.ended is None, f"{node} is put out, and answers everything: {node.ended}"
            is_missed = asked.number not in node.view.ring
            assert is_missed or not hangs, f"{node} goes on with {asked}, which answers nothing since long"
            assert hangs or not is_missed, f"{node} has lost {asked}, which answers everything"
        if hangs:
            world.kill(asked)
        world.run()
        self._all_end({node: ops[node] for node in others})
        self._be_whole()


class PromisedForNobody(_Ops):
    """One waits in an op, for which the others have no use. A master asks them about it, and dies before its question
    gets to the first one. Then they do launch the op: all hear the same end."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._mesh_of(rng.choice((2, 3)))
        if not nodes or not world.masters:
            return
        waiting, *others = rng.sample(nodes, len(nodes))
        ops = self._launch([waiting])
        self._pass((STALLED_S + 2 * TICK_S) * self._slack)
        for host in world.hosts:
            world.block(host.name, waiting)
        calls = {node: world.joint(node, Kind.UPDATE_TOPOLOGY) for node in world.accepted if node is not waiting}
        self._drain()
        for host in world.hosts:
            world.network.blocked.discard((host.name, waiting.name))
            if not host.is_dead:
                world.kill_master(host, LOST)
        self._drain()
        for node, call in calls.items():
            if call not in node.calls:
                world.cancel_joint(node, call)
        for host in world.hosts:
            world.restart_master(host)
        self._all_are_led(world.accepted, waiting.run, LED_TIMEOUTS * self._timeout_s * self._slack)
        world.run()
        ops.update(self._launch(others))
        world.run()
        self._pass(MARGIN_S)
        world.run()
        assert len(self._all_end(ops)) == 1
        world.check_rest()
        self._be_whole()


class LateReport(_Ops):
    """One is done, and does not hear it of its engine. The others have ended the op, and wait for it in a call."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._mesh_of(rng.choice((2, 3, 4)))
        if not nodes:
            return
        late = rng.choice(nodes)
        self._hears_nothing_of_its_engine(late)
        ops = self._launch(nodes)
        self._drain()
        self._pass((STALLED_S + 2 * TICK_S) * self._slack)
        calls = {node: world.joint(node, Kind.UPDATE_TOPOLOGY) for node in world.accepted if node is not late}
        self._pass(2 * TICK_S)
        world.network.blocked.discard((late.name, late.name))
        world.run()
        assert self._all_end(ops) == {Result.SUCCESS}
        calls[late] = world.joint(late, Kind.UPDATE_TOPOLOGY)
        world.run()
        for node, call in calls.items():
            assert call in node.calls, f"{node} waits in update_topology, which all have called"
        world.check_rest()
        self._be_whole()


class LostWord(_Ops):
    """One has ended an op, and another one lacks its word when ops are stopped: it hears the same end. The last use of
    the tag may have been given up, so that the op is the first in its epoch that anybody commits."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._mesh_of(3)
        if len(nodes) != 3:
            return
        if rng.random() < 0.7:
            self._give_up_first(nodes, nodes[0])
        use = nodes[0].uses[nodes[0].view.epoch, TAG]
        third = nodes[use % len(nodes)]  # which has all numbers first, so that the two need nothing but word
        one, other = rng.sample([node for node in nodes if node is not third], 2)
        world.block(one, other)
        ops = self._launch(nodes)
        self._drain()
        if rng.random() < 0.5 and ops[one] in one.results:
            self._word_comes(one, other, third, ops)
            return
        world.break_link(one, other) if rng.random() < 0.5 else world.break_link(other, third)
        self._deliver(rng.choice((0, 5, 20)))
        world.network.blocked.discard((one.name, other.name))
        world.run()
        self._pass(MARGIN_S)
        world.run()
        assert len(self._all_end(ops)) == 1, f"the op ends in different ways: {ops}"
        world.check_rest()
        self._be_whole()

    def _word_comes(self, one: Node, other: Node, third: Node, ops: dict[Node, int]) -> None:
        """The word comes when ops have been stopped, and before the master knows what has become of them: it need not
        be waited for."""
        world = self._world
        for host in world.hosts:
            world.block(third, host.name)
        epoch = other.view.epoch
        world.break_link(other, third)
        self._drain()
        world.network.blocked.discard((one.name, other.name))
        self._drain()
        assert other.view.epoch == epoch
        for node in (one, other):
            assert ops[node] in node.results, f"{node} waits for a master, though all have said that they are done"
            assert node.result(ops[node]) is Result.SUCCESS, f"{node}: {node.results[ops[node]]}"
        for host in world.hosts:
            world.network.blocked.discard((third.name, host.name))
        world.run()
        assert self._all_end(ops) == {Result.SUCCESS}
        self._be_whole()

    def _give_up_first(self, nodes: list[Node], one: Node) -> None:
        """All use the tag once in a new epoch, and nobody commits that."""
        world = self._world
        epoch = one.view.epoch
        while one.view.epoch == epoch:
            world.break_link(nodes[0], nodes[1])
            world.run()
        op = world.launch(one, TAG)
        self._drain()
        world.cancel(one, op)
        world.run()
        self._launch([node for node in nodes if node is not one])
        world.run()


class NeverCalled(_Ops):
    """Some launch an op again and again and give it up, which another one never launches: it is told of that once, and
    the next use of the tag is everybody's."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._mesh_of(rng.choice((2, 3)))
        if not nodes:
            return
        absent = rng.choice(nodes)
        others = [node for node in nodes if node is not absent]
        by = rng.choice(others)
        for _ in range(EARLY_KEPT_MAX + rng.randint(1, 4)):
            op = self._launch(others)[by]
            world.run()
            world.cancel(by, op)
            world.run()
        ops = self._launch(nodes)
        world.run()
        assert self._all_end(ops) == {Result.SUCCESS}, f"{absent} has not called what others gave up, and hears of that"
        self._be_whole()


class WithoutMaster(_Ops):
    """All masters die, at once and for good, until some begin anew."""

    def _kill_all(self, lost: int = LOST) -> None:
        for host in self._world.hosts:
            if not host.is_dead:
                self._world.kill_master(host, lost)
        self._drain()

    def _begin_anew(self) -> None:
        world = self._world
        for host in world.hosts:
            world.restart_master(host)
        self._all_are_led(world.accepted, world.accepted[0].run, LED_TIMEOUTS * self._timeout_s * self._slack)
        world.run()


class HalfFetched(WithoutMaster):
    """A master dies in a sync, when somebody has half of the state that was elected: nobody is given that half."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(rng.choice((3, 4)))
        if not world.masters or any(node.site for node in nodes):
            return
        behind = rng.choice(nodes)
        revision = max(node.revision for node in nodes) + 1
        for node in nodes:
            node.strategy, node.fails_to_fetch = "enforce_popular", False
            if node is not behind:
                node.revision, node.root = revision, b"new"
        calls = {node: world.joint(node, Kind.SYNC) for node in nodes}
        while not behind.root.startswith(b"half"):
            if not world.step():
                break
        behind.fails_to_fetch = True
        self._kill_all()
        behind.fails_to_fetch = False
        self._begin_anew()
        for node, call in calls.items():
            assert call in node.calls, f"{node} waits in a sync, which all have called"
            if node.call(call) is Result.SUCCESS:
                assert node.root == b"new", f"{node} has {node.root!r} after a sync"
        self._be_whole()


class HeardOfNoEnd(WithoutMaster):
    """A master dies when newcomers have come, before it tells that the call is over by which they came."""

    def play(self) -> None:
        world = self._world
        if not world.masters or any(node.site for node in world.alive):
            return
        self._newcomers()
        world.run()
        before = {node: len(node.views) for node in world.accepted}
        calls = {node: world.joint(node, Kind.UPDATE_TOPOLOGY) for node in before}
        self._until_said(m.Install)
        self._kill_all(1)
        for node, call in calls.items():
            if len(node.views) > before[node]:
                assert call in node.calls, f"{node} waits in update_topology, and newcomers have come by it"
        self._begin_anew()
        self._be_whole()


class CancelledSync(_Ops):
    """Callers give a sync up when it has begun: it ends for all as if nobody had."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(rng.choice((2, 3, 4)))
        newest = rng.choice(nodes)
        for node in nodes:
            node.strategy, node.fails_to_fetch = "enforce_popular", False
        ahead = [node for node in nodes if node is newest or rng.random() < 0.6]
        revision = max(node.revision for node in nodes) + 1
        for node in ahead:
            node.revision, node.root = revision, b"new"
        calls = {node: world.joint(node, Kind.SYNC) for node in nodes}
        self._until_said(m.SyncPlan)
        self._deliver(rng.choice((0, 1, 3, 8)))
        for node in self._some(nodes, rng.choice((1, 1, len(nodes)))):
            if calls[node] not in node.calls:
                world.cancel_joint(node, calls[node])
            self._deliver(rng.choice((0, 2)))
        world.run()
        codes = {node.call(call) for node, call in calls.items()}
        assert Result.TIMEOUT not in codes, f"somebody has left a sync that had begun: {codes}"
        self._be_whole()
