"""Checks of group calls and of what syncs lead to, by the results that masters send and the contents that peers hold.

a group call ends in the same way for all of its group, and succeeds only with all
one that has ended for some under one master ends in the same way for the rest under the next
after a sync contents are the same, and its revision does not go back while a peer of the last one is there
no peer that only sends is overwritten, no peer that only receives is a source, and no newcomer outvotes those that
were there before
"""

from __future__ import annotations

from collections.abc import Iterator

from pccl.protocol import messages as m
from pccl.types import Result
from tests.simulation.checks.facts import Facts, Leader
from tests.simulation.node import Node

Call = tuple[str, int, str, int]
"""The name of a group call: run, number, kind, and the group where one group makes it alone."""
Outcome = tuple[int, int, bytes]
"""The end of a group call: code, value, and the content after a sync."""
Sync = tuple[int, dict[Node, int]]
"""The revision that a sync has elected, and its peers with the numbers of their calls."""


class GroupCalls:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._offers: dict[Node, m.SyncOffer] = {}
        """The offers of peers at their last sync."""
        self._ended: dict[Call, Outcome] = {}
        self._unheard: dict[Call, Outcome] = {}
        """Those unknown to all peers of the last master. The next one may lead a peer that knows them."""
        self._synced: dict[tuple[str, int], list[Sync]] = {}
        """All syncs by run and group."""
        self._unheard_syncs: dict[tuple[str, int], list[Sync]] = {}
        """The same of `_synced`, the last first."""

    def offered(self, node: Node, process: int, offer: m.SyncOffer) -> None:
        """Note an offer that a master hears. A former master of the peer's may hear an older one later."""
        if node.leader is not None and node.leader.process == process:
            self._offers[node] = offer

    def planned(self, node: Node, plan: m.SyncPlan) -> None:
        """Check the plan of a sync that a peer is told."""
        ours = self._offers[node]
        assert not (plan.fetch_content and ours.strategy == "send_only"), f"{node} only sends and is overwritten"
        assert plan.fetch_content == (ours.root != plan.root)
        assert plan.donors
        for donor, offer in self._offers.items():
            if donor.number in plan.donors and donor.is_known:
                assert offer.strategy != "receive_only", f"{donor} only receives and is a donor"
                assert (offer.revision, offer.root) == (plan.revision, plan.root)

    def failed_over(self, leader: Leader) -> None:
        """Note that another master goes on with a run, and what is unknown to all its peers."""
        ended = max((node.call_heard for node, _ in leader.followers), default=0)
        for key in [key for key in self._unheard if key[0] == leader.run and key[1] <= ended]:
            self._ended.setdefault(key, self._unheard.pop(key))
        for key in [key for key in self._ended if key[0] == leader.run and key[1] > ended]:
            self._unheard[key] = self._ended.pop(key)

        def is_heard(sync: Sync) -> bool:
            return any(call in node.calls and (node, node.number) in leader.followers for node, call in sync[1].items())

        for group, syncs in self._synced.items():
            if group[0] != leader.run:
                continue
            unheard = self._unheard_syncs.setdefault(group, [])
            while unheard and is_heard(unheard[-1]):
                syncs.append(unheard.pop())
            while syncs and not is_heard(syncs[-1]):
                unheard.append(syncs.pop())

    def results(
        self, leader: Leader, results: list[tuple[Node, m.GroupCallResult]], accepted: list[Node], is_whole: bool
    ) -> None:
        """Check the results that one event has led to. `accepted` are the peers that this master led before it. If it
        `is_whole`, there are no others."""
        fresh = []
        for node, result in results:
            call = self._call(leader, node, result)
            known = self._ended.get(call)
            if self._facts.is_one_name and (known is not None or call in self._unheard):
                continue  # of this part of the run, or of another, which goes on counting by itself
            if known is None:
                fresh.append((node, result))
            else:
                outcome = self._outcome(node, result)
                assert known == outcome, f"{node}: {result} instead of {outcome}"
        for node, result in fresh:
            if result.call_number:
                for key in [key for key in self._unheard if key[0] == leader.run and key[1] >= result.call_number]:
                    del self._unheard[key]
                self._ended[self._call(leader, node, result)] = self._outcome(node, result)
        for kind in m.Kind.ALL:
            of_kind = [(node, result) for node, result in fresh if node.kinds[result.call] == kind]
            for group in {node.group for node, _ in of_kind}:
                outcomes = {(result.code, result.value) for node, result in of_kind if node.group == group}
                assert len(outcomes) == 1, f"{kind} ended in different ways: {of_kind}"
            succeeded = {node: result for node, result in of_kind if result.code == Result.SUCCESS}
            if kind == m.Kind.SYNC:
                for group in {node.group for node in succeeded}:
                    members = {node: result.call for node, result in succeeded.items() if node.group == group}
                    if not is_whole:
                        members |= {node: call for node, call in self._waiting(accepted, group) if node not in members}
                    # A peer that closed while the master stood still is not told any more.
                    gone = set() if is_whole else {node for node in accepted if node.ended is not None}
                    assert set(members) | gone >= {node for node in accepted if node.group == group} >= set(members)
                    self._synced_to((leader.run, group), members, next(succeeded[node] for node in members).value)
            elif kind == m.Kind.ARE_PEERS_PENDING and not any(result.value > 0 for result in succeeded.values()):
                pass  # 'no' is also the answer to some when the others wait for what excludes this call
            else:
                is_by_all = not succeeded or set(succeeded) == set(accepted)
                # The rest may have heard of it by its view alone, from a master that died before it could say so.
                is_by_view = kind == m.Kind.UPDATE_TOPOLOGY and self._facts.has_failed_over
                assert is_by_all or is_by_view or not is_whole, f"{kind} succeeded without all"

    def _waiting(self, nodes: list[Node], group: int) -> Iterator[tuple[Node, int]]:
        """Yield the peers of a group that wait in a sync, with the numbers of their calls."""
        for node in nodes:
            for call in node.open_calls:
                if node.group == group and node.kinds[call] == m.Kind.SYNC:
                    yield node, call

    def _call(self, leader: Leader, node: Node, result: m.GroupCallResult) -> Call:
        kind = node.kinds[result.call]
        return leader.run, result.call_number, kind, node.group if kind == m.Kind.SYNC else 0

    def _outcome(self, node: Node, result: m.GroupCallResult) -> Outcome:
        has_synced = node.kinds[result.call] == m.Kind.SYNC and result.code == Result.SUCCESS
        return result.code, result.value, node.root if has_synced else b""

    def _synced_to(self, group: tuple[str, int], members: dict[Node, int], revision: int) -> None:
        """`members` have succeeded, each in this call of its own."""
        assert len({node.root for node in members}) == 1, f"different contents after a sync: {members}"
        for node in members:
            offer = self._offers[node]
            assert offer.strategy != "send_only" or offer.root == node.root, f"{node} only sends and was overwritten"
        syncs = self._synced.setdefault(group, [])
        before, incumbents = syncs[-1] if syncs else (0, {})
        if self._facts.is_one_name and not incumbents.keys() >= members.keys():
            before, incumbents = 0, {}  # they may be of another part
        if any(node in incumbents for node in members):
            assert revision >= before, "an elected revision went back"
        senders = {node: offer.revision for node, offer in self._offers.items() if offer.strategy != "receive_only"}
        if any(node in incumbents and node in senders for node in members):
            # Also of those lost since, whose content may be here already.
            of_seniors = {senders[node] for node in incumbents if node in senders}
            assert revision in of_seniors, f"revision {revision} was brought by a newcomer; incumbents: {of_seniors}"
            assert revision >= max(senders[node] for node in members if node in incumbents and node in senders)
        syncs.append((revision, members))
        self._unheard_syncs.pop(group, None)
