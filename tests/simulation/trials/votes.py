"""Ops about which peers are asked, or that are stopped, while something that bears on them is still under way."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.node import Node
from tests.simulation.trials.base import MARGIN_S, TICK_S
from tests.simulation.trials.ops import STALLED_S, TAG, WithoutMaster
from tests.simulation.trials.weak_links import WeakLinks


class _Votes(WithoutMaster):
    def _three(self, in_new_epoch: bool = False) -> tuple[Node, Node, Node] | None:
        """Return the peers of a mesh of three: one that has all numbers of the next op first, so that the other two
        need nothing but word of each other, and those. `in_new_epoch`: nobody has committed anything in theirs;
        otherwise they have."""
        nodes = self._mesh_of(3)
        if len(nodes) != 3:
            return None
        if in_new_epoch:
            self._break_until(nodes[0], nodes[1], m.Flush)
            self._world.run()
        else:
            self._launch(nodes)  # the fast path is for tags that have been used
            self._world.run()
        first = nodes[nodes[0].uses[nodes[0].view.epoch, TAG] % 3]
        one, other = self._rng.sample([node for node in nodes if node is not first], 2)
        return first, one, other

    def _say_nothing(self, nodes: list[Node]) -> None:
        """What these say gets to no master."""
        for host in self._world.hosts:
            for node in nodes:
                self._world.block(node, host.name)

    def _hear_nothing(self, nodes: list[Node]) -> None:
        """What masters say gets to none of these."""
        for host in self._world.hosts:
            for node in nodes:
                self._world.block(host.name, node)

    def _end(self, ops: dict[Node, int]) -> Result:
        """All goes on, and the ops end alike. Return how."""
        world = self._world
        world.heal()
        world.run()
        self._pass(MARGIN_S)
        world.run()
        codes = self._all_end(ops)
        assert len(codes) == 1, f"the op ends in different ways: {codes}"
        world.check_rest()
        self._be_whole()
        return codes.pop()


class CommitUnderVote(_Votes):
    """One gives up an op that others have committed. Ops are stopped before the master has counted the votes, or when
    it has, and before an engine has told its machine: all hear of the commit, and of nothing else."""

    def play(self) -> None:
        world = self._world
        found = self._three(in_new_epoch=True)
        if found is None:
            return
        first, one, by = found
        world.block(one, by)
        is_counted = self._rng.random() < 0.5
        if is_counted:
            self._hears_nothing_of_its_engine(first)
        ops = self._launch([first, one, by])
        self._drain()
        if not is_counted:
            self._say_nothing([first, one])
        if ops[by] not in by.results:
            world.cancel(by, ops[by])
        self._drain()
        self._break_until(by, first, m.Flush)
        assert self._end(ops) is Result.SUCCESS, f"{one} has committed an op, and it is aborted"


class PromisedBeforeLaunch(_Votes):
    """One promises not to commit an op that it has yet to launch. Its caller does launch it, and all are done before
    the master has heard of every promise."""

    def play(self) -> None:
        world = self._world
        found = self._three()
        if found is None:
            return
        waiting, one, other = found
        ops = self._launch([waiting])
        self._pass((STALLED_S + 2 * TICK_S) * self._slack)
        self._hear_nothing([other])
        call = world.joint(one, Kind.UPDATE_TOPOLOGY)
        self._drain()
        if call not in one.calls:
            world.cancel_joint(one, call)
        self._drain()
        world.block(one, other)
        ops.update(self._launch([one, other]))
        self._drain()
        world.network.blocked -= {(host.name, other.name) for host in world.hosts}
        self._drain()
        self._end(ops)


class LeftOut(_Votes):
    """One does not make calls that another gives up, the last of them because the first waits in a joint call. It has
    made them once it has launched as many."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._mesh_of(rng.choice((2, 3)))
        if not nodes:
            return
        by, out = rng.sample(nodes, 2)
        for _ in range(rng.choice((1, 1, 2))):
            op = self._launch([by])[by]
            self._drain()
            if op not in by.results:
                world.cancel(by, op)
            world.run()
        op = self._launch([by])[by]
        self._pass((STALLED_S + 2 * TICK_S) * self._slack)
        call = world.joint(out, Kind.UPDATE_TOPOLOGY)
        world.run()
        assert out.call(call) is Result.INVALID_USAGE, f"{out} waits in update_topology, and {by} for it in an op"
        assert by.result(op) is Result.INVALID_USAGE, f"{by} waits in an op, and {out} for it in update_topology"
        use = by.view.epoch, TAG
        for node in nodes:
            while node.uses[use] < by.uses[use]:
                late = self._launch([node])[node]
                world.run()
                assert late in node.results, f"{node} waits in an op that {by} has given up"
        ops = self._launch(nodes)
        assert self._end(ops) is Result.SUCCESS


