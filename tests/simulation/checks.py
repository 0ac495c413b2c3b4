"""Checks of what must hold in every run, made without any code of the machines.

`Checks` is told of what the master hears and says and of what peers are to carry out, and raises AssertionError for

    an op with two verdicts, one committed that a peer of the run lacks, one aborted that all survivors of a flush hold
    a committed op whose buffer does not hold exactly one contribution of each peer of the ring, and the same on all
    an aborted op whose buffer is not as its caller gave it
    an op that a flush has ended and that returns before the next view is in force
    an epoch with two rings, or one that is a mesh to some peers only
    a view that is not newer than the last, or one in force before its links were up
    a joint call that ended differently in a group, or succeeded without all
    two masters that lead a run in one term at a time, or that one peer follows in one term
    a peer that is led on though a view in force has left it out, where masters keep on disk what they did
    a peer that is asked to follow a master to which no majority of the run's last view has come
    a joint call that ends for some under one master and in another way for the rest under the next
    a sync after which contents differ, or whose revision went back while somebody of the last one was there, or that
    overwrote who only sends, took from who only receives, or let a newcomer outvote those who were there before

`rest` looks for waits that nothing will end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import permutations

from pccl.protocol import messages as m
from pccl.protocol import peer as ps
from pccl.protocol.master.machine import Master
from pccl.protocol.point_to_point import participants
from pccl.protocol.ring_problem import RingProblem
from pccl.runtime.master.ring_search import matrices, price
from pccl.types import Result
from tests.simulation.node import Key, Node, Value

TRIED_OUT_PEERS_MAX = 6
REFUSALS = re.compile(r"peer \d+ has left; call again|there is no link with peer \d+")
"""The errors of point-to-point ops that cannot start."""


class Checks:
    def __init__(self, nodes: list[Node]) -> None:
        self.verdicts: dict[Key, dict[str, Result]] = {}
        """Every op's verdicts, by the name of the peer that heard them."""
        self._nodes = nodes
        self._rings: dict[tuple[int, int], tuple[int, ...]] = {}
        """Every ring, by group and epoch."""
        self.meshed: dict[tuple[int, int], bool] = {}
        """Whether all pairs have a link, by group and epoch."""
        self._sizes: dict[int, dict[int, int]] = {}
        """The sizes of every view's groups."""
        self._flushes: dict[int, tuple[int, int]] = {}
        """Group and epoch of every flush."""
        self._flushed: dict[tuple[int, int], set[Node]] = {}
        """The peers that have answered a flush that is under way, by group and epoch."""
        self._survivors: dict[tuple[int, int], set[Node]] = {}
        """The peers whose answers a flush ended with, by group and epoch."""
        self._values: dict[Key, Value] = {}
        """The result of every committed op, the same on all peers."""
        self._listed: dict[int, set[int]] = {}
        """All peers that a view was to have, by its number."""
        self._offers: dict[Node, m.SyncOffer] = {}
        """The offers with which peers came to their last sync."""
        self._synced: dict[tuple[str, int], list[tuple[int, dict[Node, int]]]] = {}
        """The elected revisions by run and group, each with the peers that took part and the numbers of their calls."""
        self._led: dict[tuple[str, int], set[tuple[Node, int]]] = {}
        """The peers that a master has led, with their numbers then, by run and term."""
        self._interrupted: set[tuple[int, int]] = set()
        """Groups and epochs whose master died when some peers had heard all verdicts and some had not."""
        self._joint_calls: dict[tuple[str, int, str, int], tuple[int, int, bytes]] = {}
        """The ends of joint calls, and the content after a sync, by run, number, kind and group."""
        self._unheard: dict[tuple[str, int, str, int], tuple[int, int, bytes]] = {}
        """Those that nobody has heard who went on with the last master. The next one may lead somebody who has."""
        self._unheard_syncs: dict[tuple[str, int], list[tuple[int, dict[Node, int]]]] = {}
        """The same of `_synced`, the last first."""
        self.has_failed_over = False

    # What the master hears and says.

    def received(self, node: Node, message: m.Message) -> None:
        if isinstance(message, m.FlushReply) and message.flush in self._flushes:
            self._flushed.get(self._flushes[message.flush], set()).add(node)
            self._note_survivors()
        elif isinstance(message, m.JointCall) and message.offer is not None:
            self._offers[node] = message.offer

    def failed_over(self, master: Master, nodes: list[Node], rivals: list[Master], is_fenced: bool) -> None:
        """Note that a master has taken a run over. `rivals` lead elsewhere, for all they know. Where it `is_fenced`,
        nobody whom a later view has left out goes on."""
        what = f"{master.run} in term {master.term}"
        assert all((each.run, each.term) != (master.run, master.term) for each in rivals), f"two masters lead {what}"
        # Where all who were left with the first are gone with it, one whom it had lost may go on with another.
        led = self._led.setdefault((master.run, master.term), set())
        members = {(node, node.number) for node in nodes if node.is_alive and node.number in master.state.members}
        assert led.isdisjoint(members), f"two masters have led {led & members} of {what}"
        led |= members
        for node, number in members if is_fenced else ():
            for other in nodes:
                if other.machine.run == master.run and other.views and node.views:
                    last = other.views[-1]
                    is_left_out = last.view > node.views[-1].view and number not in self._listed.get(
                        last.view, (number,)
                    )
                    assert not is_left_out, f"{node} was left out of view {last.view} of {other} and is led again"
        self._forget_unheard_syncs(master, nodes)
        self.has_failed_over = True
        for node in nodes:
            if node.machine.run == master.run and node.machine.view is not None:
                prepared = node.machine.views.prepared
                if prepared is not None and prepared.ring.epoch != node.view.epoch:
                    self._interrupted.add((node.group, node.view.epoch))
        for node in nodes:
            if node.machine.run in ("", master.run):  # another master may lead a run that newcomers have founded
                node.is_known = node.number in master.state.members
        self._note_survivors()
        ended = master.state.joint_calls_ended
        for key in [key for key in self._unheard if key[0] == master.run and key[1] <= ended]:
            self._joint_calls.setdefault(key, self._unheard.pop(key))
        for key in [key for key in self._joint_calls if key[0] == master.run and key[1] > ended]:
            self._unheard[key] = self._joint_calls.pop(key)

    def _forget_unheard_syncs(self, master: Master, nodes: list[Node]) -> None:
        """Forget the last syncs if nobody of those who go on has heard that they succeeded, until somebody does who
        has."""

        def is_heard(sync: tuple[int, dict[Node, int]]) -> bool:
            return any(call in node.calls and node.number in master.state.members for node, call in sync[1].items())

        for key, syncs in self._synced.items():
            if key[0] != master.run:
                continue
            unheard = self._unheard_syncs.setdefault(key, [])
            while unheard and is_heard(unheard[-1]):
                syncs.append(unheard.pop())
            while syncs and not is_heard(syncs[-1]):
                unheard.append(syncs.pop())

    def asked_to_follow(self, node: Node, company: list[Node]) -> None:
        """Check that a master which asks a node to follow it has a majority of the run's last view in `company`."""
        views = [each for each in self._nodes if each.machine.run == node.machine.run and each.machine.view is not None]
        last = max(views, key=lambda each: each.view.view)
        peers = {peer for ring in last.machine.views.rings for peer in ring.peers}
        here = {each.number for each in company}
        assert 2 * len(peers & here) > len(peers), f"{node} is asked to follow by few of view {last.view.view}"

    def gone(self, node: Node) -> None:
        """The master has lost it, evicted it or let it go."""
        node.is_known = False
        self._note_survivors()

    def sent(self, node: Node, message: m.Message) -> None:
        if isinstance(message, m.Welcome):
            node.former_numbers.append(node.number)
            node.number = message.peer
            node.is_known = True
            node.is_accepted = False
        elif isinstance(message, m.Install):
            node.is_accepted = True
        elif isinstance(message, m.Prepare):
            self._listed[message.view] = {peer for ring in message.rings for peer in ring.peers}
            for ring in message.rings:
                assert self._rings.setdefault((ring.group, ring.epoch), tuple(ring.peers)) == tuple(ring.peers)
        elif isinstance(message, m.Flush):
            self._flushes[message.flush] = node.group, message.epoch
            self._flushed.setdefault((node.group, message.epoch), set())
        elif isinstance(message, m.SyncPlan):
            self._planned(node, message)

    def _planned(self, node: Node, plan: m.SyncPlan) -> None:
        ours = self._offers[node]
        assert not (plan.fetch_content and ours.strategy == "send_only"), f"{node} only sends and is overwritten"
        assert plan.fetch_content == (ours.root != plan.root)
        assert plan.donors
        for donor, offer in self._offers.items():
            if donor.number in plan.donors and donor.is_known:
                assert offer.strategy != "receive_only", f"{donor} only receives and is a donor"
                assert (offer.revision, offer.root) == (plan.revision, plan.root)

    def _note_survivors(self) -> None:
        for epoch, answered in list(self._flushed.items()):
            survivors = set(self._known(epoch))
            if survivors <= answered:
                self._survivors[epoch] = survivors
                del self._flushed[epoch]

    def _participants(self, key: Key, nodes: Iterable[Node]) -> list[Node]:
        """Return those of `nodes` that take part in an op."""
        involved = participants(key[2], self._rings[key[:2]])
        return [node for node in nodes if node.number in involved]

    def _known(self, epoch: tuple[int, int]) -> list[Node]:
        """The peers of a ring that the master knows."""
        return [node for node in self._nodes if node.is_known and node.number in self._rings[epoch]]

    def joint_results(self, run: str, results: list[tuple[Node, m.JointResult]], accepted: list[Node]) -> None:
        """Check the results that one event has led to. `accepted` are those who were so before it."""
        repeated = [each for each in results if self._joint_call(run, *each) in self._joint_calls]
        for node, result in repeated:
            outcome = self._outcome(node, result)
            assert self._joint_calls[self._joint_call(run, node, result)] == outcome, (
                f"{node}: {result} instead of {outcome}"
            )
        results = [each for each in results if each not in repeated]
        for node, result in results:
            if result.call_number:
                for key in [key for key in self._unheard if key[0] == run and key[1] >= result.call_number]:
                    del self._unheard[key]
                self._joint_calls[self._joint_call(run, node, result)] = self._outcome(node, result)
        for kind in m.Kind.ALL:
            of_kind = [(node, result) for node, result in results if node.kinds[result.call] == kind]
            for group in {node.group for node, _ in of_kind}:
                outcomes = {(result.code, result.value) for node, result in of_kind if node.group == group}
                assert len(outcomes) == 1, f"{kind} ended in different ways: {of_kind}"
            succeeded = {node: result for node, result in of_kind if result.code == Result.SUCCESS}
            if kind == m.Kind.SYNC:
                for group in {node.group for node in succeeded}:
                    members = {node: result.call for node, result in succeeded.items() if node.group == group}
                    assert set(members) == {node for node in accepted if node.group == group}
                    self._synced_to((run, group), members, next(succeeded[node] for node in members).value)
            elif kind == m.Kind.ARE_PEERS_PENDING and not any(result.value for result in succeeded.values()):
                pass  # 'no' is also the answer to some when the others wait for what excludes this call
            else:
                assert not succeeded or set(succeeded) == set(accepted), f"{kind} succeeded without all"

    def _joint_call(self, run: str, node: Node, result: m.JointResult) -> tuple[str, int, str, int]:
        kind = node.kinds[result.call]
        return run, result.call_number, kind, node.group if kind == m.Kind.SYNC else 0

    def _outcome(self, node: Node, result: m.JointResult) -> tuple[int, int, bytes]:
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

    def ring_found(self, problem: RingProblem, ring: list[int]) -> None:
        """No ring is better for what is known, tried out where they are few."""
        assert sorted(ring) == sorted(problem.ring)
        if not 3 <= len(ring) <= TRIED_OUT_PEERS_MAX:
            return
        grades, latencies = matrices(problem)
        order = [problem.ring.index(peer) for peer in ring]
        for rival in permutations(range(1, len(ring))):
            assert price(grades, latencies, order) <= price(grades, latencies, [0, *rival]), f"not {ring}: {problem}"

    def sites(self, master: Master, nodes: list[Node]) -> None:
        """Check that no site is in the run in part, but for peers that have left on purpose. `nodes` are the run's."""
        accepted = set(master.accepted)
        rings = (
            {peer for group in master.state.groups.values() for peer in group.ring}
            if self.has_failed_over
            else accepted
        )
        sites: dict[str, list[Node]] = {}
        for node in nodes:
            if node.machine.site:
                sites.setdefault(node.machine.site, []).append(node)
        for site, members in sites.items():
            here = [node for node in members if node.number in accepted]
            left = [node for node in self._nodes if node.machine.site == site and node.has_left and node not in here]
            # A new master has still to tell some that they are accepted by the view that the last one had prepared.
            coming = [node for node in members if node.number in rings - accepted]
            assert not here or len(here + left + coming) == here[0].machine.site_size, f"only {here} of {site}"

    # What peers are to carry out.

    def installed(self, node: Node, effect: ps.Installed) -> None:
        view = effect.view
        assert view.peer == node.number
        assert self._rings[view.group, view.epoch] == view.ring
        assert self._sizes.setdefault(view.view, view.group_sizes) == view.group_sizes
        assert self.meshed.setdefault((view.group, view.epoch), view.is_meshed) == view.is_meshed
        before = node.views[-1] if node.views else None
        assert before is None or view.view > before.view
        if before is None or view.epoch != before.epoch:
            assert node.ready == view.view, f"{node} is in view {view.view} and has not said LinksReady"
        node.views.append(view)
        node.lost += effect.lost

    def commit(self, key: Key) -> None:
        for node in self._participants(key, self._known(key[:2])):
            assert key in node.held, f"{key} is committed, but {node} lacks the result"

    def op_result(self, node: Node, effect: ps.OpResult, end: ps.Ended | None) -> None:
        """`end` is the end of the session where that comes at once with the result."""
        assert effect.op not in node.results
        node.results[effect.op] = effect
        if effect.code is not Result.SUCCESS:
            assert node.buffers[effect.op] == frozenset(((node.name, effect.op),)), f"{node} lost its input: {effect}"
        end = end or node.ended
        if end is not None and (effect.code, effect.reason) == (end.code, end.reason):
            return  # no verdict
        if effect.op in node.cancelled_queued or effect.code is Result.TOO_FEW_PEERS:
            return
        if effect.op not in node.keys and (node.tag_of(effect.op) is None or REFUSALS.match(effect.reason)):
            return  # an op of two that cannot start
        # Without a key it ended by a verdict that was here before its launch.
        key = node.keys[effect.op] if effect.op in node.keys else node.next_use(effect.op)
        heard = self.verdicts.setdefault(key, {})
        heard[node.name] = effect.code
        if not self.has_failed_over:
            assert len(set(heard.values())) == 1, f"different verdicts on {key}: {heard}"
        if effect.code is Result.RANK_CONNECTION_LOST and key[:2] not in self._interrupted:
            is_early = end is None and node.view.epoch <= key[1]
            assert not is_early or effect.op in node.given_up_ops, f"{node} heard of {key} before Install"
            survivors = self._survivors.get(key[:2])
            if survivors is None:
                # In a failover not all may have had the epoch in force, and so have nothing to answer.
                assert self.has_failed_over
                survivors = set(self._known(key[:2]))
            involved = self._participants(key, survivors)
            assert not involved or not all(key in survivor.held for survivor in involved), (
                f"{key} was aborted though {involved} hold it"
            )
        if effect.code is Result.SUCCESS:
            assert key in node.held
            ring = self._rings[key[:2]]
            assert effect.world_size == len(ring)
            involved = participants(key[2], ring)
            value = node.buffers[effect.op]
            assert (node.name, effect.op) in value
            assert sorted(name for name, _ in value) == sorted(
                each.name for each in self._nodes if each.number in involved
            )
            assert self._values.setdefault(key, value) == value, f"{node} has another result of {key}"

    def agreement(self) -> None:
        """Check in the end that all who lived into the next view of an op's group, or go on in the one that it was in,
        have heard the same verdict."""
        for key, heard in self.verdicts.items():
            group, epoch = key[:2]
            members = [node for node in self._nodes if node.group == group and node.views]
            later = [node.view.ring for node in members if node.view.epoch > epoch]
            alive = {
                node.name
                for node in members
                if node.view.epoch > epoch
                # One that the others have gone on without may not know of it yet.
                or (node.is_reachable and all(node.number in ring for ring in later))
            }
            codes = {name: code for name, code in heard.items() if name in alive or not self.has_failed_over}
            assert len(set(codes.values())) <= 1, f"different verdicts on {key}: {heard}"

    # What hangs.

    def rest(
        self,
        master: Master,
        accepted: list[Node],
        is_linked: Callable[[Node, int, Node, int], bool],
        may_ops_wait: bool,
    ) -> None:
        assert not master.is_changing
        assert sorted(master.accepted) == sorted(node.number for node in accepted)
        for node in self._nodes:
            if node.ended is not None:
                assert not node.open_ops + node.open_calls, f"{node} is over and still waits"
                assert node.machine.open_ops == 0
        for node in accepted:
            assert node.view.view == master.state.installed_view
            assert list(node.view.ring) == master.ring(node.group)
            assert node.view.global_world_size == len(accepted)
            ring = [next(other for other in accepted if other.number == number) for number in node.view.ring]
            self._links_at_rest(node, ring, is_linked)
            if not may_ops_wait:
                self._ops_at_rest(node, ring)
        self._calls_at_rest(accepted)

    def _links_at_rest(self, node: Node, ring: list[Node], is_linked: Callable[[Node, int, Node, int], bool]) -> None:
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
        for key, effect in node.submitted.items():
            involved = self._participants(key, ring)
            assert not all(key in each.submitted for each in involved), f"op {effect.op} of {node}, {key}, hangs"

    def _calls_at_rest(self, accepted: list[Node]) -> None:
        waits = {node: node.kinds[node.open_calls[0]] for node in accepted if node.open_calls}
        for group in {node.group for node in accepted}:
            kinds = {waits.get(node) for node in accepted if node.group == group}
            assert None in kinds or (len(kinds) == 1 and m.Kind.SYNC not in kinds), f"group {group} hangs: {waits}"
        assert not accepted or len(waits) < len(accepted), f"all wait: {waits}"
