"""Handles links that broke or cannot be made, and decides the resulting evictions.

A ring needs the links between neighbours. A small group also makes all other links, but works without any that fail.
A failed pair does not show which of its two peers is at fault; the peers' other links do.

    1  A broken link between two live peers is remade (`Prepare.relink`), as are all other links of these peers. After
       RELINKS_MAX attempts without a committed op the pair counts as failed. The decision waits for the flush after
       the break, because the ends that report it may still commit ops of the epoch.
    2  Evictions wait until each link is up or has failed, at most EVIDENCE_SHARE of the peer timeout after a failure.
    3  Evictions remove the smallest set of peers that leaves no failed pair (`topology.fewest_evictions`).
    4  A pair is not judged while one of its peers is absent.
    5  A peer evicted for failed links must wait before it is admitted again; the delay grows (`admission`).
    6  A lost link is logged only once it has been remade or the attempt has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from pccl.protocol import messages as m
from pccl.protocol import topology
from pccl.protocol.master.admission import Probation
from pccl.protocol.master.liveness import Liveness
from pccl.protocol.master.run_state import Group, Member, Pair, RunState
from pccl.types import Result

EVIDENCE_SHARE = 0.1
"""Share of the peer timeout during which failures are collected before an eviction."""
RELINKS_MAX = 3
"""Number of times that a pair's link is remade without a committed op in between."""


