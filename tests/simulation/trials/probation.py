"""A peer whose links fail is put out, comes again, and is let in when it may: see the documents on links that fail."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.types import Result
from tests.simulation.node import Node
from tests.simulation.trials.membership import Membership

WELL_S = 600.0
"""Seconds after which a peer that has been well since the end of its delay begins anew."""
LONG_S = 95.0
BREAKS_MAX = 40
"""More times than a link may break in a row, and it outlives some of these: a connection is replaced in time."""
HOST = "10.2.0.1"
TAG = 16


class Probation(Membership):
    """A newcomer whose links carry nothing is put out for them, and nobody else is. It is held back for longer each
    time, and let in once its links stand. If they fail again it goes, and not one that was always well."""

    def play(self) -> None:
        world = self._world
        group = world.accepted[0].group
        members = world.accepted
        first = self._comes(group)
        self._cut_off_from(first, members)
        self._update_until_it_goes(first)
        self._are_here(members)
        world.kill(first)
        world.run()
        again = self._comes(group)
        self._cut_off_from(again, members)
        self._is_held_back(again)
        self._pass((self._timeout_s + 1.0) * self._slack)  # it tries its links, in vain
        self._is_held_back(again)
        world.heal()
        self._pass(self._timeout_s * self._slack**-1)
        self._is_held_back(again)
        self._pass((self._timeout_s + 3.0) * self._slack)
        self._all_update(but=again)
        assert again.views, f"{again} is well, and is not let in"
        if self._rng.random() < 0.5:
            self._goes_again(again, members)
        elif self._slack == 1.0:
            self._is_well(again, group)

    def _comes(self, group: int) -> Node:
        world = self._world
        node = world.connect(group, host=HOST, alias="again:1")
        world.control_plane.send(node, world.hello(node))
        self._drain()
        return node

    def _cut_off_from(self, node: Node, others: list[Node]) -> None:
        for other in others:
            self._world.cut(node, other)

    def _update_until_it_goes(self, node: Node) -> None:
        world = self._world
        self._make_calls()
        for _ in range(60):
            self._pass(0.5)
            if node.ended is not None:
                break
        assert node.ended is not None, f"{node} has no link with anybody, and stays"
        assert "cannot connect" in node.ended.reason, f"{node}: {node.ended}"
        world.run()

    def _make_calls(self) -> None:
        for node in self._world.accepted:
            self._world.joint(node, m.Kind.UPDATE_TOPOLOGY)

    def _is_held_back(self, node: Node) -> None:
        assert node.machine.obstacle, f"{node} has failed before, and is not told that it has to wait"
        self._all_update(but=node)
        assert not node.views, f"{node} has failed before, and is let in at once"

    def _are_here(self, members: list[Node]) -> None:
        for node in members:
            assert node.ended is None, f"{node} is put out for a newcomer: {node.ended}"

    def _goes_again(self, node: Node, members: list[Node]) -> None:
        """Its link with a neighbour breaks again and again: it was ill before, so it goes."""
        world = self._world
        ring = node.view.ring
        other = world.node_of(ring[ring.index(node.number) - 1])
        if other is node or not node.view.is_meshed:
            return  # a peer that lacks other links is the one to go, whoever was ill before
        ops = [(each, world.launch(each, TAG)) for each in world.ring_nodes(node)]
        world.run()
        for each, op in ops:
            assert each.result(op) is Result.SUCCESS, f"{each}: {each.results[op]}"  # so all links count as sound
        for _ in range(BREAKS_MAX):
            if node.ended is None and other.ended is None:
                world.break_link(node, other)
                world.run()
        assert other.ended is None, f"{other} is put out, and {node} was ill before: {other.ended}"
        assert node.ended is not None, f"the link of {node} and {other} breaks for ever"
        assert other in members
        world.run()

    def _is_well(self, node: Node, group: int) -> None:
        """It has been well for so long that nothing is left of that."""
        world = self._world
        world.kill(node)
        world.run()
        end_at = world.now + WELL_S + 6 * self._timeout_s
        while world.now < end_at:
            world.wait(LONG_S)
            world.run()
        anew = self._comes(group)
        assert anew.number
        assert not anew.machine.obstacle, f"{anew} was well for long, and is held back"
