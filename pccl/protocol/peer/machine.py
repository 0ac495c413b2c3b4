"""The state machine of one peer in one run, from Hello to the end of its session.

Events arrive as method calls: messages from the master, calls by the user, reports from the engine and the dialers.
Effects accumulate until `drain()`, so that a batch of events costs one message to the master where possible. `Ops`,
`Links` and `GroupCalls` decide their own parts; this module handles views, terms and masters.

When the master dies, ops continue and calls wait. Messages to the master are dropped, but their content is kept as
state: ops that are done or failed here, broken links, the group call in progress. `SeekMaster` requests another master.
That master receives the peer's recovery report (Vote, see `recovery_report`). Once it leads (Resumed), the peer repeats
its state to it. Terms work as in Raft and Viewstamped Replication:

    1  A peer follows no master with a term below its own, so two masters never both receive new events.
    2  A peer reports verdicts that other peers may not have received (`KnownVerdicts`).
    3  Only a master that knows the run's secret can dismiss a peer, because any process may answer at a dead master's
       address. Each peer receives the secret in Welcome and reports it to the masters that it follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError
from pccl.protocol.messages import (
    ENGINE_THREADS_MAX,
    MASTER_TIMEOUT_S,
    PEER_TIMEOUT_S_MAX,
    PEER_TIMEOUT_S_MIN,
    Kind,
    OpRef,
)
from pccl.protocol.names import peer_named
from pccl.protocol.peer.effects import (
    CallResult,
    Ended,
    Installed,
    KeepHeartbeats,
    Outbox,
    PeerLog,
    ProbedLink,
    RunProbe,
    RunSync,
    SeekMaster,
    StartEngine,
    TryLinks,
)
from pccl.protocol.peer.group_calls import GroupCalls
from pccl.protocol.peer.links import LINK_TIMEOUT_S_MIN, Links, Measurements
from pccl.protocol.peer.ops import Ops, failure_of
from pccl.protocol.peer.view import KnownViews, View
from pccl.protocol.topology import are_linked_on_demand, linked_peers
from pccl.types import Result


class Peer:
    def __init__(self, group: int, connections: int, may_grow: bool = False, outlives_masters: bool = False) -> None:
        """`connections` is the initial number per link; it increases later if `may_grow`. The session ends
        with its master unless the peer `outlives_masters`."""
        self.site = ""
        self.site_size = 0
        self.outlives_masters = outlives_masters
        self.master_loss_level = "warning"
        self.obstacle = ""
        """Why the master delays this peer's admission; empty if it only waits for the other peers."""
        self.term = 0
        self.group = group
        self.connections = connections
        self.peer = 0
        self.run = ""
        self.peer_timeout_s = 0.0
        """Seconds of silence after which a peer counts as lost; 0 until Welcome sets it."""
        self.engine_threads = 1
        self.view: View | None = None
        self._secret = b""
        self._members: dict[int, m.PeerInfo] = {}
        self._names: dict[int, str] = {}
        self.views = KnownViews()
        self._flush: m.Flush | None = None
        self._resumed_at = 0.0
        self._outbox = Outbox()
        self.drain = self._outbox.drain
        self._measurements = Measurements()
        self.links = Links(self._outbox, connections, may_grow)
        links = self.links
        self.ops = Ops(self._outbox, links.number_of, links.reach, is_blocked=lambda: self._calls.is_exclusive)
        self._calls = GroupCalls(self._outbox, self.ops)
        # Direct references, because a forwarding method would cost each small op another Python call.
        self.deadline, self.tick = self.ops.deadline, self.ops.tick
        self.launch, self.cancel, self.expedite = self.ops.launch, self.ops.cancel, self.ops.expedite
        self.plain_start, self.uses_of = self.ops.plain_start, self.ops.uses_of
        self.op_handed_over, self.op_fast_completed = self.ops.handed_over, self.ops.fast_completed
        self.op_done, self.op_completed, self.op_ended = self.ops.done, self.ops.completed, self.ops.ended
        self.op_frozen, self.op_refused, self.op_mismatch = self.ops.stopped, self.ops.refused, self.ops.mismatched
        self.peer_at, self.link_limited = self.links.peer_at, self.links.limited
        self.connection_lost = self.links.connection_lost
        self.cancel_group_call = self._calls.cancel

    @property
    def is_over(self) -> bool:
        """Whether the session has ended. The engine may still hold ops."""
        return self._outbox.is_closed

    @property
    def is_led(self) -> bool:
        """Whether a master receives this peer's messages. Also true before the first master."""
        return self._outbox.is_led

    @property
    def is_optimizing(self) -> bool:
        """Whether an optimize_topology is in progress, so that other peers may measure their links with this one."""
        return self._calls.kind == Kind.OPTIMIZE_TOPOLOGY

    def name_of(self, peer: int) -> str:
        return self._names.get(peer, "")

    @property
    def _has_had_masters(self) -> bool:
        """Whether the current master may repeat what an earlier one has already sent."""
        return self.term > 1

    # Ops.

    @property
    def open_ops(self) -> int:
        """Number of ops without a result."""
        return self.ops.count

    def frozen(self, epoch: int) -> None:
        if self.ops.frozen(epoch):
            self._answer_flush()

    # Group calls.

    def group_call(self, call: int, kind: str, offer: m.SyncOffer | None = None) -> None:
        if self.is_over or self.view is None:
            self._outbox.emit(CallResult(call, Result.NOT_INITIALIZED, "not connected", 0))
            return
        self._calls.enter(call, kind, offer)

    def _on_group_call_result(self, message: m.GroupCallResult) -> None:
        if self._calls.is_exclusive and message.code == Result.SUCCESS:
            self.ops.uses.make_aborted()
        self._calls.on_result(message)
        self.ops.start_queued()

    def _on_sync_plan(self, message: m.SyncPlan) -> None:
        donors = [self._members[peer] for peer in message.donors if peer in self._members and peer != self.peer]
        self._calls.on_plan(message)
        self._outbox.emit(RunSync(message, donors))

    def sync_ended(self, sync: int, success: bool, reason: str, suspects: list[tuple[int, str]]) -> None:
        self._calls.fetched(sync, success)
        self._outbox.send(m.SyncReport(sync, success, reason, suspects))

    def _on_probe(self, message: m.Probe) -> None:
        self._measurements.discard(message.links)
        links = [
            ProbedLink(self._members[peer], is_inbound, self.links.connections_to(self._members[peer]))
            for peer, is_inbound in message.links
            if peer in self._members and peer != self.peer
        ]
        self._outbox.emit(RunProbe(message.probe, links))

    def probed(self, probe: int, found: list[m.LinkMetric], now: float) -> None:
        self._measurements.add(found, now)
        self._outbox.send(m.Probes(probe, found))

    # Links.

    def link_lost(self, link: int, reason: str) -> None:
        lost = self.links.lost(link, reason)
        if lost is not None and (self.ops.is_running or not self._is_on_demand(lost.peer)):
            self._outbox.send(lost)
            self._answer_prepare()

    def link_connected(self, link: int) -> bool:
        """Count a new connection of a link. Return whether to pass it to the engine; if not, the caller closes it."""
        is_wanted = self.links.connected(link)
        self._answer_prepare()
        return is_wanted

    def link_failed(self, link: int, reason: str) -> None:
        peer = self.links.peer_at(link)
        failed = self.links.failed(link, reason)
        if peer is not None and self._is_on_demand(peer):
            self.ops.give_up_pair(peer, f"no link between peer {self.peer} and {reason}")
        self._answer_prepare()
        prepared = self.views.prepared
        if failed is not None and prepared is not None and not prepared.answered:
            self._outbox.send(failed)

    def _is_on_demand(self, peer: int) -> bool:
        return self.view is not None and are_linked_on_demand(self.view.ring, self.peer, peer)

    def link_offered(self, peer: int, made_in: int) -> int | str | None:
        """Return the link number of an incoming connection, the reason to refuse it, or None to ask again after the
        master's next message, which may introduce the peer."""
        return "the session is over" if self.is_over else self.links.offered(peer, made_in)

    def tried(self, failed: list[tuple[int, str]]) -> None:
        for _, reason in failed[:1] if self.view is None else ():
            self.obstacle = f"this peer was evicted before because its links failed, and they still fail: {reason}"
            self._outbox.emit(PeerLog("warning", self.obstacle))
        self._outbox.send(m.Tried([(peer, reason[: m.REASON_CHARACTERS_MAX]) for peer, reason in failed]))

    # The session.

    def report(self, message: m.Report) -> None:
        if self.view is not None:
            self._outbox.send(message)

    def leave(self, reason: str) -> None:
        self._outbox.send(m.Leave(reason))
        self._end(Result.NOT_INITIALIZED, "this communicator was closed")

    def fail(self, reason: str) -> None:
        self._outbox.send(m.Leave(reason))
        self._end(Result.INTERNAL_ERROR, reason)

    def give_up(self, reason: str) -> None:
        self._end(Result.MASTER_CONNECTION_FAILED, reason)

    def _end(self, code: Result, reason: str) -> None:
        if self.is_over:
            return
        self._outbox.send_reports()
        self._outbox.is_closed = True
        self.ops.end(code, reason)
        self._calls.end(code, reason)
        self.links.close()
        self._outbox.emit(Ended(code, reason))

    # Masters.

    def received(self, message: m.FromMaster) -> None:
        """Handle a message. Raises ProtocolError if it is invalid now; the runtime then calls `master_lost`."""
        if self.is_over:
            return
        if not self.is_led and type(message) not in self._BEFORE_LEADERSHIP:
            raise ProtocolError(f"{type(message).__name__} from a master that does not lead")
        self._HANDLERS[type(message)](self, message)

    def master_lost(self, reason: str) -> None:
        """Handle a broken control connection or a silent master."""
        if self.is_over:
            return
        if not self.outlives_masters:
            self.give_up(reason)
            return
        if self.is_led:
            self._outbox.is_led = False
            if self.peer:  # `connect` reports the search of a newcomer
                self._outbox.emit(PeerLog(self.master_loss_level, f"{reason}; searching for a master"))
            self._calls.end_admission()
            self.ops.master_lost()
        self._outbox.emit(SeekMaster(reason))

    def resume(
        self,
        masters: int,
        now: float,
        session: bytes = b"",
        master_timeout_s: float = MASTER_TIMEOUT_S,
        run_name: str = "",
    ) -> m.Resume | None:
        """Return the first message to the next master, or None for Hello.

        `masters` is the number of master addresses, `session` the new session's key.
        """
        if not self.peer:
            return None
        self._resumed_at = now
        return m.Resume(
            m.PROTOCOL_VERSION,
            self.run,
            self.term,
            self.peer,
            masters=masters,
            is_accepted=self.view is not None,
            session=session,
            master_timeout_s=master_timeout_s,
            run_name=run_name,
        )

    def _on_welcome(self, message: m.Welcome) -> None:
        if self.peer:
            raise ProtocolError("a second Welcome")
        self._note_timeout(message.peer_timeout_s)
        if not 1 <= message.engine_threads <= ENGINE_THREADS_MAX:
            raise ProtocolError(f"{message.engine_threads} engine threads")
        if self.run and message.engine_threads != self.engine_threads:
            raise ProtocolError(f"{message.engine_threads} engine threads after {self.engine_threads}")
        if not self.run:
            self._outbox.emit(StartEngine(message.engine_threads))
        self.peer = message.peer
        self.run = message.run
        self._secret = message.secret
        self.term = message.term
        self.engine_threads = message.engine_threads
        self.links.welcomed(self.peer, self.engine_threads, self.peer_timeout_s)
        self._outbox.is_led = True
        self._outbox.emit(KeepHeartbeats(self.peer_timeout_s))
        self.obstacle = message.obstacle
        if self.obstacle:
            self._outbox.emit(PeerLog("warning", self.obstacle))

    def _note_timeout(self, peer_timeout_s: float) -> None:
        if not PEER_TIMEOUT_S_MIN <= peer_timeout_s <= PEER_TIMEOUT_S_MAX:
            raise ProtocolError(f"a peer timeout of {peer_timeout_s} s")
        self.peer_timeout_s = peer_timeout_s

    def _on_start_over(self, message: m.StartOver) -> None:
        if self.view is not None:
            raise ProtocolError("StartOver to a peer that was accepted")
        self.views.forget_prepared()
        self.peer = 0
        self._members = {}
        self.links.close()
        self.master_lost(message.reason)

    def _on_vote_request(self, message: m.VoteRequest) -> None:
        if self.is_led or message.term <= self.term:
            raise ProtocolError(f"it asks to lead in term {message.term}, but this peer is in term {self.term} already")
        self.term = message.term
        self._outbox.answer(m.Vote(self.term, self._recovery_report()))

    def _on_pre_vote_request(self, message: m.PreVoteRequest) -> None:
        if self.is_led:
            raise ProtocolError("PreVoteRequest from a master that leads")
        self._outbox.answer(self.views.summary())

    def _recovery_report(self) -> m.RecoveryReport:
        view, summary = self.view, self.views.summary()
        commits, aborts = self.ops.verdicts()
        ring = linked_peers(view.ring, self.peer) if view is not None else []
        return m.RecoveryReport(
            me=self._members.get(self.peer) or m.PeerInfo(self.peer, self.group, [], 0, self.connections),
            installed=summary.installed,
            prepared=summary.prepared,
            is_running=self.ops.is_running,
            has_decided=summary.has_decided,
            commits=commits,
            aborts=aborts,
            waits_in=self._calls.kind,
            outcomes=self._calls.outcomes,
            joined_after=self._calls.joined_after,
            synced=self._calls.synced,
            unlinked=[peer for peer in ring if not self.links.stands(peer)],
            peer_timeout_s=self.peer_timeout_s,
            engine_threads=self.engine_threads,
            site=self.site,
            site_size=self.site_size,
            secret=self._secret,
            link_metrics=self._measurements.aged(self._resumed_at),
            answered=summary.answered,
        )

    def _on_resumed(self, message: m.Resumed) -> None:
        if self.is_led or message.term != self.term:
            raise ProtocolError(f"it leads in term {message.term}, but this peer is in term {self.term}")
        self._note_timeout(message.peer_timeout_s)
        self._outbox.is_led = True
        self.views.rule_out_all_but(message.in_force)
        self.links.welcomed(self.peer, self.engine_threads, self.peer_timeout_s)
        self._outbox.emit(PeerLog("info", f"a master leads in term {self.term}"))
        self._outbox.emit(KeepHeartbeats(self.peer_timeout_s))
        self._restate()

    def _restate(self) -> None:
        self.ops.restate()
        if self.view is not None and self.ops.is_running:
            for lost in self.links.lost_needed(self.view.ring, self.view.is_meshed):
                self._outbox.send(lost)
        self._calls.restate()

    def _on_goodbye(self, message: m.Goodbye) -> None:
        if not self.is_led and self.run and message.secret != self._secret:
            self.master_lost(f"refused by a process that does not know the run: {message.reason}")
            return
        code = Result(message.code) if message.code in m.FAILURES else Result.MASTER_CONNECTION_FAILED
        self._end(code, message.reason)

    # Views.

    def _on_flush(self, message: m.Flush) -> None:
        is_stopped = not self.ops.is_running and not self.views.has_decided and self._has_had_masters
        if self.view is None or message.epoch != self.view.epoch or not (self.ops.is_running or is_stopped):
            raise ProtocolError(f"Flush of epoch {message.epoch}, which is not running")
        self._flush = message
        if self.ops.is_frozen:
            self._answer_flush()  # a master that has since died stopped the ops
        else:
            self.ops.freeze()

    def _answer_flush(self) -> None:
        if self._flush is not None and self.is_led:
            self._outbox.send(self.ops.flush_reply(self._flush.flush, self._has_had_masters))
            self._flush = None

    def _on_prepare(self, message: m.Prepare) -> None:
        """Prepare the next view: end the ops that it decides, and make the links that it needs."""
        if message.view <= self.views.last:
            raise ProtocolError(f"Prepare of view {message.view} after {self.views.last}")
        ring = next((ring for ring in message.rings if self.peer in ring.peers), None)
        listed = {peer for ring in message.rings for peer in ring.peers}
        known = self._members | {member.peer: member for member in message.members}
        self._names = {peer: member.name for peer, member in known.items()}
        self._members = {peer: member for peer, member in known.items() if peer in listed}
        if ring is None or any(peer not in self._members for peer in ring.peers):
            raise ProtocolError(f"view {message.view} has no ring for peer {self.peer}")
        self._measurements.keep(listed)
        prepared = self.views.prepare(message, ring, self.term)
        self.links.aim(message.view, ring.peers, self._members)
        if self.views.keeps_ring(ring):
            prepared.answered = True
            self._outbox.send(m.LinksReady(message.view, [], []))
            return
        self._flush = None
        lost = "; ".join(f"{peer_named(peer, self.name_of(peer))} was lost ({reason})" for peer, reason in message.lost)
        aborts = {OpRef(op.tag, op.sequence): failure_of(op.code, op.reason) for op in message.aborts}
        self.ops.settle(message.commits, aborts, lost or "the ring was changed")
        self.links.prepare({b if a == self.peer else a for a, b in message.relink if self.peer in (a, b)})
        self._answer_prepare()

    def _answer_prepare(self) -> None:
        prepared = self.views.prepared
        if prepared is None or prepared.answered or self.views.keeps_ring(prepared.ring):
            return
        if not self.is_led or prepared.term != self.term:
            return  # another Prepare follows
        answer = self.links.readiness()
        if answer is not None:
            prepared.answered = True
            self._outbox.send(answer)

    def _on_trial(self, message: m.Trial) -> None:
        if self.view is not None or not self.views.last:
            self._outbox.emit(TryLinks(message.members, max(LINK_TIMEOUT_S_MIN, self.peer_timeout_s)))

    def _on_install(self, message: m.Install) -> None:
        prepared = self.views.prepared
        if prepared is None or message.view != prepared.view:
            raise ProtocolError(f"Install of view {message.view}, which was not prepared")
        self.obstacle = ""
        self.links.installed()
        is_new_epoch = not self.views.keeps_ring(prepared.ring)
        if self.view is None:
            self._calls.joined_after = message.call_number
        elif self.views.admits_newcomers(prepared):
            self._calls.admitted(message.call_number)
        self.view = self.views.install(prepared, message, self.peer, self.group)
        self._outbox.emit(Installed(self.view, prepared.lost))
        self.ops.installed(self.view, is_new_epoch)

    _HANDLERS: ClassVar[dict[type[m.Message], Callable[[Peer, Any], None]]] = {
        m.Welcome: _on_welcome,
        m.PreVoteRequest: _on_pre_vote_request,
        m.VoteRequest: _on_vote_request,
        m.Resumed: _on_resumed,
        m.Elsewhere: lambda peer, message: peer.master_lost(message.reason),
        m.StartOver: _on_start_over,
        m.Goodbye: _on_goodbye,
        m.Flush: _on_flush,
        m.Prepare: _on_prepare,
        m.Trial: _on_trial,
        m.Install: _on_install,
        m.OpsCommit: lambda peer, message: peer.ops.on_commit(message, peer._has_had_masters),
        m.OpAbort: lambda peer, message: peer.ops.on_abort(message),
        m.AbortVoteRequest: lambda peer, message: peer.ops.on_abort_vote_request(message),
        m.GroupCallResult: _on_group_call_result,
        m.SyncPlan: _on_sync_plan,
        m.Probe: _on_probe,
    }
    _BEFORE_LEADERSHIP: ClassVar = frozenset(
        {m.Welcome, m.PreVoteRequest, m.VoteRequest, m.Resumed, m.Elsewhere, m.StartOver, m.Goodbye}
    )
