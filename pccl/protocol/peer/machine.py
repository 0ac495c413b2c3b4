"""The peer's side of the control plane.

Events come in as method calls: messages of the master, calls of the user, reports of the engine and of whoever makes
links. Effects collect until `drain()`, so a batch of events costs one message to the master where one will do.

An op is here

    queued   launched while no ops may start: a view is being changed, or an exclusive joint call is under way
    running  submitted to the engine under (epoch, tag, how-manieth use of the tag)
    done     all result bytes are here; the master has been or will be told, or the engines of the others (`agreement`)
    ending   the verdict is known; the engine gives the buffers back, on abort with `send` as it was
    ended    its caller has the result

A commit that says that every peer is done skips the wait for the engine: whatever this peer had to send has been
received, so nothing touches the buffers any more.

Ops of groups that agree by themselves need not come here at all: `plain_start` tells how one would start now, if that
is all that could come of it, and whoever runs ops so long says later what became of each: it is running (`op_started`)
or committed (`op_ran`). All that has happened must be told before anything else is.

The verdict alone decides what the caller is told: the master's, or what all who take part have agreed on. Ops that a
flush ends return when the next view is installed: a caller that then asks for the world size sees who is left.

A link is named by the pair and the view whose `Prepare` made it (`made_in`), so both ends agree which connections
belong to it. The peer with the higher number (accepted later) dials. What the engine sees is a link number of our own.

The master may die. Then nothing here stops: ops go on, calls wait. What would be said to it is not said, but kept as
state: which ops are done, which failed here, which links are broken, which joint call is waited in. `SeekMaster` asks
for another one; it hears the peer's testimony (Follow, see `testimony`), and when it leads (Resumed) is told all that
again. A peer follows no lower term than it has, and says the verdicts that it has heard and that others might not have:
of each tag the last commit and the aborts since, for whoever is committed with has decided all that came before. It is
sent away for good only by a master that shows that it knows the run, by the secret that every peer hears with its
Welcome and tells whomever it follows: at a dead master's address anybody may answer, if only by mistake.

A link that stands may get more connections: its dialer makes a lost one anew, and where the number is left to us,
either end adds as many as there are while the engine finds that their windows hold them back: what a pair needs is its
bandwidth times its round trip, which nobody can know before. A link that the network holds back gains nothing by
more streams, they only crowd each other.

Where engines have several threads, or lanes, each connection belongs to one of them by its index, on both sides, and
every link begins with a connection to each lane. A lost one is replaced in its lane, and a lane that is held back by
windows grows by itself.

A link between two live peers that carries nothing any more is missed by whichever end has something lying on it, after
half the peer timeout, and made anew; the other half is for that, so that a path that stays black is known after a peer
timeout, as a silent peer is. Only the dialer can tell that nothing gets through to the other side; the one that
expects it to dial is patient, for a process that is merely busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from pccl.protocol import agreement
from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError
from pccl.protocol.messages import (
    ENGINE_THREADS_MAX,
    FIGURES_KEPT_MAX,
    MASTER_TIMEOUT_S,
    PEER_TIMEOUT_S_MAX,
    PEER_TIMEOUT_S_MIN,
    Kind,
    OpRef,
)
from pccl.protocol.pairs import pair_tag
from pccl.protocol.peer.effects import (
    AddConnections,
    CallResult,
    CloseLink,
    Effect,
    Ended,
    EndOp,
    ForgetOp,
    ForgetUnmade,
    FreezeOp,
    FreezeOps,
    Installed,
    KeepBeats,
    Log,
    MakeLink,
    OpResult,
    ProbedLink,
    RunProbe,
    RunSync,
    SeekMaster,
    StartEngine,
    SubmitOp,
    ToMaster,
    TryLinks,
)
from pccl.protocol.peer.view import View, alone_in
from pccl.protocol.topology import linked_peers, neighbours
from pccl.types import Result, SharedStateSyncStrategy

LINK_SHARE = 0.5
"""Of the peer timeout: how long a link may carry nothing, and how long making it anew may then get nowhere."""
LINK_TIMEOUTS = 2.0
"""Making a link may take so many peer timeouts, and `LINK_TIMEOUT_S_MIN` at least."""
LINK_TIMEOUT_S_MIN = 2.0
LINK_CONNECTIONS_MAX = 64
"""More are refused, whoever dials."""
GROWN_CONNECTIONS_MAX = 16
"""Beyond these we add none by ourselves."""
PROBE_CONNECTIONS_MIN = 4
"""Of a link that may grow by itself: a measurement must not stop at a window that an op would have outgrown."""
GRACE_S = 0.5
"""How much later the other end may have begun to make a link."""
ABORTS_KEPT_MAX = 1000
"""Aborted uses of a tag, one after the other, that are remembered for a master after this one."""
ABORTS_KEPT_IN_ALL_MAX = 10_000
"""The same of all tags."""
EARLY_KEPT_MAX = 8
"""Uses of a tag that were aborted before this peer has made them and that its next calls end like. If there are more,
somebody waits for this peer again and again: they count as made, and its next call meets the next one of the others."""
FORGOTTEN_AT_ONCE = 64
"""So far what others announce of an op may lag behind its verdict, in uses of its tag, and still be found."""
STALL_AFTER_S = 2.0
"""An op that takes longer is reported to the master once."""


@dataclass
class _Op:
    op: int
    tag: int
    launched_at: float
    pair: tuple[int, bool] | None = None
    """The other peer of an op of two, and whether this one sends."""
    ref: OpRef | None = None
    agrees: bool = False
    """Its parties end it by themselves."""
    done: bool = False
    verdict: tuple[Result, str] | None = None
    world_size: int = 0
    until_install: bool = False
    """Its result waits for the next Install."""
    traffic: tuple[int, int] = (0, 0)
    """Payload bytes sent and received."""
    is_given_back: bool = False
    """By the engine, or never taken by it."""
    failure: tuple[Result, str] | None = None
    """Why it cannot or must not complete, as the master is told."""
    is_frozen: bool = False
    """If it is not done by now it never will be."""
    is_withdrawn: bool = False
    """This peer will not commit it by itself."""
    is_committed: bool = False
    """The master says so, and the engine has still to say that it is done."""
    stall_reported: bool = False


@dataclass
class _Link:
    link: int
    peer: int
    made_in: int
    connections: int
    """Without which it does not stand."""
    dial: bool
    connected: int = 0
    is_up: bool = False
    """All of them have come; further ones may come, and any but the last may go."""
    lost_early: list[int] = field(default_factory=list)
    """Lanes of those that were lost before that."""
    extras: dict[int, int] = field(default_factory=dict)
    """Connections dialled beyond those, by lane."""


@dataclass
class _Call:
    call: int
    kind: str
    offer: m.SyncOffer | None
    """What its caller came with."""
    held: m.SyncOffer | None = None
    """What there was when the plan came."""
    is_cancelled: bool = False
    plan: m.SyncPlan | None = None
    is_fetched: bool = False
    """All that the plan asks for has come."""


@dataclass
class _Next:
    """A prepared view, not installed yet."""

    view: int
    ring: m.Ring
    term: int
    """Of the master that has prepared it."""
    rings: list[m.Ring]
    lost: list[tuple[int, str]]
    failed: dict[int, str] = field(default_factory=dict)
    answered: bool = False
    """It may be in force elsewhere."""


class Peer:
    """One peer of one run, from Hello to its end."""

    def __init__(self, group: int, connections: int, may_grow: bool = False, outlives_masters: bool = False) -> None:
        """`connections` is how many each link begins with; it may add more where it `may_grow`. One that does not
        outlive its master ends with it."""
        self.site = ""
        self.site_size = 0
        """As of Hello."""
        self.outlives_masters = outlives_masters
        self.obstacle = ""
        """Why the master does not let this peer in for a while; empty: nothing but the others holds it up."""
        self.term = 0
        """The highest that it has followed."""
        self.group = group
        self.connections = connections
        self.may_grow = may_grow
        self.peer = 0
        self.run = ""
        self._secret = b""
        """Of the run."""
        self.peer_timeout_s = 0.0
        """The master has said how long a silence means a loss; 0 before."""
        self.engine_threads = 1
        """As the master has said."""
        self.view: View | None = None
        self.is_over = False
        self._effects: list[Effect] = []
        self._done_batch: list[OpRef] = []
        self._stall_batch: list[OpRef] = []
        self._over_batch: list[OpRef] = []
        self._members: dict[int, m.Member] = {}
        self._next: _Next | None = None
        self._answered: list[m.PreparedView] = []
        """Views after the installed one that it has answered to masters before the one that has prepared the next one.
        Those masters have not ruled out that they are in force elsewhere."""
        self._running = False
        self._flush: m.Flush | None = None
        self._links: dict[int, _Link] = {}
        """By peer."""
        self._next_link = 1
        self._ops: dict[int, _Op] = {}
        self._by_ref: dict[OpRef, _Op] = {}
        self._queued: deque[_Op] = deque()
        self._uses: dict[int, int] = {}
        """How often each tag was used in this epoch."""
        self._early: dict[OpRef, tuple[Result, str]] = {}
        """Verdicts on ops that were not launched here yet."""
        self._overtaken: dict[int, int] = {}
        """Tags of which more than EARLY_KEPT_MAX uses were aborted since this peer has used them, and the first."""
        self._withdrawn: dict[OpRef, tuple[Result, str]] = {}
        """Ops that were not launched here yet and that this peer will not commit by itself, and why."""
        self._has_committed = False
        """By itself, in this epoch."""
        self._is_full = False
        """So many tags were used in this epoch that nothing may start before the next one."""
        self._is_led = True
        """The master hears what is said."""
        self._rings: list[m.Ring] = []
        """Of the installed view."""
        self._is_frozen = False
        """All ops of the installed epoch have stopped."""
        self._settled: set[OpRef] = set()
        """Commits of the installed epoch that a prepared view has told."""
        self._verdicts: dict[int, list[tuple[int, tuple[Result, str] | None]]] = {}
        """By tag the uses in this epoch whose verdicts others might not have heard; no reason: committed."""
        self._noted_aborts: deque[OpRef] = deque()
        """All aborts that were noted in this epoch, the oldest first; some are of no interest any more."""
        self._met: dict[str, m.Met] = {}
        self._joined_after = 0
        self._admission: int | None = None
        """The last update_topology that was in force before its end was told."""
        self._synced: tuple[int, int] | None = None
        self._broken: dict[int, m.LinkLost] = {}
        """By peer, links of the installed view that were lost since."""
        self._figures: dict[tuple[int, bool], tuple[m.LinkFigure, float]] = {}
        """What was measured here of links with others, and when, the oldest first."""
        self._resumed_at = 0.0
        self._call: _Call | None = None
        self._waiting_calls: deque[_Call] = deque()

    def drain(self) -> list[Effect]:
        """The effects of all events since the last call, in order."""
        self._flush_batches()
        effects, self._effects = self._effects, []
        return effects

    def deadline(self) -> float | None:
        """When `tick` should be called next."""
        for op in self._by_ref.values() if self._running else ():
            if not op.stall_reported and op.verdict is None:
                return op.launched_at + STALL_AFTER_S
        return None

    def tick(self, now: float) -> None:
        if not self._running or self.view is None:
            return
        for op in self._by_ref.values():
            if op.stall_reported or op.verdict is not None:
                continue
            if now < op.launched_at + STALL_AFTER_S:
                break
            assert op.ref is not None
            op.stall_reported = True
            self._stall_batch.append(op.ref)
            if op.agrees and op.done:
                self._done_batch.append(op.ref)
            waits = "the other peers' results" if op.done else "data of its neighbours"
            text = f"op with tag {op.tag} has waited {STALL_AFTER_S:g} s for {waits} (ring {self.view.ring})"
            self._effects.append(Log("info", text, op.ref._asdict()))

    # What the user does.

    def launch(self, op: int, tag: int, now: float, pair: tuple[int, bool] | None = None) -> None:
        """Launches an op, at once or as soon as ops may start. Its end is an OpResult. `pair`: it is one with that peer
        alone, and whether this one sends."""
        assert op not in self._ops
        if self.is_over:
            self._effects.append(OpResult(op, Result.NOT_INITIALIZED, "the session is over", 0))
            return
        entry = self._ops[op] = _Op(op, tag, now, pair)
        if self._may_start:
            self._start(entry)
        else:
            self._queued.append(entry)

    def plain_start(self) -> SubmitOp | None:
        """How an op of the whole group with a tag that was used in this epoch would start now; its number, tag and
        sequence are not filled in. None: something else may come of it, or it would not end by agreement."""
        view = self.view
        if view is None or not self._may_start or view.world_size < 2 or not agreement.is_agreed(0, view.is_meshed):
            return None
        if self._queued or self._early or self._withdrawn:
            return None
        links = tuple(0 if peer == self.peer else self._link_number(peer) for peer in view.ring)
        if links.count(0) > 1:
            return None
        return self._submission(0, 0, 0, view, view.ring, links, agrees=True)

    def uses_of(self, tag: int) -> int:
        """How often it was used in this epoch. May be called from any thread."""
        return self._uses.get(tag, 0)

    def op_started(self, op: int, tag: int, sequence: int, now: float) -> None:
        """It runs, started as `plain_start` has said."""
        assert self.view is not None
        assert self._running
        entry = self._ops[op] = _Op(op, tag, now, world_size=self.view.world_size, agrees=True)
        entry.ref = self._count_use(tag, sequence)
        self._by_ref[entry.ref] = entry

    def op_ran(self, tag: int, sequence: int) -> None:
        """One that was started so is committed: all who take part are done."""
        self._has_committed = True
        self._note_verdict(self._count_use(tag, sequence), None)

    def _count_use(self, tag: int, sequence: int) -> OpRef:
        assert self._uses.get(tag) == sequence
        self._uses[tag] = sequence + 1
        self._overtaken.pop(tag, None)
        return OpRef(tag, sequence)

    def cancel(self, op: int, code: Result, reason: str) -> None:
        """The caller gives an op up: it is aborted on all peers, unless the master has committed it before."""
        entry = self._ops.get(op)
        if entry is None or entry.verdict is not None or self.is_over:
            return
        if entry.ref is None:
            self._queued.remove(entry)
            self._finish_op(entry, code, reason)
        elif self._running and self.view is not None:
            if entry.agrees and entry.failure is not None:
                return
            self._flush_batches()
            entry.failure = code, reason
            if entry.agrees:
                self._effects.append(FreezeOp(op))
            else:
                self._tell_failure(entry)

    def hasten(self, op: int) -> bool:
        """The caller does not wait for the next view to hear a verdict that is known; false if none is."""
        entry = self._ops.get(op)
        if entry is None or entry.verdict is None:
            return False
        entry.until_install = False
        self._release(entry)
        return True

    def joint(self, call: int, kind: str, offer: m.SyncOffer | None = None) -> None:
        """Enters a joint call, after those that this peer is in already. Its end is a CallResult."""
        if self.is_over or self.view is None:
            self._effects.append(CallResult(call, Result.NOT_INITIALIZED, "not connected", 0))
            return
        self._waiting_calls.append(_Call(call, kind, offer))
        self._next_call()

    def cancel_joint(self, call: int) -> None:
        for waiting in self._waiting_calls:
            if waiting.call == call:
                self._waiting_calls.remove(waiting)
                self._effects.append(CallResult(call, Result.TIMEOUT, "cancelled by its caller", 0))
                return
        if self._call is not None and self._call.call == call and not self.is_over:
            self._call.is_cancelled = True
            self._tell(m.JointCancel(call))

    def report(self, message: m.Report) -> None:
        """Tells the master what was done so far."""
        if self.view is not None:
            self._tell(message)

    def leave(self, reason: str) -> None:
        if not self.is_over:
            self._tell(m.Leave(reason))
            self._end(Result.NOT_INITIALIZED, "this communicator was closed")

    def fail(self, reason: str) -> None:
        """What cannot be gone on without is missing on this side."""
        if not self.is_over:
            self._tell(m.Leave(reason))
            self._end(Result.INTERNAL_ERROR, reason)

    # What the master says.

    def received(self, message: m.FromMaster) -> None:
        """ProtocolError if the message cannot be: the runtime then calls `give_up`."""
        if self.is_over:
            return
        if not self._is_led and type(message) not in self._BEFORE_LEADERSHIP:
            raise ProtocolError(f"{type(message).__name__} from a master that does not lead")
        self._HANDLERS[type(message)](self, message)

    def master_lost(self, reason: str) -> None:
        """The control connection is gone, or the master silent."""
        if self.is_over:
            return
        if not self.outlives_masters:
            self.give_up(reason)
            return
        if self._is_led:
            self._is_led = False
            self._effects.append(Log("warning", f"{reason}; looking for a master"))
            self._end_admission()
            self._is_full = False
            self._start_queued()
        self._effects.append(SeekMaster(reason))

    @property
    def is_led(self) -> bool:
        """A master hears what it says. So it is before the first one, too."""
        return self._is_led

    def give_up(self, reason: str) -> None:
        """There is no master."""
        self._end(Result.MASTER_CONNECTION_FAILED, reason)

    def resume(
        self,
        masters: int,
        now: float,
        session: bytes = b"",
        master_timeout_s: float = MASTER_TIMEOUT_S,
        patience_s: float = MASTER_TIMEOUT_S,
    ) -> m.Resume | None:
        """The first message to the next master; None: Hello. `masters` is how many may be asked, for `patience_s` of
        `master_timeout_s` from now on, and `session` the key of the session that begins."""
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
            patience_s=patience_s,
        )

    def _end_admission(self) -> None:
        """A view that has newcomers ends update_topology, though the master has not come to say so."""
        met = self._met.get(Kind.UPDATE_TOPOLOGY)
        if self._call is not None and self._call.kind == Kind.UPDATE_TOPOLOGY and self._admission == self._call.call:
            assert met is not None
            self._on_joint_result(m.JointResult(self._call.call, Result.SUCCESS, meeting=met.meeting))

    def _on_welcome(self, message: m.Welcome) -> None:
        if self.peer:
            raise ProtocolError("a second Welcome")
        if not PEER_TIMEOUT_S_MIN <= message.peer_timeout_s <= PEER_TIMEOUT_S_MAX:
            raise ProtocolError(f"a peer timeout of {message.peer_timeout_s} s")
        if not 1 <= message.engine_threads <= ENGINE_THREADS_MAX:
            raise ProtocolError(f"{message.engine_threads} engine threads")
        if self.run and message.engine_threads != self.engine_threads:
            raise ProtocolError(f"{message.engine_threads} engine threads after {self.engine_threads}")
        if not self.run:
            self._effects.append(StartEngine(message.engine_threads))
        self.peer = message.peer
        self.run = message.run
        self._secret = message.secret
        self.term = message.term
        self.peer_timeout_s = message.peer_timeout_s
        self.engine_threads = message.engine_threads
        self._is_led = True
        self._effects.append(KeepBeats(self.peer_timeout_s))
        self.obstacle = message.obstacle
        if self.obstacle:
            self._effects.append(Log("warning", self.obstacle))

    def _on_elsewhere(self, message: m.Elsewhere) -> None:
        self.master_lost(message.reason)

    def _on_start_over(self, message: m.StartOver) -> None:
        if self.view is not None:
            raise ProtocolError("StartOver to a peer that was accepted")
        self._next = None
        self._answered.clear()
        self.peer = 0
        self._members.clear()
        for peer in list(self._links):
            self._drop_link(peer)
        self.master_lost(message.reason)

    def _on_lead(self, message: m.Lead) -> None:
        if self._is_led or message.term <= self.term:
            raise ProtocolError(f"it would lead in term {message.term}; this peer follows one in term {self.term}")
        self.term = message.term
        self._effects.append(ToMaster(m.Follow(self.term, self._testimony())))

    def _on_gather(self, message: m.Gather) -> None:
        if self._is_led:
            raise ProtocolError("Gather from a master that leads")
        self._effects.append(ToMaster(self._stand()))

    def _stand(self) -> m.Stand:
        view, prepared = self.view, self._next
        return m.Stand(
            installed=None if view is None else m.InstalledView(view.view, self._rings, view.is_meshed),
            prepared=None if prepared is None else m.PreparedView(prepared.view, prepared.rings, prepared.answered),
            is_settled=prepared is not None and view is not None and not self._keeps_ring(prepared.ring),
            answered=list(self._answered),
        )

    def _testimony(self) -> m.Testimony:
        view, stand = self.view, self._stand()
        commits, aborts = self._heard_verdicts()
        return m.Testimony(
            me=self._members.get(self.peer) or m.Member(self.peer, self.group, [], 0, self.connections),
            installed=stand.installed,
            prepared=stand.prepared,
            is_running=self._running,
            is_settled=stand.is_settled,
            commits=sorted(self._settled.union(commits)),
            aborts=aborts,
            waits_in=self._call.kind if self._call is not None else "",
            met=list(self._met.values()),
            joined_after=self._joined_after,
            synced=self._synced,
            unlinked=[peer for peer in linked_peers(view.ring, self.peer) if not self._stands(peer)] if view else [],
            peer_timeout_s=self.peer_timeout_s,
            engine_threads=self.engine_threads,
            site=self.site,
            site_size=self.site_size,
            secret=self._secret,
            figures=[(figure, max(0, round(self._resumed_at - at))) for figure, at in self._figures.values()],
            answered=stand.answered,
        )

    def _stands(self, peer: int) -> bool:
        link = self._links.get(peer)
        return link is not None and link.is_up

    def _heard_verdicts(self) -> tuple[list[OpRef], list[m.Aborted]]:
        """Those that others might not have heard, of this epoch."""
        commits, aborts = [], []
        for tag, verdicts in self._verdicts.items():
            for sequence, reason in verdicts:
                if reason is None:
                    commits.append(OpRef(tag, sequence))
                else:
                    aborts.append(m.Aborted(tag, sequence, *reason))
        return commits, aborts

    def _note_verdict(self, op: OpRef, reason: tuple[Result, str] | None) -> None:
        heard = self._verdicts.setdefault(op.tag, [])
        if (op.sequence, reason) in heard:
            return
        if reason is None:
            # Later ones may have been aborted already, of those that were not launched here yet.
            heard[:] = [verdict for verdict in heard if verdict[0] > op.sequence]
        else:
            if heard and heard[-1][1] == reason:
                reason = heard[-1][1]  # of a thousand with one text the text is kept once
            if len(heard) >= ABORTS_KEPT_MAX:
                del heard[0]
            self._noted_aborts.append(op)
            if len(self._noted_aborts) > ABORTS_KEPT_IN_ALL_MAX:
                self._forget_abort(self._noted_aborts.popleft())
        heard.append((op.sequence, reason))

    def _forget_abort(self, op: OpRef) -> None:
        heard = self._verdicts[op.tag]
        heard[:] = [verdict for verdict in heard if verdict[0] != op.sequence or verdict[1] is None]

    def _on_resumed(self, message: m.Resumed) -> None:
        if self._is_led or message.term != self.term:
            raise ProtocolError(f"it leads in term {message.term}; this peer follows one in term {self.term}")
        if not PEER_TIMEOUT_S_MIN <= message.peer_timeout_s <= PEER_TIMEOUT_S_MAX:
            raise ProtocolError(f"a peer timeout of {message.peer_timeout_s} s")
        self._is_led = True
        self._answered = [each for each in self._answered if each.view in message.in_force]
        if self._next is not None and self._next.view not in message.in_force:
            self._next.answered = False
        self.peer_timeout_s = message.peer_timeout_s
        self._effects.append(Log("info", f"a master leads in term {self.term}"))
        self._effects.append(KeepBeats(self.peer_timeout_s))
        self._restate()

    def _restate(self) -> None:
        """All that the last master may not have heard."""
        view = self.view
        for batch in (self._done_batch, self._stall_batch, self._over_batch):
            batch.clear()
        if view is not None and self._running:
            done = [ref for ref, op in self._by_ref.items() if op.done and not op.agrees]
            if done:
                self._tell(m.OpsDone(view.epoch, done))
            for op in self._by_ref.values():
                op.stall_reported = False
                if op.failure is not None and (op.is_withdrawn or op.is_given_back or not op.agrees):
                    self._tell_failure(op)
            for ref, failure in self._withdrawn.items():
                self._tell(m.OpFailed(view.epoch, *ref, *failure, may_be_done=True))
            for lost in self._broken.values():
                if view.is_meshed or lost.peer in neighbours(view.ring, self.peer):
                    self._tell(lost)
        if self._call is not None:
            self._state_call(self._call)

    def _on_goodbye(self, message: m.Goodbye) -> None:
        if not self._is_led and self.run and message.secret != self._secret:
            self.master_lost(f"refused by somebody who does not know the run: {message.reason}")
            return
        code = Result(message.code) if message.code in m.FAILURES else Result.MASTER_CONNECTION_FAILED
        self._end(code, message.reason)

    def _on_flush(self, message: m.Flush) -> None:
        is_settled = self._next is not None and not self._keeps_ring(self._next.ring)
        is_stopped = not self._running and not is_settled and self.term > 1
        if self.view is None or message.epoch != self.view.epoch or not (self._running or is_stopped):
            raise ProtocolError(f"Flush of epoch {message.epoch}, which is not running")
        self._flush = message
        if self._is_frozen:
            self.frozen(message.epoch)  # for a master that has died
        elif self._running:
            self._effects.append(FreezeOps(message.epoch))
        self._running = False

    def _on_prepare(self, message: m.Prepare) -> None:
        if message.view <= self._known_view:
            raise ProtocolError(f"Prepare of view {message.view} after {self._known_view}")
        ring = next((ring for ring in message.rings if self.peer in ring.peers), None)
        listed = {peer for ring in message.rings for peer in ring.peers}
        self._members.update((member.peer, member) for member in message.members)
        self._members = {peer: member for peer, member in self._members.items() if peer in listed}
        if ring is None or any(peer not in self._members for peer in ring.peers):
            raise ProtocolError(f"view {message.view} has no ring for peer {self.peer}")
        self._broken = {peer: lost for peer, lost in self._broken.items() if peer in listed}
        self._figures = {link: figure for link, figure in self._figures.items() if link[0] in listed}
        last = self._next
        if last is not None and last.answered and last.term != self.term:
            self._answered.append(m.PreparedView(last.view, last.rings, answered=True))
        self._next = _Next(message.view, ring, self.term, message.rings, message.lost)
        if self._keeps_ring(ring):
            self._next.answered = True
            self._tell(m.LinksReady(message.view, [], []))
            return
        self._running = False
        self._flush = None
        lost = "; ".join(f"peer {peer} was lost ({reason})" for peer, reason in message.lost)
        self._settled.update(message.commits)
        reasons = {OpRef(op.tag, op.sequence): self._failure(op.code, op.reason) for op in message.aborts}
        for op, failure in reasons.items():
            self._note_verdict(op, failure)
        self._settle(set(message.commits), reasons, lost or "the ring was changed")
        relinked = {b if a == self.peer else a for a, b in message.relink if self.peer in (a, b)}
        for peer in relinked:
            self._drop_link(peer)
        for peer in [peer for peer in self._links if peer not in self._members]:
            self._drop_link(peer)
        for peer in linked_peers(ring.peers, self.peer):
            if peer not in self._links:
                is_needed = peer in neighbours(ring.peers, self.peer)
                self._make_link(peer, message.view, self.peer > peer, is_urgent=peer in relinked, is_needed=is_needed)
        self._answer_prepare()

    @property
    def is_optimizing(self) -> bool:
        """Takes part in an optimize_topology: others may measure their links with this peer."""
        return self._call is not None and self._call.kind == Kind.OPTIMIZE_TOPOLOGY

    @property
    def link_timeout_s(self) -> float:
        """How long bytes may lie on a link without anything getting through; 0 before Welcome."""
        return LINK_SHARE * self.peer_timeout_s

    @property
    def _known_view(self) -> int:
        """The last view that the master has told of."""
        return self._next.view if self._next is not None else self.view.view if self.view is not None else 0

    def _keeps_ring(self, ring: m.Ring) -> bool:
        return self.view is not None and ring.epoch == self.view.epoch

    def _failure(self, code: int, reason: str) -> tuple[Result, str]:
        if code not in m.FAILURES:
            raise ProtocolError(f"a failure with code {code}")
        return Result(code), reason

    def _settle(self, commits: set[OpRef], reasons: Mapping[OpRef, tuple[Result, str]], reason: str) -> None:
        for ref, op in list(self._by_ref.items()):
            op.until_install = True
            if ref in commits or op.is_committed:
                if not op.done:
                    raise ProtocolError(f"commit of an op that is not done: {ref}")
                self._decide(op, Result.SUCCESS, "")
            else:
                self._decide(op, *reasons.get(ref, (Result.RANK_CONNECTION_LOST, f"aborted on all peers: {reason}")))

    def _on_trial(self, message: m.Trial) -> None:
        if self.view is None and self._next is None:
            self._effects.append(TryLinks(message.members, max(LINK_TIMEOUT_S_MIN, self.peer_timeout_s)))

    def _on_install(self, message: m.Install) -> None:
        prepared = self._next
        if prepared is None or message.view != prepared.view:
            raise ProtocolError(f"Install of view {message.view}, which was not prepared")
        self._next = None
        self.obstacle = ""
        self._answered.clear()
        keeps = self._keeps_ring(prepared.ring)
        self._note_admission(prepared.rings, message.meeting)
        self._rings = prepared.rings
        hints: View | m.Install = self.view if keeps and self.view is not None else message
        self.view = View(
            view=prepared.view,
            epoch=prepared.ring.epoch,
            peer=self.peer,
            group=self.group,
            ring=tuple(prepared.ring.peers),
            group_sizes={ring.group: len(ring.peers) for ring in prepared.rings},
            is_meshed=message.is_meshed,
            direct_limit=hints.direct_limit,
            is_local=hints.is_local,
        )
        self._effects.append(Installed(self.view, prepared.lost))
        if keeps:
            return
        assert not self._by_ref
        self._uses.clear()
        self._early.clear()
        self._overtaken.clear()
        self._withdrawn.clear()
        self._has_committed = self._is_full = False
        self._verdicts.clear()
        self._noted_aborts.clear()
        self._settled.clear()
        self._is_frozen = False
        self._running = True
        for op in [op for op in self._ops.values() if op.until_install]:
            op.until_install = False
            self._release(op)
        self._start_queued()

    def _note_admission(self, rings: list[m.Ring], meeting: int) -> None:
        if self.view is None:
            self._joined_after = meeting
        elif {peer for ring in rings for peer in ring.peers} - {peer for ring in self._rings for peer in ring.peers}:
            self._met[Kind.UPDATE_TOPOLOGY] = m.Met(Kind.UPDATE_TOPOLOGY, meeting, Result.SUCCESS, "", 0)
            if self._call is not None and self._call.kind == Kind.UPDATE_TOPOLOGY:
                self._admission = self._call.call

    def _on_ops_commit(self, message: m.OpsCommit) -> None:
        self._require_running(message.epoch)
        for ref in message.ops:
            op = self._by_ref.get(ref)
            knows_more = self.term > 1 or self._has_committed
            if op is None and knows_more and ref.sequence < self._uses.get(ref.tag, 0):
                continue  # a master before this one has told us, or we have committed it by ourselves
            if op is None or not (op.done or op.agrees):
                raise ProtocolError(f"commit of an op that is not done: {ref}")
            if op.done:
                self._commit(op)
            else:
                op.is_committed = True
                self._note_verdict(ref, None)

    def _commit(self, op: _Op) -> None:
        """All who take part are done."""
        assert op.ref is not None
        del self._by_ref[op.ref]
        self._note_verdict(op.ref, None)
        self._finish_op(op, Result.SUCCESS, "")
        self._effects.append(ForgetOp(op.op))

    def _on_op_abort(self, message: m.OpAbort) -> None:
        self._require_running(message.epoch)
        ref = OpRef(message.tag, message.sequence)
        if message.code not in m.FAILURES:
            raise ProtocolError(f"an abort with code {message.code}")
        verdict = Result(message.code), message.reason
        self._withdrawn.pop(ref, None)
        op = self._by_ref.get(ref)
        if op is not None or ref.sequence >= self._uses.get(ref.tag, 0):
            self._note_verdict(ref, verdict)
        if op is not None:
            self._decide(op, *verdict)
        elif ref.sequence >= self._uses.get(ref.tag, 0):
            is_queued = any(self._is_named(queued, ref.tag) for queued in self._queued)
            if message.counts_as_made and ref.sequence == self._uses.get(ref.tag, 0) and not is_queued:
                self._uses[ref.tag] = ref.sequence + 1
            else:
                self._early[ref] = verdict
                self._bound_early(ref.tag)
            self._forget_unmade(ref)

    def _forget_unmade(self, op: OpRef) -> None:
        """What is kept for it, and for the last few before it, of which something may have come late."""
        assert self.view is not None
        unmade_since = self._overtaken.get(op.tag, self._uses.get(op.tag, 0))
        first = min(op.sequence, max(unmade_since, op.sequence + 1 - FORGOTTEN_AT_ONCE))
        self._effects.append(ForgetUnmade(self.view.epoch, op.tag, range(first, op.sequence + 1)))

    def _bound_early(self, tag: int) -> None:
        first = end = self._uses.get(tag, 0)
        while OpRef(tag, end) in self._early:
            end += 1
        if end == first or (end - first <= EARLY_KEPT_MAX and tag not in self._overtaken):
            return
        if tag not in self._overtaken:
            self._overtaken[tag] = first
            text = f"others gave up {end - first} ops with tag {tag} that were not called here; they count as made"
            self._effects.append(Log("info", text, {"tag": tag}))
        for sequence in range(first, end):
            del self._early[OpRef(tag, sequence)]
        self._uses[tag] = end

    def _on_withdraw(self, message: m.Withdraw) -> None:
        self._require_running(message.epoch)
        ref, failure = OpRef(message.tag, message.sequence), self._failure(message.code, message.reason)
        op = self._by_ref.get(ref)
        has_ended = op is None and ref.sequence < self._uses.get(ref.tag, 0)
        if op is not None:
            op.is_withdrawn = True
            op.failure = op.failure or failure
        elif not has_ended:
            self._withdrawn[ref] = failure
        heard = self._verdicts.get(ref.tag, ())
        was_aborted = any(sequence == ref.sequence and reason is not None for sequence, reason in heard)
        is_committed = op.is_committed if op is not None else has_ended and not was_aborted
        self._tell(m.Withdrawn(message.epoch, *ref, is_committed))

    def _require_running(self, epoch: int) -> None:
        if not self._running or self.view is None or epoch != self.view.epoch:
            raise ProtocolError(f"a verdict for epoch {epoch}, which is not running")

    def _on_joint_result(self, message: m.JointResult) -> None:
        call = self._call
        if call is None or call.call != message.call:
            raise ProtocolError(f"the result of joint call {message.call}, which is not under way")
        if message.code != Result.SUCCESS and message.code not in m.FAILURES:
            raise ProtocolError(f"the result of a joint call with code {message.code}")
        self._call = None
        if message.meeting:
            ended = m.Met(call.kind, message.meeting, message.code, message.reason, message.value)
            self._met[call.kind] = ended
            if call.kind == Kind.SYNC and message.code == Result.SUCCESS:
                self._synced = message.meeting, message.value
        self._effects.append(CallResult(call.call, Result(message.code), message.reason, message.value))
        self._next_call()
        self._start_queued()

    def _on_sync_plan(self, message: m.SyncPlan) -> None:
        donors = [self._members[peer] for peer in message.donors if peer in self._members and peer != self.peer]
        if self._call is not None:
            self._call.held = self._offer(self._call)
            self._call.plan = message
            self._call.is_fetched = False
        self._effects.append(RunSync(message, donors))

    def _on_probe(self, message: m.Probe) -> None:
        for link in message.links:
            self._figures.pop(link, None)  # of one that cannot be measured nothing is known
        links = [
            ProbedLink(self._members[peer], is_inbound, self._connections_to(self._members[peer]))
            for peer, is_inbound in message.links
            if peer in self._members and peer != self.peer
        ]
        self._effects.append(RunProbe(message.probe, links))

    # What the engine reports.

    def op_done(self, op: int, tx_bytes: int = 0, rx_bytes: int = 0) -> None:
        """All result bytes are here. The counts are those of the whole op, sent or not."""
        entry = self._ops[op]
        entry.done = True
        entry.traffic = tx_bytes, rx_bytes
        if entry.verdict is None and self._running:
            assert entry.ref is not None
            if entry.is_committed:
                self._commit(entry)
            elif not entry.agrees or entry.stall_reported:
                self._done_batch.append(entry.ref)

    def op_agreed(self, op: int) -> None:
        """All who take part in it are done."""
        entry = self._ops.get(op)
        if entry is None or entry.verdict is not None or entry.is_withdrawn or not self._running:
            return
        assert entry.done
        assert entry.ref is not None
        self._has_committed = True
        if entry.stall_reported:
            self._over_batch.append(entry.ref)
        self._commit(entry)

    def op_frozen(self, op: int) -> None:
        """If it was not reported as done before, it never will be."""
        entry = self._ops.get(op)
        if entry is None or entry.verdict is not None or entry.is_given_back:
            return
        entry.is_frozen = entry.is_withdrawn = True
        if self._running:
            self._tell_failure(entry)

    def op_refused(self, op: int, code: Result, reason: str) -> None:
        """The engine did not take an op that was submitted: it fails here, and so on all peers."""
        entry = self._ops[op]
        assert entry.ref is not None
        entry.is_given_back = True
        if entry.verdict is not None:
            self._release(entry)
        elif self.view is not None and not self.is_over:
            entry.failure = code, reason
            self._tell_failure(entry)

    def op_mismatch(self, op: int, reason: str, is_other_call: bool = False) -> None:
        """`is_other_call`: not the arguments differ, but what was called."""
        self.cancel(op, Result.INVALID_USAGE if is_other_call else Result.INVALID_ARGUMENT, reason)

    def op_ended(self, op: int, tx_bytes: int, rx_bytes: int) -> None:
        entry = self._ops[op]
        assert entry.verdict is not None
        entry.traffic = tx_bytes, rx_bytes
        entry.is_given_back = True
        self._release(entry)

    def frozen(self, epoch: int) -> None:
        """All ops of the epoch have stopped; everything that was done has been reported."""
        if self.view is None or self.view.epoch != epoch or self.is_over:
            return
        self._is_frozen = True
        if self._flush is None or not self._is_led:
            return
        done = [ref for ref, op in self._by_ref.items() if op.done]
        self._done_batch.clear()
        knows_more = self.term > 1 or self._has_committed or any(op.is_committed for op in self._by_ref.values())
        heard = self._heard_verdicts() if knows_more else ()
        self._tell(m.FlushReply(self._flush.flush, done, *heard))
        self._flush = None

    def _link(self, link: int) -> _Link | None:
        return next((each for each in self._links.values() if each.link == link), None)

    def peer_at(self, link: int) -> int | None:
        """Who is at the other end; None once the link is closed."""
        found = self._link(link)
        return found.peer if found is not None else None

    def link_lost(self, link: int, reason: str) -> None:
        """An established link broke."""
        found = self._link(link)
        if found is None:
            return
        self._drop_link(found.peer)
        if found.peer in self._members and self._is_linked(found.peer) and not self.is_over:
            lost = m.LinkLost(found.made_in, found.peer, reason[: m.REASON_CHARACTERS_MAX], self._has_committed)
            self._broken[found.peer] = lost
            self._tell(lost)
            # The master answers with another Prepare, unless the group may go on without this link.
            self._link_failed(found.peer, reason)

    # What the makers of links report.

    def link_connected(self, link: int) -> bool:
        """One more connection of the link stands. False if it is not wanted any more: then it must be closed, else
        handed to the engine."""
        found = self._link(link)
        if found is None or found.connected >= LINK_CONNECTIONS_MAX:
            return False
        found.connected += 1
        if found.connected == found.connections and not found.is_up:
            found.is_up = True
            for lane in found.lost_early:
                self._replace_connection(found, lane)
            self._answer_prepare()
        return True

    def connection_lost(self, link: int, reason: str, lane: int = 0) -> None:
        """A connection of a link broke; the link goes on with its others, unless they break, too. A peer that leaves or
        dies closes one after the other, which need not be told one by one."""
        found = self._link(link)
        if found is None:
            return
        text = f"the link with peer {found.peer} goes on with a connection less: {reason}"
        self._effects.append(Log("warning", text, {"other": found.peer}, link))
        if found.is_up:
            self._replace_connection(found, lane)
        else:
            found.lost_early.append(lane)

    def link_limited(self, link: int, lane: int = 0) -> None:
        """All connections that a link has in a lane are held back by their windows."""
        found = self._link(link)
        if found is None or not found.is_up or not self.may_grow or found.connected >= GROWN_CONNECTIONS_MAX:
            return
        count = min(found.connected // self.engine_threads, GROWN_CONNECTIONS_MAX - found.connected)
        text = f"windows hold back the link with peer {found.peer}: {count} connections more than {found.connected}"
        self._effects.append(Log("info", text, {"other": found.peer}))
        self._add_connections(found, lane, count, is_replacement=False)

    def link_failed(self, link: int, reason: str) -> None:
        found = self._link(link)
        if found is None or found.is_up:
            return
        self._drop_link(found.peer)
        if self._next is not None and found.made_in < self._next.view and self._is_linked(found.peer):
            # It was begun under an earlier Prepare, and the other side may have begun anew since: once more.
            self._make_link(found.peer, self._next.view, dial=self.peer > found.peer)
        else:
            self._link_failed(found.peer, reason)
            if found.dial and self._next is not None and not self._next.answered and self._is_linked(found.peer):
                self._tell(m.LinkFailed(self._next.view, found.peer, reason[: m.REASON_CHARACTERS_MAX]))

    def link_offered(self, peer: int, made_in: int) -> int | str | None:
        """A connection came in that shall belong to a link: the link's number, a refusal, or None: ask again after the
        next message of the master, which may tell who that is."""
        if self.is_over:
            return "the session is over"
        if made_in > self._known_view:
            return None
        if peer not in self._members or peer == self.peer:
            return f"peer {peer} is not in view {self._known_view}"
        link = self._links.get(peer)
        if link is not None and link.made_in > made_in:
            return f"the link with peer {peer} was made anew in view {link.made_in}"
        if link is None or link.made_in < made_in:
            # The dialer has dropped the link that we still have: its word counts.
            self._drop_link(peer)
            link = self._make_link(peer, made_in, dial=False)
        if link.connected >= LINK_CONNECTIONS_MAX:
            return f"the link with peer {peer} has {link.connected} connections already"
        return link.link

    def tried(self, failed: list[tuple[int, str]]) -> None:
        """What has come of `TryLinks`: with whom it did not work, and why."""
        for _, reason in failed[:1]:
            self.obstacle = f"this peer was evicted for its links before, and they still fail: {reason}"
            self._effects.append(Log("warning", self.obstacle))
        self._tell(m.Tried([(peer, reason[: m.REASON_CHARACTERS_MAX]) for peer, reason in failed]))

    def sync_ended(self, sync: int, success: bool, reason: str, suspects: list[tuple[int, str]]) -> None:
        call = self._call
        if call is not None and call.plan is not None and call.plan.sync == sync:
            call.is_fetched = success
        self._tell(m.SyncReport(sync, success, reason, suspects))

    def probed(self, probe: int, found: list[m.LinkFigure], now: float) -> None:
        for figure in found:
            self._figures[figure.peer, figure.is_inbound] = figure, now
        for oldest in list(self._figures)[:-FIGURES_KEPT_MAX]:
            del self._figures[oldest]
        self._tell(m.Probes(probe, found))

    # Ops.

    @property
    def open_ops(self) -> int:
        return len(self._ops)

    @property
    def _may_start(self) -> bool:
        if not self._running or self._is_full:
            return False
        return self._call is None or self._call.kind not in Kind.EXCLUSIVE

    def _start_queued(self) -> None:
        while self._queued and self._may_start:
            self._start(self._queued.popleft())

    def _start(self, op: _Op) -> None:
        view = self.view
        assert view is not None
        op.world_size = view.world_size
        if view.world_size < 2:
            self._finish_op(
                op,
                Result.TOO_FEW_PEERS,
                alone_in(self.group),
            )
            return
        refusal = self._pair_refusal(op.pair, view)
        if refusal is not None:
            self._finish_op(op, *refusal)
            return
        tag = self._name(op, view)
        op.agrees = agreement.is_agreed(tag, view.is_meshed)
        if op.agrees and self._is_led and agreement.is_full(len(self._uses), is_idle=not self._by_ref):
            self._is_full = True
            self._queued.appendleft(op)
            self._tell(m.TagsUsed(view.epoch, len(self._uses)))
            return
        sequence = self._uses.get(tag, 0)
        self._uses[tag] = sequence + 1
        self._overtaken.pop(tag, None)
        ref = OpRef(tag, sequence)
        early = self._early.pop(ref, None)
        if early is not None:
            self._finish_op(op, *early)
            return
        if ref in self._withdrawn:
            op.failure = self._withdrawn.pop(ref)
            op.is_withdrawn = True
        op.ref = ref
        self._by_ref[ref] = op
        peers = view.ring
        if op.pair is not None:
            other, is_sender = op.pair
            peers = (self.peer, other) if is_sender else (other, self.peer)
        links = tuple(self._link_number(peer) for peer in peers)
        self._effects.append(self._submission(op.op, tag, sequence, view, peers, links, op.agrees))

    def _submission(
        self, op: int, tag: int, sequence: int, view: View, peers: tuple[int, ...], links: tuple[int, ...], agrees: bool
    ) -> SubmitOp:
        """`peers`: who take part, with the links to them."""
        return SubmitOp(
            op=op,
            epoch=view.epoch,
            tag=tag,
            sequence=sequence,
            rank=peers.index(self.peer),
            world_size=len(peers),
            links=links,
            is_meshed=view.is_meshed,
            agrees=agrees,
            ring=view.ring,
            direct_limit=view.direct_limit,
            is_local=view.is_local,
        )

    def _pair_refusal(self, pair: tuple[int, bool] | None, view: View) -> tuple[Result, str] | None:
        """Why an op of two cannot start in this view; the other peer is refused for the same reason, or is gone."""
        if pair is None:
            return None
        other = pair[0]
        if other not in view.ring:
            return Result.RANK_CONNECTION_LOST, f"peer {other} has left; call again with a rank of the present group"
        if not view.is_meshed and other not in neighbours(view.ring, self.peer):
            return (
                Result.INVALID_USAGE,
                f"there is no link with peer {other}: in a group that is no mesh only neighbours of the ring have one",
            )
        return None

    def _is_named(self, op: _Op, tag: int) -> bool:
        """Whether it would be known by that tag if it started now."""
        view = self.view
        assert view is not None
        return (op.pair is None or op.pair[0] in view.ring) and self._name(op, view) == tag

    def _name(self, op: _Op, view: View) -> int:
        """The tag by which all who take part know the op."""
        if op.pair is None:
            return op.tag
        own, other = view.ring.index(self.peer), view.ring.index(op.pair[0])
        return pair_tag(own, other, op.tag) if op.pair[1] else pair_tag(other, own, op.tag)

    def _link_number(self, peer: int) -> int:
        """0, which is no link, where it has just been lost: the op waits for the flush that must follow."""
        link = self._links.get(peer)
        return link.link if link is not None else 0

    def _decide(self, op: _Op, code: Result, reason: str) -> None:
        assert op.verdict is None
        assert op.ref is not None
        assert op.done or code is not Result.SUCCESS
        op.verdict = code, reason
        del self._by_ref[op.ref]
        if not op.is_given_back:
            self._effects.append(EndOp(op.op, code is Result.SUCCESS))
        else:
            self._release(op)

    def _release(self, op: _Op) -> None:
        if op.verdict is not None and op.is_given_back and not op.until_install:
            self._finish_op(op, *op.verdict)

    def _finish_op(self, op: _Op, code: Result, reason: str) -> None:
        del self._ops[op.op]
        self._effects.append(OpResult(op.op, code, reason, op.world_size, *op.traffic))

    # Joint calls.

    def _next_call(self) -> None:
        while self._call is None and self._waiting_calls:
            call = self._waiting_calls.popleft()
            if call.kind in Kind.EXCLUSIVE and self._ops:
                tags = sorted({op.tag for op in self._ops.values()})
                reason = f"ops with tags {tags[:10]} are in flight; wait for their handles first"
                self._effects.append(CallResult(call.call, Result.PENDING_ASYNC_OPS, reason, 0))
                continue
            self._call = call
            self._state_call(call)

    def _state_call(self, call: _Call) -> None:
        """Tells the master, or another one after it, what this peer waits in."""
        open_ops = list(self._by_ref) if call.kind == Kind.ARE_PEERS_PENDING else []
        self._tell(m.JointCall(call.call, call.kind, self._offer(call), open_ops))
        if call.is_cancelled:
            self._tell(m.JointCancel(call.call))

    def _offer(self, call: _Call) -> m.SyncOffer | None:
        """What it brings: not what it came with, once that has been overwritten under masters before this one."""
        offer, plan = call.offer, call.plan
        if offer is None or plan is None:
            return offer
        if not (plan.fetch_content or plan.fetch_loose):
            return call.held
        if call.is_fetched:
            return msgspec.structs.replace(offer, revision=plan.revision, root=plan.root)
        if plan.fetch_content:
            return msgspec.structs.replace(offer, root=b"", strategy=SharedStateSyncStrategy.RECEIVE_ONLY.value)
        return call.held

    # Links.

    def _is_linked(self, peer: int) -> bool:
        """Whether the prepared view, else the installed one, wants a link with this peer."""
        ring: Sequence[int] = ()
        if self._next is not None:
            ring = self._next.ring.peers
        elif self.view is not None:
            ring = self.view.ring
        return peer in linked_peers(ring, self.peer)

    def _make_link(self, peer: int, made_in: int, dial: bool, is_urgent: bool = False, is_needed: bool = True) -> _Link:
        """`is_urgent`: one that had stood, and broke. The group can go on without one that is not needed."""
        member = self._members[peer]
        timeout_s = max(LINK_TIMEOUT_S_MIN, LINK_TIMEOUTS * self.peer_timeout_s)
        reach_s = self.link_timeout_s if is_urgent else max(LINK_TIMEOUT_S_MIN, self.peer_timeout_s)
        if is_urgent and not is_needed and not dial:
            timeout_s = min(timeout_s, reach_s + GRACE_S)
        connections = max(self.connections, member.connections, self.engine_threads)
        if peer in self._broken and self._broken[peer].made_in < made_in:
            del self._broken[peer]
        link = _Link(self._next_link, peer, made_in, connections, dial)
        self._next_link += 1
        self._links[peer] = link
        self._effects.append(MakeLink(link.link, member, made_in, link.connections, dial, reach_s, timeout_s))
        return link

    def _connections_to(self, member: m.Member) -> int:
        """Of the link, or that it would have."""
        link = self._links.get(member.peer)
        begun_with = max(self.connections, member.connections, self.engine_threads)
        count = max(begun_with, link.connected if link is not None else 0)
        return max(count, PROBE_CONNECTIONS_MIN) if self.may_grow else count

    def _replace_connection(self, link: _Link, lane: int) -> None:
        link.connected -= 1
        if link.dial:
            self._add_connections(link, lane, 1, is_replacement=True)

    def _add_connections(self, link: _Link, lane: int, count: int, is_replacement: bool) -> None:
        member = self._members.get(link.peer)
        if count <= 0 or member is None or self.is_over:
            return
        lanes = self.engine_threads
        extras = link.extras.get(lane, 0)
        link.extras[lane] = extras + count
        first = link.connections + (lane - link.connections) % lanes + extras * lanes
        indices = range(first, first + count * lanes, lanes)
        self._effects.append(
            AddConnections(
                link.link, member, link.made_in, indices, is_replacement, LINK_TIMEOUTS * self.peer_timeout_s
            )
        )

    def _drop_link(self, peer: int) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            self._effects.append(CloseLink(link.link))

    def _link_failed(self, peer: int, reason: str) -> None:
        if self._next is not None and self._is_linked(peer):
            self._next.failed[peer] = reason
            self._answer_prepare()

    def _answer_prepare(self) -> None:
        prepared = self._next
        if prepared is None or prepared.answered or self._keeps_ring(prepared.ring):
            return
        for peer in linked_peers(prepared.ring.peers, self.peer):
            link = self._links.get(peer)
            if peer not in prepared.failed and (link is None or not link.is_up):
                return
        if not self._is_led or prepared.term != self.term:
            return  # another view follows
        prepared.answered = True
        needed = neighbours(prepared.ring.peers, self.peer)
        failed = [(peer, reason) for peer, reason in sorted(prepared.failed.items()) if peer in needed]
        missing = [(peer, reason) for peer, reason in sorted(prepared.failed.items()) if peer not in needed]
        self._tell(m.LinksReady(prepared.view, failed, missing))

    def _tell_failure(self, op: _Op) -> None:
        assert self.view is not None
        assert op.ref is not None
        assert op.failure is not None
        may_be_done = op.is_withdrawn and not op.is_given_back and (op.done or not op.is_frozen)
        self._tell(m.OpFailed(self.view.epoch, *op.ref, *op.failure, may_be_done))

    def _tell(self, message: m.FromPeer) -> None:
        """What another master would have to know is kept as state: see `_restate`."""
        if self._is_led and not self.is_over:
            self._effects.append(ToMaster(message))

    # The end.

    def _end(self, code: Result, reason: str) -> None:
        if self.is_over:
            return
        self._flush_batches()
        self.is_over = True
        self._running = False
        for op in self._queued:
            self._finish_op(op, code, reason)
        self._queued.clear()
        for op in list(self._by_ref.values()):
            self._decide(op, code, reason)
        for op in self._ops.values():
            op.until_install = False
        for op in list(self._ops.values()):
            self._release(op)
        for call in [*([self._call] if self._call else []), *self._waiting_calls]:
            self._effects.append(CallResult(call.call, code, reason, 0))
        self._call = None
        self._waiting_calls.clear()
        for peer in list(self._links):
            self._drop_link(peer)
        self._effects.append(Ended(code, reason))

    def _flush_batches(self) -> None:
        if self.view is not None and not self.is_over and self._is_led:
            if self._done_batch and self._running:
                self._effects.append(ToMaster(m.OpsDone(self.view.epoch, self._done_batch)))
            if self._stall_batch and self._running:
                self._effects.append(ToMaster(m.OpsStalled(self.view.epoch, self._stall_batch)))
            if self._over_batch and self._running:
                self._effects.append(ToMaster(m.OpsOver(self.view.epoch, self._over_batch)))
        self._done_batch, self._stall_batch, self._over_batch = [], [], []

    _HANDLERS: ClassVar[dict[type[m.Message], Callable[[Peer, Any], None]]] = {
        m.Welcome: _on_welcome,
        m.Gather: _on_gather,
        m.Lead: _on_lead,
        m.Resumed: _on_resumed,
        m.Elsewhere: _on_elsewhere,
        m.StartOver: _on_start_over,
        m.Goodbye: _on_goodbye,
        m.Flush: _on_flush,
        m.Prepare: _on_prepare,
        m.Trial: _on_trial,
        m.Install: _on_install,
        m.OpsCommit: _on_ops_commit,
        m.OpAbort: _on_op_abort,
        m.Withdraw: _on_withdraw,
        m.JointResult: _on_joint_result,
        m.SyncPlan: _on_sync_plan,
        m.Probe: _on_probe,
    }
    _BEFORE_LEADERSHIP: ClassVar = frozenset(
        {m.Welcome, m.Gather, m.Lead, m.Resumed, m.Elsewhere, m.StartOver, m.Goodbye}
    )
