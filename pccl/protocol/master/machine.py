"""The master's state machine, which manages the membership and decides outcomes, but never handles payload.

Peers must agree on the membership and on the outcome of every op, although any of them may die at any time. As in
view-synchronous membership, a new view is installed only once the ops of the previous view have ended in the same way
on all its peers.

Events arrive through `connected`, `received`, `disconnected`, `silent` and `tick`; each returns effects to perform in
order. The rules rely on the order of messages within a control connection. After each event the machine takes every
step that has become possible (`_advance`). A `deposed` master takes none.

The cost of handling a message does not grow with the number of peers. Only a view, a verdict or the end of a group call
is sent to all peers, and a message to many peers is a single object that is encoded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from pccl.protocol import messages as m
from pccl.protocol.completion import callers_tag
from pccl.protocol.master.admission import Admission, Probation
from pccl.protocol.master.group_calls import GroupCalls
from pccl.protocol.master.link_failures import LinkFailures
from pccl.protocol.master.liveness import Liveness
from pccl.protocol.master.ring import RingChange
from pccl.protocol.master.run_state import (
    NAMED_MAX,
    Effect,
    Group,
    Ledger,
    Member,
    OpenAbortVote,
    RunState,
    name_stragglers,
)
from pccl.protocol.master.verdicts import OpVerdicts
from pccl.protocol.master.views import Leadership, MissingLinks, ViewStages
from pccl.protocol.messages import Kind, OpRef
from pccl.protocol.status import GroupStatus, LinkFigures, MemberStatus, RunStatus, StalledOp, Totals, Waiting
from pccl.protocol.topology import ring_links
from pccl.types import Result

BEFORE_ACCEPTANCE = frozenset({m.Leave, m.LinksReady, m.LinkFailed, m.LinkLost, m.Tried})

KICKED = "the operator has removed it (pccl status --kick)"


def kicked_out(state: RunState) -> m.Goodbye:
    """Return the last message to a removed peer. The result is one after which programs do not connect again."""
    return m.Goodbye(Result.INVALID_USAGE, m.KICKED_OUT, state.secret)


class Master:
    def __init__(
        self,
        state: RunState,
        leadership: Leadership | None = None,
        missed_ends: Mapping[int, m.GroupCallOutcome] | None = None,
        sites_broken_by: str = "",
    ) -> None:
        """Lead a new run if only `state` is given. A takeover (`recovery.take_over`) gives the other arguments:
        `missed_ends` are the results of ended group calls that peers still wait for; `sites_broken_by` is the reason to
        evict the peers of incomplete sites."""
        self.state = state
        """The run's state. Other modules may read it but not change it."""
        self.leadership = leadership or Leadership(state)
        probation = Probation(state.options.peer_timeout_s)
        self.liveness = Liveness(state)
        self.admission = Admission(state, self.liveness, probation)
        if sites_broken_by:
            self.admission.break_incomplete_sites(sites_broken_by)
        self.links = LinkFailures(state, self.liveness, probation, self._evict)
        self._missing = MissingLinks(state)
        self._verdicts = OpVerdicts(
            state, self._evict, self.links.ops_committed, self._abort_deadlocked, self._missing.may_stand
        )
        self._ring_change = RingChange(state)
        self._calls = GroupCalls(
            state, self.admission, self._verdicts, self.links, self._ring_change, self._evict, missed_ends
        )
        self._stages = ViewStages(state, self.leadership, self.liveness, self.links, self._missing, self._calls)
        self._handlers: dict[type[m.Message], Callable[[Member, Any], None]] = {
            m.Leave: self._on_leave,
            m.GroupCall: self._calls.enter,
            m.GroupCallCancel: self._calls.cancel,
            m.LinksReady: self._stages.links_ready,
            m.LinkFailed: self.links.link_failed,
            m.Tried: self._on_tried,
            m.LinkLost: self.links.link_lost,
            m.OpsDone: self._verdicts.ops_done,
            m.OpFailed: self._verdicts.op_failed,
            m.AbortVote: self._verdicts.voted,
            m.OpsStalled: self._verdicts.ops_stalled,
            m.OpsOver: self._verdicts.ops_over,
            m.TagsUsed: self._verdicts.tags_used,
            m.FlushReply: self._verdicts.flush_reply,
            m.SyncReport: self._calls.sync_reported,
            m.Probes: self._ring_change.probed,
            m.Report: self._on_report,
        }

    # Events.

    def connected(self, connection: int, host: str, now: float) -> list[Effect]:
        self.state.now = now
        self.admission.connected(connection, host, len(self.state.members) + len(self.liveness.heartbeats))
        return self.state.drain()

    def received(self, connection: int, message: m.FromPeer, now: float) -> list[Effect]:
        state = self.state
        state.now = now
        if connection in self.admission.unidentified:
            newcomer = self.admission.first_message(connection, message)
            if newcomer is not None and newcomer.hello.masters > 1:
                self.leadership.has_rivals = True
        elif connection in state.peer_of:
            member = state.members[state.peer_of[connection]]
            handler = self._handlers.get(type(message))
            if handler is None or (not member.accepted and type(message) not in BEFORE_ACCEPTANCE):
                standing = "accepted" if member.accepted else "not accepted yet"
                self._evict(
                    member.peer,
                    f"unexpected {type(message).__name__} from a peer that is {standing}",
                    Result.INVALID_USAGE,
                )
            else:
                handler(member, message)
        # else: the peer was evicted and sent this before it received Goodbye.
        return self._advance()

    def disconnected(self, connection: int, reason: str, now: float) -> list[Effect]:
        state = self.state
        state.now = now
        self.admission.disconnected(connection)
        if connection in state.peer_of:
            self._remove(state.peer_of[connection], reason)
        elif not self.liveness.heartbeat_broke(connection, reason):
            return state.drain()
        return self._advance()

    def detached(self, connection: int, reason: str, now: float) -> list[Effect]:
        state = self.state
        state.now = now
        if connection not in state.peer_of:
            state.close(connection)
            return self.disconnected(connection, reason, now)
        self.liveness.detached(state.members[state.peer_of[connection]], reason)
        return self._advance()

    def reattached(self, connection: int, now: float) -> list[Effect]:
        self.state.now = now
        self.liveness.reattached(self.state.members[self.state.peer_of[connection]])
        return self._advance()

    def silent(self, connection: int, silent_s: float, now: float) -> list[Effect]:
        self.state.now = now
        peer = self.liveness.heartbeat_silent(connection)
        if peer is None:
            return self.state.drain()
        self._evict_silent(peer, silent_s)
        return self._advance()

    def kick(self, peer: int, now: float) -> list[Effect]:
        """Remove a peer because its operator wants it. It must not come back by itself."""
        state = self.state
        state.now = now
        state.kicked.add(peer)
        member = state.members[peer]
        state.log("warning", f"{member}: {KICKED}", member.about)
        self._put_out(peer, kicked_out(state), KICKED)
        return self._advance()

    def name_stragglers(self, silent: Mapping[int, float], now: float) -> list[Effect]:
        """Log stragglers. `silent` maps each connection without heartbeats to its seconds of silence."""
        self.state.now = now
        heartbeats = self.liveness.heartbeats
        name_stragglers(
            self.state, {heartbeats[each]: silent_s for each, silent_s in silent.items() if each in heartbeats}
        )
        return self.state.drain()

    def rings_found(self, search: int, rings: Mapping[int, Sequence[int]], now: float) -> list[Effect]:
        self.state.now = now
        return self._advance() if self._ring_change.found(search, rings) else self.state.drain()

    def tick(self, now: float) -> list[Effect]:
        state = self.state
        state.now = now
        self.admission.expire()
        limit_s = state.options.answer_limit_s
        for peer in list(state.asked_at):
            # Look it up each time, because an eviction may send further requests.
            if now >= state.asked_at[peer] + limit_s:
                self._evict(peer, f"did not answer the master within {limit_s:g} s")
        for peer, silent_s in self.liveness.silent():
            self._evict_silent(peer, silent_s)
            if self.deposed:
                return state.drain()
        while (late := self.liveness.next_late()) is not None:
            self._lose_late(late, f"not back within {state.options.peer_timeout_s:g} s")
            if self.deposed:
                return state.drain()
        self.admission.begin_trials()
        self._missing.try_again()
        self._ring_change.expire()
        return self._advance()

    def deadline(self) -> float | None:
        if self.deposed:
            return None
        answer_limit_s = self.state.options.answer_limit_s
        times = [asked_at + answer_limit_s for asked_at in islice(self.state.asked_at.values(), 1)]
        for part in (self.admission, self.liveness, self._missing, self._ring_change, self._calls):
            times += part.deadlines()
        times += [self.links.evidence_due_at] if self.links.evidence_due_at is not None else []
        return min(times, default=None)

    def dismiss_founders(self, reason: str) -> list[Effect]:
        """Make the waiting first peers start over, so that they ask all masters again."""
        for peer in self.state.pending:
            member = self.state.members[peer]
            self.state.send(member.connection, m.StartOver(reason))
            self.state.close(member.connection)
            self._remove(peer, reason)
        return self._advance()

    def abdicate(self, reason: str) -> list[Effect]:
        """Release all peers, which may follow another master. No event may arrive afterwards."""
        state = self.state
        for member in state.members.values():
            state.send(member.connection, m.Elsewhere(reason))
            state.close(member.connection)
        for connection in self.liveness.heartbeats:
            state.close(connection)
        return state.drain()

    # State for other modules.

    @property
    def deposed(self) -> str:
        """Why this master must stop leading; empty if it may lead."""
        return self.leadership.deposed

    @property
    def is_vacant(self) -> bool:
        return not self.state.members

    @property
    def is_deserted(self) -> bool:
        """Whether all connections of all accepted peers have closed, as if their processes had ended together."""
        members = self.state.members.values()
        return all(member.absence and member.heartbeat is None for member in members if member.accepted)

    # Departures.

    def _evict(self, peer: int, reason: str, code: Result = Result.MASTER_CONNECTION_FAILED) -> None:
        text = f"evicted: {reason}"
        self._put_out(peer, m.Goodbye(code, text), text)

    def _put_out(self, peer: int, goodbye: m.Goodbye, reason: str) -> None:
        member = self.state.members[peer]
        if member.accepted:  # other peers have no run to return to, and clients could make this set grow without limit
            self.leadership.evict(peer)
        self.state.send(member.connection, goodbye)
        self.state.close(member.connection)
        self._remove(peer, reason)

    def _evict_silent(self, peer: int, silent_s: float) -> None:
        reason = f"silent for {silent_s:.1f} s"
        if self.state.members[peer].absence:
            self._lose_late(peer, reason)  # a host that closes connections is alive, so the peer may return
        elif not self._is_own_outage(peer):
            self._evict(peer, reason)

    def _lose_late(self, peer: int, reason: str) -> None:
        if not self._is_own_outage(peer):
            self._lose(peer, reason)

    def _lose(self, peer: int, reason: str = "") -> None:
        member = self.state.members[peer]
        self.state.close(member.connection)
        self._remove(peer, "; ".join(filter(None, [member.absence, reason])))

    def _lose_dead(self) -> bool:
        lost = False
        while (dead := self.liveness.next_dead()) is not None:
            self._lose(dead)
            lost = True
        return lost

    def _is_own_outage(self, peer: int) -> bool:
        count = self.state.accepted_count
        if self.state.is_accepted(peer) and count > 1 and self.liveness.has_lost_sight(but_of=peer):
            self.leadership.deposed = (
                f"most of its {count} peers have lost their connections to it or fallen silent at about the same time, "
                f"as if its own network were down"
            )
        return bool(self.deposed)

    def _remove(self, peer: int, reason: str, is_leaving: bool = False) -> None:
        state = self.state
        member = state.members[peer]
        self._calls.forget(member)
        state.remove(peer)
        self.liveness.forget(member)
        self.admission.forget(member, reason, is_leaving)
        self.links.forget(peer)
        self._missing.forget(peer)
        self._ring_change.forget(peer)
        how = "lost" if member.accepted else "gone before it was accepted"
        state.log("info", f"{member} {how}: {reason}", member.about)
        group = state.groups.get(member.hello.group)
        if group is None or peer not in group.ring:
            return
        if member.accepted:
            state.lost.append((peer, reason))
            if is_leaving:
                state.history.happened(state.now, Totals(leaves=1))
            else:
                state.history.lost(state.now, peer, member.hello.name, member.hello.group, reason)
            self.leadership.lose(peer, is_leaving)
            group.accepted -= 1
        state.stop(group)
        group.forget(peer)

    def _abort_deadlocked(self, group: Group, op: OpRef, vote: OpenAbortVote) -> None:
        self._calls.abort_deadlocked(group, op, vote)

    # Steps after an event.

    def _advance(self) -> list[Effect]:
        progress = True
        while progress and not self.deposed:
            for peer, reason in self.admission.to_evict():
                self._evict(peer, reason)
            progress = (
                self._lose_dead()
                or self._verdicts.finish_flushes()
                or self._admit_first()
                or self._stages.step()
                or self._calls.step()
            )
        if not self.deposed:
            self._calls.end_deadlocked()
        return self.state.drain()

    def _admit_first(self) -> bool:
        """Admit waiting peers if there is no accepted peer that can call update_topology. The view in progress accepts
        peers in a ring that an earlier master announced."""
        if not self._has_nobody:
            return False
        waiting = self.admission.admissible
        if len(waiting) < self.state.options.founders:
            return False
        self.state.change.admitting = set(waiting)
        return True

    @property
    def _has_nobody(self) -> bool:
        change = self.state.change
        if self.state.accepted_count or change.admitting or change.is_preparing:
            return False
        return not any(group.ring for group in self.state.groups.values())

    @property
    def waits_for_founders(self) -> bool:
        return self.state.options.founders > 1 and self._has_nobody

    # Messages from accepted or pending peers.

    def _on_leave(self, member: Member, message: m.Leave) -> None:
        self.state.close(member.connection)
        self._remove(member.peer, f"left{': ' + message.reason if message.reason else ''}", is_leaving=True)

    def _on_tried(self, member: Member, message: m.Tried) -> None:
        if member.accepted:
            self._missing.tried(member, message)
        else:
            self.admission.tried(member, message)

    def _on_report(self, member: Member, message: m.Report) -> None:
        state = self.state
        state.stragglers.reported(member.peer, member.hello.group, message, state.now)
        state.traffic.reported(member.peer, member.hello.group, message, state.now)