class LinkFailures:
    def __init__(
        self,
        state: RunState,
        liveness: Liveness,
        probation: Probation,
        evict: Callable[[int, str, Result], None],
    ) -> None:
        self._state = state
        self._liveness = liveness
        self._probation = probation
        self._evict = evict
        self._failed: dict[Pair, str] = {}
        """Pairs that the prepared view needs but that cannot connect, each with the reason."""
        self._given_up: set[Pair] = set()
        """Pairs in the prepared view, needed or not, whose dialer reported that they cannot connect."""
        self._evidence_due_at: float | None = None
        self._relink: set[Pair] = set()
        self._doubted: set[Pair] = set()
        """Pairs whose link seems to be up; the next Prepare remakes it as a test."""
        self._unlogged: dict[Pair, tuple[str, dict[str, int]]] = {}
        """Pending log lines about lost links, by pair, each with its text and attributes (rule 6)."""
        self._relinks: dict[Pair, int] = {}
        self._worn: dict[Pair, str] = {}

    @property
    def evidence_due_at(self) -> float | None:
        """The time of the next eviction for failed links; None if no eviction is scheduled."""
        due_at = self._evidence_due_at
        return due_at if due_at is not None and due_at > self._state.now else None

    # Messages from peers.

    def note_failed(self, member: Member, other: int, reason: str) -> None:
        """Record that a peer cannot make its link with `other`. The dialer's reason takes precedence, because
        the other end only waits."""
        group = self._state.group_of(member)
        pair = topology.pair(member.peer, other)
        self._log_lost([pair])
        if pair in topology.linked_pairs(group.ring):
            self._liveness.link_cut(member.peer, other)
        if pair in topology.ring_pairs(group.ring):
            self._failed[pair] = reason if member.peer == pair[1] else self._failed.get(pair, reason)
        elif pair in topology.linked_pairs(group.ring) and pair not in group.missing:
            group.missing.add(pair)
            self._state.log(
                "info",
                f"group {group.number} goes without a link between peers {pair}: {reason}",
                {**member.about, "other": other},
            )

    def link_failed(self, member: Member, message: m.LinkFailed) -> None:
        if message.view == self._state.view and member.peer in self._state.change.awaiting_ready:
            self._given_up.add(topology.pair(member.peer, message.peer))
            self.note_failed(member, message.peer, message.reason)

    def link_lost(self, member: Member, message: m.LinkLost) -> None:
        """Handle a broken link: remake it unless the group already works without it (rule 1)."""
        state = self._state
        other = state.members.get(message.peer)
        if other is None or other.hello.group != member.hello.group or other is member:
            return
        pair = topology.pair(member.peer, message.peer)
        group = state.groups.get(member.hello.group)
        if message.made_in < state.made_in.get(pair, 0) or group is None:
            return
        is_on_demand = topology.are_linked_on_demand(group.ring, *pair)
        if not (group.running if is_on_demand else pair in topology.linked_pairs(group.ring)):
            return
        self._liveness.link_cut(member.peer, message.peer)
        if pair in self._relink or self._liveness.is_dead(other):
            return
        if pair in group.linkless and pair not in topology.ring_pairs(group.ring):
            return
        text = f"{member} lost its link to {other}: {message.reason}"
        self._unlogged[pair] = text, {**member.about, "other": message.peer}
        if not is_on_demand:
            self._relinks[pair] = self._relinks.get(pair, 0) + 1
        if self._relinks.get(pair, 0) > RELINKS_MAX:
            self._worn[pair] = message.reason
        self._relink.add(pair)
        state.stop(group)

    def ops_committed(self, group: Group) -> None:
        """Reset the failure counts of a group's links, because ops completed in this epoch: to 1 for links that broke
        at the end of the epoch, to 0 for all others."""
        for pair in topology.linked_pairs(group.ring).intersection(self._relinks) if self._relinks else ():
            if pair in self._relink:
                self._relinks[pair] = 1
                self._worn.pop(pair, None)
            else:
                del self._relinks[pair]

    def doubt_links(self, member: Member) -> None:
        group = self._state.group_of(member)
        pairs = {pair for pair in topology.linked_pairs(group.ring) if member.peer in pair}
        if group.running and pairs:
            self._doubted |= pairs
            self._state.stop(group)

    # The stages of a view.

    def give_up_worn(self) -> bool:
        """Once all flushes are answered, drop the links that broke too often, or, if a ring needs them, evict peers
        (rule 1). Return whether peers were evicted."""
        needed: dict[Pair, str] = {}
        for pair, reason in self._worn.items():
            group = self._state.group_of(self._state.members[pair[0]])
            if pair in topology.ring_pairs(group.ring):
                needed[pair] = f"their link broke {self._relinks[pair]} times in a row: {reason}"
            else:
                group.unreliable.add(pair)
        self._worn.clear()
        if needed:
            self._resolve(needed)
        return bool(needed)

    def prepare(self) -> list[Pair]:
        """Return the pairs whose links the prepared view remakes. Discard earlier reports."""
        pairs = self._links_to_try()
        for pair in pairs:
            self._state.made_in[pair] = self._state.view
        self._relink.clear()
        self._doubted.clear()
        self._given_up.clear()
        self._forget_failed()
        return pairs

    def _links_to_try(self) -> list[Pair]:
        pairs = self._relink | self._doubted
        suspects = {peer for pair in pairs for peer in pair}
        others = (
            pair
            for group in self._state.groups.values()
            if suspects and not group.running
            for pair in topology.linked_pairs(group.ring)
            if not suspects.isdisjoint(pair)
        )
        return sorted(pairs.union(others))

    def installed(self) -> None:
        self._log_lost(self._unlogged)

    def _log_lost(self, pairs: Iterable[Pair]) -> None:
        for pair in [pair for pair in pairs if pair in self._unlogged]:
            self._state.log("warning", *self._unlogged.pop(pair))

    def waits_for_absent(self) -> bool:
        if any(peer in self._liveness.absent_until for pair in self._failed for peer in pair):
            self._evidence_due_at = None
            return True
        return False

    def judge(self) -> bool:
        if not self._failed or not self._is_evidence_there():
            return False
        self._resolve(self._known_failures())
        return True

    def _are_settled(self, pairs: Iterable[Pair], failed: Collection[Pair]) -> bool:
        """Return whether the outcome of each pair is known: the dialer has reported it, or the other end has reported
        that the link is up. A dialer that gives up settles its pair."""
        awaiting = self._state.change.awaiting_ready
        return all(
            high not in awaiting or (low, high) in self._given_up or (low not in awaiting and (low, high) not in failed)
            for low, high in pairs
        )

    def _is_evidence_there(self) -> bool:
        changing = [group for group in self._state.groups.values() if not group.running]
        failed = {*self._failed, *(pair for group in changing for pair in group.missing)}
        if all(self._are_settled(topology.linked_pairs(group.ring), failed) for group in changing):
            return True
        if not self._known_failures():
            return False
        if self._evidence_due_at is None:
            self._evidence_due_at = self._state.now + EVIDENCE_SHARE * self._state.options.peer_timeout_s
        return self._state.now >= self._evidence_due_at

    def _known_failures(self) -> dict[Pair, str]:
        needed = {pair for group in self._state.groups.values() for pair in topology.ring_pairs(group.ring)}
        if self._are_settled(needed, self._failed):
            return dict(self._failed)
        awaiting = self._state.change.awaiting_ready
        return {pair: why for pair, why in self._failed.items() if pair[1] not in awaiting or pair in self._given_up}

    def _resolve(self, failed: Mapping[Pair, str]) -> None:
        state = self._state
        members = state.members
        newcomers = {peer for peer, member in members.items() if not member.accepted or member.absence}
        weak = {pair for group in state.groups.values() for pair in group.linkless}
        for peer in sorted(topology.fewest_evictions(failed, newcomers, weak.union(self._relinks))):
            pair, why = next((pair, why) for pair, why in failed.items() if peer in pair)
            member = members[peer]
            delay_s = self._probation.evicted(member.host, member.hello.name, state.now)
            reason = (
                f"peers {pair[0]} and {pair[1]} cannot connect to each other: {why}; peer {peer} may connect again, "
                f"and is admitted after {delay_s:.3g} s if it can then connect to the others"
            )
            self._evict(peer, reason, Result.RANK_CONNECTION_FAILED)
        self._forget_failed()

    def _forget_failed(self) -> None:
        self._failed.clear()
        self._evidence_due_at = None

    def forget(self, peer: int) -> None:
        self._relink = {pair for pair in self._relink if peer not in pair}
        self._doubted = {pair for pair in self._doubted if peer not in pair}
        self._unlogged = {pair: line for pair, line in self._unlogged.items() if peer not in pair}
        self._worn = {pair: why for pair, why in self._worn.items() if peer not in pair}
        self._failed = {pair: why for pair, why in self._failed.items() if peer not in pair}
        for pair in [pair for pair in self._relinks if peer in pair]:
            del self._relinks[pair]
