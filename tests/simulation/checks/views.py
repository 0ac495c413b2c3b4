"""Checks of membership, as callers see it.

a view is newer than the last one that the same peer has had, and is in force only once its links were up
peers in one view see the same rings, the same sizes of groups, and the same answer to whether all pairs have a link
no site is in a view in part, except for peers that have left on purpose
"""

from __future__ import annotations

from itertools import permutations

from pccl.protocol import messages as m
from pccl.protocol.peer import effects as ps
from pccl.protocol.topology import RingProblem
from pccl.runtime.master.ring_search import matrices, price
from tests.simulation.checks.facts import Epoch, Facts, IsLinked, Leader
from tests.simulation.checks.verdicts import Verdicts
from tests.simulation.node import Node


class Views:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self.meshed: dict[Epoch, bool] = {}
        """Whether all pairs have a link."""
        self._sizes: dict[int, dict[int, int]] = {}
        """The sizes of every view's groups."""
        self._whole: set[int] = set()
        """The views whose sites have been looked at."""

    def installed(self, node: Node, effect: ps.Installed) -> None:
        """Check a view that a peer's callers are told of."""
        view = effect.view
        assert view.peer == node.number
        assert self._facts.rings[view.group, view.epoch] == view.ring
        assert sum(view.group_sizes.values()) == len(self._facts.listed[view.view])
        assert self._sizes.setdefault(view.view, view.group_sizes) == view.group_sizes
        assert self.meshed.setdefault((view.group, view.epoch), view.is_meshed) == view.is_meshed
        before = node.views[-1] if node.views else None
        assert before is None or view.view > before.view
        if before is None or view.epoch != before.epoch:
            assert node.ready == view.view, f"{node} is in view {view.view} and has not said LinksReady"
        node.views.append(view)
        again = {peer for peer, _ in effect.lost} & {peer for peer, _ in node.lost}
        assert not again, f"{node} is told again that {again} are lost"
        node.lost += effect.lost

    def puts_in_force(self, message: m.Install) -> None:
        """Check a view that a master puts in force."""
        listed = self._facts.listed.get(message.view)
        assert listed is not None, f"view {message.view} is put in force and was never announced"
        if message.view in self._whole:
            return
        self._whole.add(message.view)
        sites: dict[str, list[Node]] = {}
        for node in self._facts.nodes:
            if node.site:
                sites.setdefault(node.site, []).append(node)
        for site, members in sites.items():
            here = [node for node in members if node.number in listed]
            left = [node for node in members if node.has_left and node not in here]
            assert not here or len(here + left) == here[0].site_size, f"only {here} of {site}"


TRIED_OUT_PEERS_MAX = 6


def check_ring(problem: RingProblem, ring: list[int]) -> None:
    assert sorted(ring) == sorted(problem.ring)
    if not 3 <= len(ring) <= TRIED_OUT_PEERS_MAX:
        return
    grades, latencies = matrices(problem)
    order = [problem.ring.index(peer) for peer in ring]
    for rival in permutations(range(1, len(ring))):
        assert price(grades, latencies, order) <= price(grades, latencies, [0, *rival]), f"not {ring}: {problem}"


# Checks of leadership, by what masters say to peers.


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


# Checks of a run at rest, with no peer frozen or cut off: no peer waits for what no other peer could bring about.


class Rest:
    def __init__(self, facts: Facts, verdicts: Verdicts) -> None:
        self._facts = facts
        self._verdicts = verdicts

    def check(self, accepted: list[Node], is_linked: IsLinked, may_ops_wait: bool) -> None:
        for node in self._facts.nodes:
            if node.ended is not None and node.is_alive and not node.is_frozen:
                assert not node.open_ops + node.open_calls, f"{node} is over and still waits"
        for node in accepted:
            self._view_at_rest(node, accepted)
            ring = [next(other for other in accepted if other.number == number) for number in node.view.ring]
            self._links_at_rest(node, ring, is_linked)
            if not may_ops_wait:
                self._ops_at_rest(node, ring)
        self._calls_at_rest(accepted)

    def _view_at_rest(self, node: Node, accepted: list[Node]) -> None:
        view, leader = node.view, node.leader
        assert leader is accepted[0].leader, f"{node} and {accepted[0]} follow different masters"
        assert leader is not None
        assert leader.prepared <= view.view, f"view {leader.prepared} was announced and never comes into force"
        assert view.view == accepted[0].view.view, f"{node} and {accepted[0]} are in different views"
        assert self._facts.listed[view.view] == {each.number for each in accepted}
        epoch = view.group, view.epoch
        is_flushed = epoch in self._verdicts.flushed or epoch in self._verdicts.survivors
        assert not is_flushed, f"group {view.group} was flushed, and its epoch is in force still"
        assert view.global_world_size == len(accepted)

    def _links_at_rest(self, node: Node, ring: list[Node], is_linked: IsLinked) -> None:
        others = ring if node.view.is_meshed else [ring[(ring.index(node) + 1) % len(ring)]]
        for other in others:
            if other is not node:
                ours = [number for number, link in node.links.items() if link.effect.member.peer == other.number]
                theirs = [number for number, link in other.links.items() if link.effect.member.peer == node.number]
                assert len(ours) == len(theirs) == 1
                assert is_linked(node, ours[0], other, theirs[0]), f"no link between {node} and {other}"

    def _ops_at_rest(self, node: Node, ring: list[Node]) -> None:
        waits_exclusively = any(node.kinds[call] in m.Kind.EXCLUSIVE for call in node.open_calls)
        for op in node.open_ops:
            if op not in node.keys:
                assert waits_exclusively, f"op {op} of {node} never starts"
            else:
                assert node.keys[op] in node.submitted, f"op {op} of {node} is over, and its caller waits still"
        for key, effect in node.submitted.items():
            involved = self._facts.participants(key, ring)
            assert not all(key in each.submitted for each in involved), f"op {effect.op} of {node}, {key}, hangs"

    def _calls_at_rest(self, accepted: list[Node]) -> None:
        waits = {node: node.kinds[node.open_calls[0]] for node in accepted if node.open_calls}
        for group in {node.group for node in accepted}:
            kinds = {waits.get(node) for node in accepted if node.group == group}
            assert None in kinds or (len(kinds) == 1 and m.Kind.SYNC not in kinds), f"group {group} hangs: {waits}"
        assert not accepted or len(waits) < len(accepted), f"all wait: {waits}"