STALLED_OPS_MAX = 8


def snapshot(master: Master, now: float, uptime_s: float, version: str) -> RunStatus:
    state = master.state
    waiting = {kind for group in state.groups.values() for kind in group.waiting}
    absent = {kind: state.missing(state.accepted, kind) for kind in waiting.intersection(Kind.GLOBAL)}
    members: list[MemberStatus] = []
    for group in state.groups.values():
        absent[Kind.SYNC] = state.missing(group.ring, Kind.SYNC) if group.waiting[Kind.SYNC] else []
        stalled = _stalled(group)
        members += [
            _member(state, state.members[peer], absent, stalled.get(peer, []), now) for peer in sorted(group.ring)
        ]
    shown = {member.peer for member in members}
    members += [_member(state, member, {}, [], now) for peer, member in state.members.items() if peer not in shown]
    history = state.history
    return RunStatus(
        run=state.run,
        term=state.term,
        version=version,
        uptime_s=uptime_s,
        peer_timeout_s=state.options.peer_timeout_s,
        view=state.installed_view,
        is_changing=state.is_changing,
        groups=[_group(state, group, now) for group in state.groups.values()],
        members=members,
        totals=history.totals,
        course=history.course(now),
        hour=history.hour(now),
        losses=history.losses(now),
        events=history.events(now),
        findings=state.stragglers.findings(now),
        run_name=state.run_name,
    )


