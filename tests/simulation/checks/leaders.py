"""Checks of leadership, by what masters say to peers.

no peer is taken on twice in one term of a run
where peers know several masters, one process leads a run in a term, whenever that is
where masters keep on disk what they did, no peer is led on that a view in force has left out
no two leaders of a run ever announce a view of the same number, nor ask for a flush of the same number in another term
where peers know several masters, one asks to be followed only with a majority of the last view that it was told of
"""

from __future__ import annotations

from pccl.protocol import messages as m
from tests.simulation.checks.facts import Facts, Leader
from tests.simulation.node import Node


class Leaders:
    def __init__(self, facts: Facts, is_fenced: bool) -> None:
        self._facts = facts
        self._is_recorded = is_fenced
        self._led: set[tuple[Node, int, str, int]] = set()
        """Peers by node and number, with each run and term where they were led."""
        self._views: dict[tuple[str, int], Leader] = {}
        """The leaders that have announced views, by run and number."""
        self._flushes: dict[tuple[str, int], int] = {}
        """The terms where flushes were asked for, by run and number."""

    def leads(self, node: Node, leader: Leader) -> None:
        """Check a master that takes a peer in or on."""
        what = f"{leader.run} in term {leader.term}"
        led = node, node.number, leader.run, leader.term
        assert led not in self._led, f"{node} is led twice in {what}"
        self._led.add(led)
        if self._facts.addresses > 1:
            for other in self._facts.leaders.values():
                is_same = (other.run, other.term) == (leader.run, leader.term)
                assert not is_same or other is leader, f"two masters have led {what}"

    def takes_on(self, node: Node, leader: Leader) -> None:
        """Check a master that goes on with a peer (Resumed)."""
        self.leads(node, leader)
        if not self._is_recorded:
            return
        for other in self._facts.nodes:
            if other.run == leader.run and other.views and node.views:
                last = other.views[-1].view
                is_left_out = last > node.views[-1].view and node.number not in self._facts.listed[last]
                assert not is_left_out, f"{node} was left out of view {last} of {other} and is led again"

    def asks(self, node: Node, told: tuple[int, frozenset[int]], company: list[Node]) -> None:
        """Check a master that asks a node to follow it (VoteRequest), with all of `company` connected to it. `told` is
        the newest view in force that it was told of, with its peers: another master may have put one in force since."""
        if self._facts.addresses == 1:
            return
        view, peers = told
        here = {each.number for each in company if each.run == node.run}
        assert 2 * len(peers & here) > len(peers), f"{node} is asked to follow by few of view {view}"

    def numbers(self, leader: Leader, message: m.Message) -> None:
        """Check that a number is that of one leader: an answer to another, or its view, must not be taken for its."""
        if isinstance(message, m.Prepare):
            other = self._views.setdefault((leader.run, message.view), leader)
            assert other is leader, f"view {message.view} is announced by {leader}, and was by {other}"
        elif isinstance(message, m.Flush):
            term = self._flushes.setdefault((leader.run, message.flush), leader.term)
            assert term == leader.term, f"flush {message.flush} is asked for by {leader}, and was in term {term}"


SPEAKS_TO_ALL = (m.Welcome, m.PreVoteRequest, m.VoteRequest, m.Resumed, m.Elsewhere, m.StartOver, m.Goodbye)
"""Messages of masters to peers that they do not lead yet, or no more."""


def speaks(node: Node, process: int, message: m.Message) -> None:
    """Check that a peer that speaks to a node as its leader is that."""
    is_led = node.leader is not None and node.leader.process == process
    assert is_led or isinstance(message, SPEAKS_TO_ALL), f"{type(message).__name__} to {node}, which it does not lead"
