"""The group calls of a simulated run, and what they have peers do: fetch shared state and measure links.

Shared state is a root and a revision; a fetch copies a donor's root.
"""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.peer import effects as ps
from pccl.types import Result
from tests.simulation.node import Node
from tests.simulation.peers import Peers
from tests.simulation.scene import Scene

FETCHED_BLOCKS = 3


class GroupCalls:
    def __init__(self, scene: Scene, peers: Peers) -> None:
        self._scene = scene
        self._peers = peers
        peers.on(ps.CallResult, self._ended)
        peers.on(ps.RunSync, self._run_sync)
        peers.on(ps.RunProbe, lambda node, effect: scene.events.later(node, lambda: self._probe(node, effect)))

    def call(self, node: Node, kind: str) -> int:
        call = node.next()
        node.kinds[call] = kind
        self._peers.take_over(node)
        node.machine.group_call(call, kind, self.offer(node) if kind == m.Kind.SYNC else None)
        self._peers.settle(node)
        return call

    def offer(self, node: Node) -> m.SyncOffer:
        tensors = [m.TensorOffer("weights", "float32", [2, 3], False), m.TensorOffer("loss", "float32", [1], True)]
        return m.SyncOffer(node.strategy, node.revision, node.root, tensors)

    def cancel(self, node: Node, call: int) -> None:
        if call not in node.calls:
            node.given_up.add(call)
        self._peers.take_over(node)
        node.machine.cancel_group_call(call)
        self._peers.settle(node)

    def _ended(self, node: Node, effect: ps.CallResult) -> None:
        assert effect.call not in node.calls
        self._scene.checks.call_ends(node, effect.call, effect.code)
        node.calls[effect.call] = effect
        kind = node.kinds[effect.call]
        if node.in_call == kind:
            node.in_call = None
        if kind == m.Kind.SYNC:
            node.serving = 0
            if effect.code is Result.SUCCESS:
                node.revision = effect.value

    def _run_sync(self, node: Node, effect: ps.RunSync) -> None:
        node.plans.append(effect)
        node.serving = effect.plan.sync
        if not node.serves:
            node.machine.sync_ended(effect.plan.sync, False, "its caller gave the sync up", [])
        elif effect.plan.fetch_content or effect.plan.fetch_loose:
            call = next(call for call in node.open_calls if node.kinds[call] == m.Kind.SYNC)
            self._scene.events.later(node, lambda: self._fetch(node, effect, call, FETCHED_BLOCKS, []))

    def _fetch(self, node: Node, effect: ps.RunSync, call: int, blocks: int, suspects: list[tuple[int, str]]) -> None:
        """Have one more block come from a donor; the last one ends the transfer."""
        scene, plan = self._scene, effect.plan
        if not node.is_reachable or call in node.calls or node.serving != plan.sync:
            return
        giver = None
        for donor in (scene.node_of(member.peer) for member in effect.donors):
            if donor.number in dict(suspects):
                continue
            is_cut = scene.network.is_cut(node, donor)
            if not donor.is_reachable or donor.is_frozen or not donor.serves or is_cut:
                suspects.append((donor.number, "connection refused"))
            elif donor.serving < plan.sync:
                donor.deferred.append(lambda: self._fetch(node, effect, call, blocks, suspects))
                return
            elif donor.serving > plan.sync or node.fails_to_fetch:
                suspects.append((donor.number, "rejected"))
            else:
                giver = donor
                break
        if giver is not None:
            assert giver.strategy != "receive_only"
            assert node.strategy != "send_only" or not plan.fetch_content
            assert giver.root == plan.root
            is_last = blocks == 1
            if plan.fetch_content:
                node.root = giver.root if is_last else b"half " + giver.root
            if not is_last:
                scene.events.later(node, lambda: self._fetch(node, effect, call, blocks - 1, suspects))
                return
            if plan.fetch_loose:
                node.loose = giver.loose
        reason = "" if giver is not None else "no donor is left"
        node.machine.sync_ended(plan.sync, giver is not None, reason, suspects)
        self._peers.settle(node)

    def _probe(self, node: Node, effect: ps.RunProbe) -> None:
        scene, network = self._scene, self._scene.network
        if not node.is_reachable:
            return
        found = []
        for link in effect.links:
            other = scene.node_of(link.member.peer)
            way = (other.name, node.name) if link.is_inbound else (node.name, other.name)
            if other.is_reachable and not network.is_unreachable(node, other) and not network.is_cut(node, other):
                rate, cost = network.rates.get(way, 1e6), network.costs.get(frozenset(way), 100)
                found.append(m.LinkMetric(other.number, link.is_inbound, rate, cost))
        node.machine.probed(effect.probe, found, scene.clock(node))
        self._peers.settle(node)
