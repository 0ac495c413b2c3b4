"""Links that break, are doubted or missing, and cost nobody a place that could keep it."""

from __future__ import annotations

from itertools import combinations

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.simulation.node import Node
from tests.simulation.trials.base import MARGIN_S, TICK_S
from tests.simulation.trials.weak_links import WeakLinks

RELINKS_MAX = 3
"""The number of times that a link is made anew without an op in between."""

HANGS_TIMEOUTS = 5.0
"""Number of peer timeouts in which whoever is to be dialed has given that up under both views."""


class SoundLink(WeakLinks):
    """A link breaks again and again, with ops in between, and is doubted once: it stays. When it then breaks as often
    without any, it is given up, neither sooner nor later."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(rng.choice((3, 4)))
        if not nodes[0].view.is_meshed or any(node.site for node in nodes):
            return
        pair = rng.choice(list(combinations(nodes, 2)))
        for breaks in rng.choice(((1, RELINKS_MAX), (RELINKS_MAX, 1))):
            self._break_often(nodes, pair, breaks)
            self._reduce(nodes)
        if rng.random() < 0.6:
            self._doubt(nodes, rng.choice(pair))
        self._break_often(nodes, pair, RELINKS_MAX)
        self._break(*pair)
        put_out = [node for node in nodes if node.ended is not None]
        assert all(node in pair for node in put_out), f"{put_out} are put out for the link of {pair}"
        is_given_up = put_out or not nodes[0].view.is_meshed
        assert is_given_up, f"the link of {pair} broke {RELINKS_MAX + 1} times, and is made once more"
        self._pass(MARGIN_S)
        world.run()
        self._be_whole()

    def _break_often(self, nodes: list[Node], pair: tuple[Node, Node], times: int) -> None:
        """Have two lose their link so often, and make it anew each time."""
        for _ in range(times):
            self._break(*pair)
            self._nobody_is_lost(nodes)
            for node in nodes:
                assert node.view.is_meshed, f"{node} lacks a mesh, and all links can be made"

    def _doubt(self, nodes: list[Node], behind: Node) -> None:
        """One cannot use those who have a state: its links are tried."""
        world = self._world
        revision = max(node.revision for node in nodes) + 1
        for node in nodes:
            node.strategy, node.fails_to_fetch = "enforce_popular", node is behind
            if node is not behind:
                node.revision, node.root = revision, b"new"
        said = len(world.from_masters)
        calls = {node: world.joint(node, Kind.SYNC) for node in nodes}
        world.run()
        for node, call in calls.items():
            assert node.call(call) is Result.NO_SHARED_STATE_AVAILABLE, f"{node}: {node.calls[call]}"
        tried = [
            {*pair} for _, each in world.from_masters[said:] if isinstance(each, m.Prepare) for pair in each.relink
        ]
        for node in nodes:
            is_tried = node is behind or {node.number, behind.number} in tried
            assert is_tried, f"{behind} could not use {node}, and their link is not tried"
        self._all_succeed(Kind.SYNC)


class FailedOnce(WeakLinks):
    """Two neighbours cannot make their link under one view, and begin anew under the next, which another one's loss
    begins: nobody is put out for what was before. The end that dials may hang then, and only that end can tell."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(4)
        if not nodes[0].view.is_meshed or any(node.site for node in nodes):
            return  # the third one's link is what is waited for
        one, other = rng.choice([pair for pair in combinations(nodes, 2) if self._are_neighbours(*pair)])
        third, gone = rng.sample([node for node in nodes if node not in (one, other)], 2)
        world.network.unreachable.add(frozenset((one.name, other.name)))
        world.cut(one, third)
        world.break_link(one, other)
        self._drain()
        dialer = max(one, other, key=lambda node: node.number)
        hangs = rng.random() < 0.5
        world.leave(gone)
        self._until_said(m.Prepare)
        world.network.unreachable.clear()
        world.heal()
        if hangs:
            world.hang(dialer)
            self._drain()
            self._pass((HANGS_TIMEOUTS * self._timeout_s + MARGIN_S) * self._slack)
            world.thaw(dialer)
        world.run()
        if not hangs:
            self._nobody_is_lost([one, other, third])
        self._pass(MARGIN_S)
        world.run()
        self._be_whole()


class OrderlyEnd(WeakLinks):
    """Some leave, and others find their links closed before the master hears of it: the log tells of no lost link."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(rng.choice((3, 4)))
        if any(node.site for node in nodes):
            return
        logged = len(world.log)
        for node in self._some(nodes, rng.randint(1, len(nodes) - 2)):
            for host in world.hosts:
                world.block(node, host.name)
            world.leave(node)
        self._drain()
        world.heal()
        world.run()
        lost = [line for line in world.log[logged:] if "lost its link" in line]
        assert not lost, f"some have left, and the log tells of lost links: {lost}"
        self._pass(TICK_S)
        self._be_whole()


class NoNeighbours(WeakLinks):
    """A pair goes without a link that was measured while it had one. A newcomer is near to the other two alone, so that
    the fastest ring would have the two be neighbours: it is not adopted."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        nodes = self._company_of(4)
        if len(nodes) != 4 or not nodes[0].view.is_meshed or any(node.site for node in world.alive):
            return
        self._all_succeed(Kind.OPTIMIZE_TOPOLOGY)
        one, other = rng.choice(self._without_need(nodes))
        world.network.unreachable.add(frozenset((one.name, other.name)))
        self._break(one, other)
        newcomer = world.add(nodes[0].group)
        for node in (one, other):
            world.network.rates[node.name, newcomer.name] = world.network.rates[newcomer.name, node.name] = 1e3
        self._admit()
        self._all_succeed(Kind.OPTIMIZE_TOPOLOGY)
        self._nobody_is_lost([*nodes, newcomer])
        assert not self._are_neighbours(one, other), f"{one} and {other} are neighbours, and have no link"
        world.network.unreachable.clear()
        world.network.rates.clear()
        world.run()
        self._be_whole()