def _group(state: RunState, group: Group, now: float) -> GroupStatus:
    return GroupStatus(
        group=group.number,
        ring=list(group.ring),
        epoch=group.epoch,
        state="running" if group.running else "flushing" if group.awaiting_flush else "forming",
        is_meshed=group.is_meshed,
        revision=group.revision,
        undecided_ops=group.ledger.undecided,
        is_syncing=group.sync is not None,
        links=[
            LinkFigures(*link, metric.bytes_per_s, metric.round_trip_s, now - metric.at)
            for link in ring_links(group.ring)
            if (metric := state.link_metrics.get(link)) is not None and not metric.is_assumed
        ],
        decision=group.decision,
    )


def _member(
    state: RunState, member: Member, absent: dict[str, list[int]], stalled: list[StalledOp], now: float
) -> MemberStatus:
    wait = member.wait
    group = state.groups.get(member.hello.group)
    asked_at = state.asked_at.get(member.peer)
    if member.accepted:
        standing = "accepted"
    elif member.peer in state.change.admitting or (group is not None and member.peer in group.ring):
        standing = "joining"
    else:
        standing = "pending" if member.has_heartbeat else "connecting"
    host = member.hosts[0]
    return MemberStatus(
        peer=member.peer,
        name=member.hello.name,
        group=member.hello.group,
        address=f"[{host}]:{member.hello.port}" if ":" in host else f"{host}:{member.hello.port}",
        state=standing,
        known_s=now - member.since,
        waiting=None if wait is None else Waiting(wait.kind, now - wait.since, absent[wait.kind]),
        stalled_ops=stalled,
        answer_due_s=None if asked_at is None else now - asked_at,
        is_heard=member.heartbeat is not None,
        traffic=state.traffic.of(member.peer),
        figures=state.traffic.figures(member.peer),
    )


def _stalled(group: Group) -> dict[int, list[StalledOp]]:
    found: dict[int, list[StalledOp]] = {}
    ledger: Ledger = group.ledger
    for op, stuck in ledger.stalled.items():
        for peer in stuck:
            ops = found.setdefault(peer, [])
            if len(ops) < STALLED_OPS_MAX:
                call, missing = ledger.missing(op, peer)
                ops.append(StalledOp(callers_tag(op.tag), op.sequence, _first(missing), call))
    return found


def _first(peers: Iterable[int]) -> list[int]:
    return list(islice(peers, NAMED_MAX))
