"""Liveness: judge from heartbeats, control connections and link reports which peers are alive.

    1  A peer is evicted if its heartbeats stop for `peer_timeout_s`, or if its heartbeat connection closes and it does
       not make a new one within that time.
    2  A peer whose control connection breaks is *absent*. It may reattach, and is kept for `peer_timeout_s` while its
       heartbeats continue.
    3  An absent peer without heartbeats is lost immediately once all its observers (at least one) have lost their links
       to it. Observers are the present peers in its ring that have a link to it. Newcomers count only if there are no
       other observers, and a peer that is still making its link never counts.
    4  An absent peer without observers is kept as in 2.
    5  A pending peer that is being admitted is lost as soon as both of its connections have closed.
    6  Before it evicts a peer, the master checks whether it is cut off itself (`has_lost_sight`). If most peers of the
       view and most of all that ever sent a heartbeat are quiet for half the timeout, it evicts none and is deposed.

If all connections of a living peer are reset at once, rule 3 misjudges it, and it is evicted unnecessarily.

After a takeover each peer has one peer timeout to make its heartbeat connection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice, takewhile

from pccl.protocol import topology
from pccl.protocol.failover.durable_state import majority
from pccl.protocol.master.run_state import Group, Member, RunState, TakeHeartbeats

QUIET_SHARE = 0.5
"""Share of the peer timeout after which a silent heartbeat connection counts as quiet (rule 6)."""


class Liveness:
    def __init__(self, state: RunState) -> None:
        self._state = state
        self.heartbeats: dict[int, int] = {}
        self._first_due_at: dict[int, float] = {}
        self._due_at = dict.fromkeys(state.members, state.now + state.options.peer_timeout_s)
        self.absent_until: dict[int, float] = {}
        """For each absent peer, the time from which it counts as lost; the longest absent peer comes first."""
        self._cut: set[tuple[int, int]] = set()
        """Pairs (peer, other): the peer has lost its link with the other since the link was made."""
        self._suspects: set[int] = set()
        self._quiet: set[int] = set()

    # Heartbeats.

    def welcomed(self, peer: int) -> None:
        self._first_due_at[peer] = self._state.now + self._state.options.hello_timeout_s

    def take_heartbeats(self, connection: int, member: Member) -> None:
        if member.heartbeat is not None:
            # The peer noticed before the master that its old connection had closed.
            self._close_heartbeat(member)
        self.heartbeats[connection] = member.peer
        member.heartbeat = connection
        member.has_heartbeat = True
        self._first_due_at.pop(member.peer, None)
        self._due_at.pop(member.peer, None)
        self._state.outbox.append(TakeHeartbeats(connection))

    def _close_heartbeat(self, member: Member) -> None:
        if member.heartbeat is not None:
            del self.heartbeats[member.heartbeat]
            self._state.close(member.heartbeat)
            member.heartbeat = None

    def heartbeat_broke(self, connection: int, reason: str) -> bool:
        """Handle a closed connection. Return False if it carried no heartbeats."""
        if connection not in self.heartbeats:
            return False
        state = self._state
        member = state.members[self.heartbeats.pop(connection)]
        member.heartbeat = None
        self._due_at[member.peer] = state.now + state.options.peer_timeout_s
        state.log("info", f"{member}: its heartbeat connection broke: {reason}", member.about)
        self._suspects.add(member.peer)
        return True

    def heartbeat_silent(self, connection: int) -> int | None:
        peer = self.heartbeats.pop(connection, None)
        if peer is not None:
            self._state.members[peer].heartbeat = None
        return peer

    def note_quiet(self, connections: Iterable[int]) -> None:
        self._quiet = {self.heartbeats[connection] for connection in connections if connection in self.heartbeats}

    # Absence.

    def detached(self, member: Member, reason: str) -> None:
        member.absence = reason
        self.absent_until[member.peer] = self._state.now + self._state.options.peer_timeout_s
        self._suspects.add(member.peer)
        self.suspect_cut()
        self._state.log("info", f"{member} has lost its control connection: {reason}", member.about)

    def reattached(self, member: Member) -> None:
        member.absence = ""
        self.absent_until.pop(member.peer, None)
        self._state.log("info", f"{member} has a new control connection", member.about)

    # Links, as evidence.

    def link_cut(self, by: int, other: int) -> None:
        """Record that `by` has lost its link with `other` or failed to make it."""
        self._cut.add((by, other))
        self._suspects.add(other)

    def links_made(self, group: Group) -> None:
        """Record that the links of a group are up again, except its `linkless` pairs."""
        linkless = group.linkless
        self._cut = {cut for cut in self._cut if cut[0] not in group.ring or topology.pair(*cut) in linkless}

    def suspect_cut(self) -> None:
        self._suspects.update(other for _, other in self._cut if other in self.absent_until)

    # Judgement.

    def next_dead(self) -> int | None:
        while self._suspects:
            peer = self._suspects.pop()
            if peer in self.absent_until and self.is_dead(self._state.members[peer]):
                return peer
        return None

    def is_dead(self, member: Member) -> bool:
        if not member.absence or member.heartbeat is not None:
            return False
        state = self._state
        group = state.groups.get(member.hello.group)
        if not member.accepted:
            return member.has_heartbeat and state.accepted_count > 0 and group is not None and member.peer in group.ring
        observers = self._observers(member)
        return bool(observers) and all((peer, member.peer) in self._cut for peer in observers)

    def _observers(self, member: Member) -> list[int]:
        members, group = self._state.members, self._state.group_of(member)
        linkless = group.linkless
        found = [
            peer
            for peer in topology.linked_peers(group.ring, member.peer)
            if not members[peer].absence and topology.pair(peer, member.peer) not in linkless
        ]
        found = [peer for peer in found if members[peer].accepted] or found
        return [peer for peer in found if (peer, member.peer) in self._cut or self._has_link(group, peer, member)]

    def _has_link(self, group: Group, peer: int, member: Member) -> bool:
        state = self._state
        pair = topology.pair(peer, member.peer)
        if not state.change.is_preparing:
            return pair in group.linked
        is_kept = pair in group.linked and state.made_in.get(pair) != state.view
        return is_kept or peer not in state.change.awaiting_ready

    def has_lost_sight(self, but_of: int) -> bool:
        """Return whether this master has lost most accepted peers, and most of all peers that ever sent a heartbeat.
        `but_of` counts as lost."""
        lost: Counter[bool] = Counter()
        heard = 0
        for peer, member in self._state.members.items():
            is_gone = (member.heartbeat is None and member.has_heartbeat) or bool(member.absence)
            lost[member.accepted] += peer == but_of or peer in self._quiet or is_gone
            heard += member.accepted or member.has_heartbeat
        return lost[True] >= majority(self._state.accepted_count) and lost.total() >= majority(heard)

    # Time.

    def silent(self) -> list[tuple[int, float]]:
        now, options = self._state.now, self._state.options
        return [
            (peer, allowed_s)
            for due_at, allowed_s in (
                (self._first_due_at, options.hello_timeout_s),
                (self._due_at, options.peer_timeout_s),
            )
            for peer, _ in takewhile(lambda due: now >= due[1], due_at.items())
        ]

    def next_late(self) -> int | None:
        return next((peer for peer, until in self.absent_until.items() if self._state.now >= until), None)

    def deadlines(self) -> list[float]:
        due = [self._first_due_at, self._due_at, self.absent_until]
        return [at for each in due for at in islice(each.values(), 1)]

    def forget(self, member: Member) -> None:
        peer = member.peer
        self._close_heartbeat(member)
        for due_at in (self._first_due_at, self._due_at, self.absent_until):
            due_at.pop(peer, None)
        self._cut = {pair for pair in self._cut if peer not in pair}
        self.suspect_cut()