class LaterAbort(_Votes):
    """One hears that the next use of a tag was given up before it has the last word on this one. The next master hears
    of both."""

    def play(self) -> None:
        world = self._world
        found = self._three() if world.masters else None
        if found is None:
            return
        first, one, other = found
        world.block(one, other)
        self._launch([first, one, other])
        self._drain()
        later = self._launch([one])
        self._drain()
        if later[one] not in one.results:
            world.cancel(one, later[one])
        self._drain()
        world.heal()
        self._drain()
        self._kill_all()
        self._begin_anew()
        later.update(self._launch([first, other]))
        assert self._end(later) is Result.TIMEOUT


class StoppedAgain(_Votes):
    """Ops are stopped of which one is committed since somebody has committed it. In the next epoch one of the same name
    is stopped that not all are done with: it is aborted."""

    def play(self) -> None:
        world = self._world
        found = self._three(in_new_epoch=True)
        if found is None:
            return
        first, one, other = found
        nodes = [first, one, other]
        world.block(one, other)
        ops = self._launch(nodes)
        self._drain()
        self._break_until(other, first, m.Flush)
        world.heal()
        world.run()
        assert self._all_end(ops) == {Result.SUCCESS}, f"{one} has committed an op, and it is aborted"
        world.engines.held_back = {self._rng.choice(nodes).name}
        ops = self._launch(nodes)
        self._drain()
        self._break_until(one, other, m.Flush)
        world.run()
        world.engines.release()
        assert self._end(ops) is Result.RANK_CONNECTION_LOST


class OldQuestion(_Votes):
    """All are asked whether an op may be given up, and newcomers come before they have answered. That question is over
    with its epoch, and another one can be asked about an op of the same name."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._mesh_of(rng.choice((2, 3)))
        if not nodes or any(node.site for node in world.alive):
            return
        late = rng.choice(nodes)
        use = late.uses[late.view.epoch, TAG]
        self._hears_nothing_of_its_engine(late)
        ops = self._launch(nodes)
        self._drain()
        self._pass((STALLED_S + 2 * TICK_S) * self._slack)
        world.add(late.group)
        self._drain()
        self._hear_nothing(world.accepted)
        calls = {node: world.joint(node, Kind.UPDATE_TOPOLOGY) for node in world.accepted if node is not late}
        self._drain()
        world.network.blocked.discard((late.name, late.name))
        self._drain()
        calls[late] = world.joint(late, Kind.UPDATE_TOPOLOGY)
        self._drain()
        world.heal()
        world.run()
        assert self._all_end(ops) == {Result.SUCCESS}
        for node, call in calls.items():
            assert call in node.calls, f"{node} waits in update_topology, which all have called"
        self._ask_again(late, use)

    def _ask_again(self, one: Node, use: int) -> None:
        """Have one give up the op of this use, which another one is not done with."""
        world = self._world
        nodes = world.ring_nodes(one)
        while one.uses[one.view.epoch, TAG] < use:
            self._launch(nodes)
            world.run()
        late, by = self._rng.sample(nodes, 2)
        world.engines.held_back = {late.name}
        ops = self._launch(nodes)
        self._drain()
        if ops[by] not in by.results:
            world.cancel(by, ops[by])
        self._drain()
        assert self._all_end(ops), f"{ops} do not end"
        world.engines.release()
        self._end(ops)


class GivenUpTwice(WeakLinks):
    """Two give up an op at the same moment, in a group whose master ends all ops: it is aborted once."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(4)
        pairs = self._without_need(nodes)
        if not pairs:
            return
        pair = rng.choice(pairs)
        world.network.unreachable.add(frozenset((pair[0].name, pair[1].name)))
        self._break(*pair)
        late, *others = rng.sample(nodes, len(nodes))
        ops = {node: world.launch(node, TAG) for node in others}
        self._deliver(rng.choice((0, 10, 40)))
        for node in rng.sample(others, 2):
            if ops[node] not in node.results:
                world.cancel(node, ops[node])
        ops[late] = world.launch(late, TAG)
        world.run()
        codes = {node.result(op) for node, op in ops.items()}
        assert len(codes) == 1, f"the op ends in different ways: {codes}"
        world.network.unreachable.clear()
        self._nobody_is_lost(nodes)
        self._be_whole()
