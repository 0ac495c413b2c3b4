"""Checks of a run at rest, with no peer frozen or cut off: no peer waits for what no other peer could bring about.

all peers that are in the run are in one view, which is the last one that was announced, and no flush is under way
neighbours are linked
an op or a call waits only for peers that have not made theirs
a peer that has ended waits no longer
"""

from __future__ import annotations

from pccl.protocol import messages as m
from tests.simulation.checks.facts import Facts, IsLinked
from tests.simulation.checks.verdicts import Verdicts
from tests.simulation.node import Node


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
