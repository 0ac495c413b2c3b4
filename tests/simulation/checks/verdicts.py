"""Checks of how ops end, by the results that callers hear, and by what the engines hold, which is the simulation's own.

    all that live into the next view of an op's group, or go on in its own, hear the same verdict; where no master was
    ever replaced, those that are gone have heard no other
    an op that is committed is done on each peer of the run; one that a flush aborts is not done on all survivors
    a committed op's buffer holds exactly one contribution of each peer of its ring, and the same on all
    an aborted op's buffer is as its caller gave it
    an op that a flush has ended returns only when the next view is in force

Behind one name two masters may lead at once, each with peers of its own, which never exchange anything again. Then an
op of a view from before may be committed by one part and aborted by the other, which no peer promises to prevent;
within a part all of the above holds.
"""

from __future__ import annotations

import re
from itertools import combinations

from pccl.protocol import messages as m
from pccl.protocol.peer import effects as ps
from pccl.types import Result
from tests.simulation.checks.facts import Epoch, Facts, Leader
from tests.simulation.node import Key, Node, Value

REFUSALS = re.compile(r"peer \d+ has left; call again|no link with peer \d+")
"""The errors of point-to-point ops that cannot start."""


class Verdicts:
    def __init__(self, facts: Facts) -> None:
        self.heard: dict[Key, dict[str, Result]] = {}
        """Every op's verdicts, by the name of the peer that heard them."""
        self._facts = facts
        self._flushes: dict[tuple[int, int], Epoch] = {}
        """The ring of every flush, by the process of its master and its number."""
        self._begun_by: dict[Epoch, Leader | None] = {}
        """The last master that has flushed a ring."""
        self.flushed: dict[Epoch, set[Node]] = {}
        """The peers that have answered a flush that is under way."""
        self.survivors: dict[Epoch, set[Node]] = {}
        """The peers whose answers a flush ended with."""
        self._values: dict[Key, Value] = {}
        """The result of every committed op, the same on all peers."""
        self._interrupted: set[Epoch] = set()
        """Rings whose master died when some peers had heard all verdicts and some had not."""

    # Flushes.

    def flush(self, node: Node, process: int, message: m.Flush) -> None:
        self._flushes[process, message.flush] = node.group, message.epoch
        self._begun_by[node.group, message.epoch] = node.leader
        self.flushed.setdefault((node.group, message.epoch), set())

    def replied(self, node: Node, process: int, message: m.FlushReply) -> None:
        epoch = self._flushes.get((process, message.flush))
        if epoch is not None:
            self.flushed.get(epoch, set()).add(node)
            self.note_survivors()

    def note_survivors(self) -> None:
        for epoch, answered in list(self.flushed.items()):
            survivors = set(self._facts.known(epoch))
            if not survivors:
                del self.flushed[epoch]  # its master has lost all of them
            elif survivors <= answered:
                self.survivors[epoch] = survivors
                del self.flushed[epoch]

    def failed_over(self, leader: Leader) -> None:
        """Note that another master goes on with a run. It need not know of a flush that no peer has answered."""
        for epoch, answered in list(self.flushed.items()):
            if not answered and self._begun_by[epoch] is not leader:
                del self.flushed[epoch]
        for node in self._facts.nodes:
            if node.run == leader.run and node.views and node.prepared_epoch not in (None, node.views[-1].epoch):
                self._interrupted.add((node.group, node.views[-1].epoch))
        self.note_survivors()

    # Ends.

    def commit(self, node: Node, key: Key) -> None:
        """Check a commit, by a verdict or because all participants say that they are done."""
        for each in self._facts.participants(key, self._facts.known(key[:2], node.leader)):
            assert key in each.held, f"{key} is committed on {node}, but {each} lacks the result"

    def result(self, node: Node, effect: ps.OpResult, end: ps.Ended | None) -> None:
        """Check a result that a caller hears. `end` is the end of the session where that comes at once with it."""
        facts = self._facts
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
        heard = self.heard.setdefault(key, {})
        heard[node.name] = effect.code
        if not facts.has_failed_over:
            assert len(set(heard.values())) == 1, f"different verdicts on {key}: {heard}"
        if effect.code is Result.RANK_CONNECTION_LOST and key[:2] not in self._interrupted:
            self._check_flushed(node, effect, key, end)
        if effect.code is Result.SUCCESS:
            assert key in node.held
            assert effect.world_size == len(facts.rings[key[:2]])
            value = node.buffers[effect.op]
            assert (node.name, effect.op) in value
            names = (each.name for each in facts.nodes if each.number in facts.numbers_of(key))
            assert sorted(name for name, _ in value) == sorted(names)
            assert self._values.setdefault(key, value) == value, f"{node} has another result of {key}"

    def _check_flushed(self, node: Node, effect: ps.OpResult, key: Key, end: ps.Ended | None) -> None:
        facts = self._facts
        is_early = end is None and node.view.epoch <= key[1]
        assert not is_early or effect.op in node.given_up_ops, f"{node} heard of {key} before Install"
        if facts.is_one_name and facts.has_failed_over:
            return
        survivors = self.survivors.get(key[:2])
        if survivors is None:
            # In a failover not all may have had the epoch in force, and so need not answer.
            assert facts.has_failed_over
            survivors = set(facts.known(key[:2]))
        involved = facts.participants(key, survivors)
        assert not involved or not all(key in survivor.held for survivor in involved), (
            f"{key} was aborted though {involved} hold it"
        )

    # The end.

    def agreement(self) -> None:
        """Check in the end that all that go on from an op have heard the same verdict."""
        for key, heard in self.heard.items():
            if len(set(heard.values())) > 1:
                check = self._agree_in_parts if self._facts.is_one_name else self._agree
                check(key, heard)

    def _agree(self, key: Key, heard: dict[str, Result]) -> None:
        group, epoch = key[:2]
        members = [node for node in self._facts.nodes if node.group == group and node.views]
        later = [node.views[-1].ring for node in members if node.views[-1].epoch > epoch]
        alive = {
            node.name
            for node in members
            if node.views[-1].epoch > epoch
            # One that the others have gone on without may not know of it yet.
            or (node.is_reachable and all(node.number in ring for ring in later))
        }
        codes = {name: code for name, code in heard.items() if name in alive or not self._facts.has_failed_over}
        assert len(set(codes.values())) <= 1, f"different verdicts on {key}: {heard}"

    def _agree_in_parts(self, key: Key, heard: dict[str, Result]) -> None:
        """Any two that have had a later view in common agree, or that are left in this one with one leader."""
        group, epoch = key[:2]
        members = [node for node in self._facts.nodes if node.group == group and node.name in heard]
        later = {node: {view.epoch for view in node.views if view.epoch > epoch} for node in members}
        for a, b in combinations(members, 2):
            are_left = not later[a] and not later[b] and a.leader is b.leader and a.is_known and b.is_known
            if later[a] & later[b] or are_left:
                assert heard[a.name] is heard[b.name], f"{a} and {b} go on with different verdicts on {key}: {heard}"
