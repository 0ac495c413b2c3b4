"""One peer's ops: launched by its callers, run by its engine, and ended by verdicts.

An op starts in the installed view, is identified by epoch, tag and use count, and goes through the states of `OpState`.
The master decides its verdict, or all participants commit it once they have completed it (`completion`). A view that
changes the ring ends every op that has started. An op ended by a flush returns only when the view is installed, so its
caller then sees the new world size.

The fast path runs ops without this module if only one course is possible: `plain_start` returns the submission.
Before any other event, the fast path reports each op as running (`handed_over`) or committed (`fast_completed`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple

from pccl.protocol import completion
from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError
from pccl.protocol.completion import pair_tag
from pccl.protocol.messages import OpRef
from pccl.protocol.peer.effects import (
    EndOp,
    ForgetOp,
    ForgetUnlaunched,
    FreezeOp,
    FreezeOps,
    OpResult,
    Outbox,
    SubmitOp,
)
from pccl.protocol.peer.view import View, alone_in
from pccl.protocol.topology import are_linked_on_demand, neighbours
from pccl.types import Result

STALL_AFTER_S = 2.0
"""Seconds after which an open op is reported to the master; each op is reported once."""


class Ops:
    def __init__(self, outbox: Outbox, link_to: LinkTo, reach: LinkTo, is_blocked: Callable[[], bool]) -> None:
        """`reach` is `link_to` for point-to-point ops. `is_blocked` returns whether an exclusive group call is in
        progress."""
        self._outbox = outbox
        self._link_to = link_to
        self._reach = reach
        self._plain: tuple[View, tuple[int, ...], SubmitOp | None] | None = None
        """A view, the links to its peers, and the plain start that they allow."""
        self._is_blocked = is_blocked
        self._view: View | None = None
        self.is_running = False
        self.is_frozen = False
        self.has_committed = False
        """Whether this peer has committed ops of this epoch by itself."""
        self._is_full = False
        """Whether ops wait for the next epoch because this one has used too many tags."""
        self._ops: dict[int, Op] = {}
        self._queued: deque[Op] = deque()
        self._undecided: dict[OpRef, Op] = {}
        self.uses = Uses()
        self.known_verdicts = KnownVerdicts()
        self._settled: set[OpRef] = set()

    # The interface for callers.

    def launch(self, op: int, tag: int, now: float, pair: tuple[int, bool] | None = None) -> None:
        """Launch an op, immediately or once ops may start. It ends with an OpResult.

        A `pair`, the other peer and whether this one sends, makes it a point-to-point op.
        """
        assert op not in self._ops
        if self._outbox.is_closed:
            self._outbox.emit(OpResult(op, Result.NOT_INITIALIZED, "the session is over", 0))
            return
        entry = self._ops[op] = Op(op, tag, now, pair)
        if self._may_start:
            self._start(entry)
        else:
            self._queued.append(entry)

    def cancel(self, op: int, code: Result, reason: str) -> None:
        """Abort an op on all peers for its caller, unless it is already committed."""
        entry = self._ops.get(op)
        if entry is None or self._outbox.is_closed:
            return
        if entry.state is OpState.QUEUED:
            self._queued.remove(entry)
            self._finish(entry, code, reason)
        elif entry.state in UNDECIDED and self.is_running:
            if entry.is_mutual and entry.failure is not None:
                return
            self._outbox.send_reports()
            entry.failure = code, reason
            if entry.is_mutual:
                self._outbox.emit(FreezeOp(op))
            else:
                self._report_failure(entry)

    def give_up_pair(self, other: int, reason: str) -> None:
        """Abort the point-to-point ops with a peer because their link cannot be made."""
        for op in [op for op in self._undecided.values() if op.pair is not None and op.pair[0] == other]:
            self.cancel(op.op, Result.RANK_CONNECTION_FAILED, reason)

    def expedite(self, op: int) -> bool:
        """Report an op's verdict without waiting for the next view. Return False if there is no verdict yet."""
        entry = self._ops.get(op)
        if entry is None or entry.verdict is None:
            return False
        self._stop_awaiting(entry)
        return True

    def plain_start(self) -> SubmitOp | None:
        """Return the submission of an op of the whole group, without number, tag and use count. Return None if such an
        op might need the machine. `pair_start` turns the submission into that of a point-to-point op."""
        view = self._view
        if view is None or not self._may_start or len(view.ring) < 2 or not completion.is_mutual(0, view.is_meshed):
            return None
        if self._queued or self.uses.aborts or self.uses.promises:
            return None
        links = tuple(map(self._link_to, view.ring))
        if self._plain is None or self._plain[0] is not view or self._plain[1] != links:
            self._plain = view, links, plain_submission(view, self._link_to)
        return self._plain[2]

    def uses_of(self, tag: int) -> int:
        return self.uses.made(tag)

    def handed_over(self, op: int, tag: int, sequence: int, now: float, pair: tuple[int, bool] | None = None) -> None:
        """Take over a running op that the fast path started with `plain_start`. `pair` is as in `launch`."""
        assert self._view is not None
        assert self.is_running
        entry = self._ops[op] = Op(op, tag, now, pair, world_size=self._view.world_size, is_mutual=True)
        ref = self.uses.make(shared_tag(self._view, tag, pair))
        assert ref.sequence == sequence
        self._submit(entry, ref)

    def fast_completed(self, tag: int, sequence: int) -> None:
        """Record the commit of an op that the fast path started. `tag` is the tag that the participants share."""
        self.has_committed = True
        ref = self.uses.make(tag)
        assert ref.sequence == sequence
        self.known_verdicts.commit(ref)

    # Time.

    def deadline(self) -> float | None:
        for op in self._undecided.values() if self.is_running else ():
            if not op.stall_reported:
                return op.launched_at + STALL_AFTER_S
        return None

    def tick(self, now: float) -> None:
        for op in self._undecided.values() if self.is_running else ():
            if op.stall_reported:
                continue
            if now < op.launched_at + STALL_AFTER_S:
                break
            self._report_stall(op)

    def _report_stall(self, op: Op) -> None:
        assert op.ref is not None
        op.stall_reported = True
        self._outbox.stalled.append(op.ref)
        if op.is_mutual and op.state in IS_DONE:
            self._outbox.done.append(op.ref)

    def single_waits(self) -> list[OpWait]:
        return [
            OpWait(op.op, op.tag, op.launched_at, op.pair, op.state is OpState.QUEUED)
            for op in self._ops.values()
            if op.pair is not None or op.state is OpState.QUEUED
        ]

    # Starts.

    @property
    def count(self) -> int:
        return len(self._ops)

    @property
    def tags(self) -> list[int]:
        return sorted({op.tag for op in self._ops.values()})

    @property
    def undecided(self) -> list[OpRef]:
        return list(self._undecided)

    @property
    def queued(self) -> int:
        return len(self._queued)

    @property
    def _may_start(self) -> bool:
        return self.is_running and not self._is_full and not self._is_blocked()

    def start_queued(self) -> None:
        while self._queued and self._may_start:
            self._start(self._queued.popleft())

    def _start(self, op: Op) -> None:
        """Submit an op to the engine, or end it if its verdict is already known, or queue it for a new epoch."""
        view = self._view
        assert view is not None
        op.world_size = view.world_size
        refused = refusal(view, op.pair)
        if refused is not None:
            self._finish(op, *refused)
            return
        tag = shared_tag(view, op.tag, op.pair)
        op.is_mutual = completion.is_mutual(tag, view.is_meshed)
        is_idle = not self._undecided
        if op.is_mutual and self._outbox.is_led and completion.is_full(self.uses.tags, is_idle):
            self._is_full = True
            self._queued.appendleft(op)
            self._outbox.send(m.TagsUsed(view.epoch, self.uses.tags))
            return
        ref = self.uses.make(tag)
        aborted = self.uses.aborts.pop(ref, None)
        if aborted is not None:
            code, text = aborted
            late = ". That was before this call: call again" if code is Result.TIMEOUT else ""
            self._finish(op, code, text + late)
            return
        promised = self.uses.promises.pop(ref, None)
        if promised is not None:
            op.failure = promised
            op.has_voted_abort = True
        self._submit(op, ref)
        self._outbox.emit(submission(view, op, ref, self._link_to if op.pair is None else self._reach))

    def _submit(self, op: Op, ref: OpRef) -> None:
        op.move(OpState.RUNNING)
        op.ref = ref
        self._undecided[ref] = op

    def master_lost(self) -> None:
        """Start the ops that wait for a new epoch, because no epoch will begin soon without a master."""
        self._is_full = False
        self.start_queued()

    # Ends.

    def _decide(self, op: Op, code: Result, reason: str) -> None:
        assert op.ref is not None
        assert op.state in UNDECIDED
        assert code is not Result.SUCCESS or op.state in IS_DONE
        op.verdict = code, reason
        del self._undecided[op.ref]
        if op.state is OpState.REFUSED:
            self._release(op)
        else:
            op.move(OpState.ENDING)
            self._outbox.emit(EndOp(op.op, code is Result.SUCCESS))

    def _commit(self, op: Op) -> None:
        """Commit an op that all participants have completed, even while ops are stopped, unless this peer has promised
        not to commit it."""
        assert op.ref is not None
        del self._undecided[op.ref]
        self.known_verdicts.commit(op.ref)
        # Emit this before the result: once the caller has the result, the engine must not restore the input.
        self._outbox.emit(ForgetOp(op.op))
        self._finish(op, Result.SUCCESS, "")

    def _release(self, op: Op) -> None:
        """End an op that the engine has released and whose verdict is known."""
        assert op.verdict is not None
        if op.awaits_view:
            op.move(OpState.HELD)
        else:
            self._finish(op, *op.verdict)

    def _stop_awaiting(self, op: Op) -> None:
        op.awaits_view = False
        if op.state is OpState.HELD:
            self._release(op)

    def _finish(self, op: Op, code: Result, reason: str) -> None:
        op.move(OpState.ENDED)
        del self._ops[op.op]
        self._outbox.emit(OpResult(op.op, code, reason, op.world_size, *op.traffic))

    def _report_failure(self, op: Op) -> None:
        assert self._view is not None
        assert op.ref is not None
        assert op.failure is not None
        may_be_done = op.has_voted_abort and op.state in MAY_BE_DONE
        self._outbox.send(m.OpFailed(self._view.epoch, *op.ref, *op.failure, may_be_done))

    # Verdicts from the master.

    def on_commit(self, message: m.OpsCommit, had_masters: bool) -> None:
        """Apply commits. `had_masters` means that an earlier master may have sent them already."""
        self._require_running(message.epoch)
        for ref in message.ops:
            op = self._undecided.get(ref)
            knows_more = had_masters or self.has_committed
            if op is None and knows_more and self.uses.is_made(ref):
                continue
            if op is not None and op.state is OpState.DONE:
                self._commit(op)
            elif op is not None and op.is_mutual and op.state is OpState.RUNNING:
                op.move(OpState.COMMITTED)
                self.known_verdicts.commit(ref)
            elif op is None or op.state is not OpState.COMMITTED:
                raise ProtocolError(f"commit of an op that is not done: {ref}")

    def on_abort(self, message: m.OpAbort) -> None:
        self._require_running(message.epoch)
        ref, failure = OpRef(message.tag, message.sequence), failure_of(message.code, message.reason)
        self.uses.promises.pop(ref, None)
        op = self._undecided.get(ref)
        if op is not None:
            self.known_verdicts.abort(ref, failure)
            self._decide(op, *failure)
        elif not self.uses.is_made(ref):
            self.known_verdicts.abort(ref, failure)
            self._abort_unmade(ref, failure, message.counts_as_made)

    def _abort_unmade(self, ref: OpRef, failure: Failure, counts_as_made: bool) -> None:
        view = self._view
        assert view is not None
        is_queued = any(would_have_tag(view, queued, ref.tag) for queued in self._queued)
        self.uses.abort(ref, failure, counts_as_made and not is_queued)
        self._outbox.emit(ForgetUnlaunched(view.epoch, ref.tag, self.uses.unmade_until(ref)))

    def on_abort_vote_request(self, message: m.AbortVoteRequest) -> None:
        """Vote not to commit an op without the master, unless it is already committed."""
        self._require_running(message.epoch)
        ref, failure = OpRef(message.tag, message.sequence), failure_of(message.code, message.reason)
        op = self._undecided.get(ref)
        has_ended = op is None and self.uses.is_made(ref)
        if op is not None:
            op.has_voted_abort = True
            op.failure = op.failure or failure
        elif not has_ended:
            self.uses.promises[ref] = failure
        is_committed = has_ended and not self.known_verdicts.was_aborted(ref)
        if op is not None:
            is_committed = op.state is OpState.COMMITTED
        self._outbox.send(m.AbortVote(message.epoch, *ref, is_committed))

    def _require_running(self, epoch: int) -> None:
        if not self.is_running or self._view is None or epoch != self._view.epoch:
            raise ProtocolError(f"a verdict for epoch {epoch}, which is not running")

    # Reports from the engine.

    def done(self, op: int, tx_bytes: int = 0, rx_bytes: int = 0) -> None:
        """Record that all result bytes have arrived. The byte counts cover the whole op."""
        entry = self._ops[op]
        entry.traffic = tx_bytes, rx_bytes
        if entry.state is OpState.COMMITTED:
            if self.is_running:
                self._commit(entry)
            else:
                entry.move(OpState.SETTLED)
        elif entry.state in UNDECIDED:
            entry.move(OpState.DONE)
            if self.is_running and (not entry.is_mutual or entry.stall_reported):
                assert entry.ref is not None
                self._outbox.done.append(entry.ref)

    def completed(self, op: int) -> None:
        """Commit an op that all participants completed, even if ops are stopped, unless this peer promised not to."""
        entry = self._ops.get(op)
        if entry is None or entry.verdict is not None or entry.has_voted_abort:
            return
        if entry.state is OpState.SETTLED:
            return
        assert entry.state is OpState.DONE
        assert entry.ref is not None
        self.has_committed = True
        if entry.stall_reported and self.is_running:
            self._outbox.over.append(entry.ref)
        self._commit(entry)

    def stopped(self, op: int) -> None:
        """Record that the engine has stopped an op. It will not report the op as done afterwards."""
        entry = self._ops.get(op)
        if entry is None or entry.state not in UNDECIDED or entry.state is OpState.REFUSED:
            return
        if entry.state is OpState.RUNNING:
            entry.move(OpState.STOPPED)
        entry.has_voted_abort = True
        if self.is_running:
            self._report_failure(entry)

    def refused(self, op: int, code: Result, reason: str) -> None:
        entry = self._ops[op]
        if entry.verdict is not None:
            self._release(entry)
        elif not self._outbox.is_closed:
            entry.move(OpState.REFUSED)
            entry.failure = code, reason
            self._report_failure(entry)

    def mismatched(self, op: int, reason: str, is_other_call: bool = False) -> None:
        """Abort an op because other peers call it with different arguments or make another call instead."""
        self.cancel(op, Result.INVALID_USAGE if is_other_call else Result.INVALID_ARGUMENT, reason)

    def ended(self, op: int, tx_bytes: int, rx_bytes: int) -> None:
        entry = self._ops[op]
        entry.traffic = tx_bytes, rx_bytes
        self._release(entry)

    # Views.

    def freeze(self) -> None:
        """Stop all ops of the epoch. The engine then calls `frozen`."""
        if self.is_running and self._view is not None:
            self._outbox.emit(FreezeOps(self._view.epoch))
        self._halt()

    def _halt(self) -> None:
        self.is_running = False
        self._outbox.report_ops_of(0)

    def frozen(self, epoch: int) -> bool:
        """Record that all ops of the epoch have stopped and been reported. Return False if the epoch is over."""
        if self._view is None or self._view.epoch != epoch or self._outbox.is_closed:
            return False
        self.is_frozen = True
        return True

    def flush_reply(self, flush: int, had_masters: bool) -> m.FlushReply:
        done = [ref for ref, op in self._undecided.items() if op.state in IS_DONE]
        is_committed = any(op.state in (OpState.COMMITTED, OpState.SETTLED) for op in self._undecided.values())
        knows_more = had_masters or self.has_committed or is_committed
        return m.FlushReply(flush, done, *(self.known_verdicts.newest() if knows_more else ()))

    def settle(self, commits: Collection[OpRef], aborts: Mapping[OpRef, Failure], reason: str) -> None:
        """End all ops of the epoch as a prepared view decides. `reason` applies to ops in neither list."""
        self._halt()
        self._settled.update(commits)
        for ref, failure in aborts.items():
            self.known_verdicts.abort(ref, failure)
        committed = frozenset(commits)
        for ref, op in list(self._undecided.items()):
            op.awaits_view = True
            if ref in committed or op.state in (OpState.COMMITTED, OpState.SETTLED):
                if op.state not in IS_DONE:
                    raise ProtocolError(f"commit of an op that is not done: {ref}")
                self._decide(op, Result.SUCCESS, "")
            else:
                self._decide(op, *aborts.get(ref, (Result.RANK_CONNECTION_LOST, f"aborted on all peers: {reason}")))

    def installed(self, view: View, is_new_epoch: bool) -> None:
        self._view = view
        if not is_new_epoch:
            return
        assert not self._undecided
        self.uses = Uses()
        self.known_verdicts = KnownVerdicts()
        self._settled = set()
        self.has_committed = self._is_full = self.is_frozen = False
        self.is_running = True
        self._outbox.report_ops_of(view.epoch)
        for op in [op for op in self._ops.values() if op.awaits_view]:
            self._stop_awaiting(op)
        self.start_queued()

    # Another master, and the end.

    def verdicts(self) -> tuple[list[OpRef], list[m.Aborted]]:
        commits, aborts = self.known_verdicts.newest()
        return sorted(self._settled.union(commits)), aborts

    def restate(self) -> None:
        """Repeat the reports about running ops that the last master may not have received."""
        self._outbox.discard_reports()
        view = self._view
        if view is None or not self.is_running:
            return
        done = [ref for ref, op in self._undecided.items() if op.state in IS_DONE and not op.is_mutual]
        if done:
            self._outbox.send(m.OpsDone(view.epoch, done))
        for op in self._undecided.values():
            op.stall_reported = False
            if op.failure is not None and (op.has_voted_abort or op.state is OpState.REFUSED or not op.is_mutual):
                self._report_failure(op)
        for ref, failure in self.uses.promises.items():
            self._outbox.send(m.OpFailed(view.epoch, *ref, *failure, may_be_done=True))

    def end(self, code: Result, reason: str) -> None:
        """End all ops because the session ends. Ops committed by a master and done here (SETTLED) succeed."""
        self._halt()
        for op in self._queued:
            self._finish(op, code, reason)
        self._queued.clear()
        for op in list(self._undecided.values()):
            if op.state is OpState.SETTLED:
                self._decide(op, Result.SUCCESS, "")
            else:
                self._decide(op, code, reason)
        for op in list(self._ops.values()):
            self._stop_awaiting(op)


LinkTo = Callable[[int], int]
"""Returns the number of the link to a peer, or 0 if the link was just lost; then the op waits for the flush."""


def refusal(view: View, pair: tuple[int, bool] | None) -> Failure | None:
    """Return why an op cannot start in this view, or None. Both ends of a point-to-point op get the same answer."""
    if view.world_size < 2:
        return Result.TOO_FEW_PEERS, alone_in(view.group)
    if pair is None:
        return None
    other = pair[0]
    if other not in view.ring:
        return Result.RANK_CONNECTION_LOST, f"peer {other} has left; call again with a rank of the current group"
    if view.is_meshed or are_linked_on_demand(view.ring, view.peer, other):
        return None
    if other not in neighbours(view.ring, view.peer):
        return (
            Result.INVALID_USAGE,
            f"no link with peer {other}: some of this group's peers cannot connect to each other, so only neighbors in "
            "the ring are linked; form a group of only these two",
        )
    return None


def shared_tag(view: View, tag: int, pair: tuple[int, bool] | None) -> int:
    if pair is None:
        return tag
    own, other = view.ring.index(view.peer), view.ring.index(pair[0])
    return pair_tag(own, other, tag) if pair[1] else pair_tag(other, own, tag)


def would_have_tag(view: View, op: Op, tag: int) -> bool:
    return (op.pair is None or op.pair[0] in view.ring) and shared_tag(view, op.tag, op.pair) == tag


def submission(view: View, op: Op, ref: OpRef, link_to: LinkTo) -> SubmitOp:
    participants = view.ring
    if op.pair is not None:
        other, is_sender = op.pair
        participants = (view.peer, other) if is_sender else (other, view.peer)
    return SubmitOp(
        op=op.op,
        epoch=view.epoch,
        tag=ref.tag,
        sequence=ref.sequence,
        rank=participants.index(view.peer),
        world_size=len(participants),
        links=tuple(0 if peer == view.peer else link_to(peer) for peer in participants),
        is_meshed=view.is_meshed,
        is_mutual=op.is_mutual,
        ring=view.ring,
        direct_limit=view.direct_limit,
        is_local=view.is_local,
    )


def plain_submission(view: View, link_to: LinkTo) -> SubmitOp | None:
    """Return the submission of an op of the whole group that completes without the master, with number, tag and use
    count 0. Return None if a link is missing."""
    start = submission(view, Op(0, 0, 0.0, is_mutual=True), OpRef(0, 0), link_to)
    return None if start.links.count(0) > 1 else start


def pair_start(start: SubmitOp, pair: tuple[int, bool]) -> SubmitOp | None:
    """Return the submission of a point-to-point op, derived from `start`, that of an op of the whole group.

    Its tag is that of the two peers for the caller's tag 0. Return None if the other peer has left.
    """
    other, is_sender = pair
    if other not in start.ring:
        return None
    rank = start.ring.index(other)
    link = start.links[rank]
    tag = pair_tag(start.rank, rank, 0) if is_sender else pair_tag(rank, start.rank, 0)
    links = (0, link) if is_sender else (link, 0)
    return replace(start, tag=tag, rank=0 if is_sender else 1, world_size=2, links=links)


# The states of an op, the use counts of tags, and the verdicts of an epoch.

Failure = tuple[Result, str]


class OpState(Enum):
    """States of an op. Only the verdict decides the caller's result."""

    QUEUED = auto()
    """Launched while ops may not start, for example during a view change or an exclusive group call."""
    RUNNING = auto()
    """Submitted to the engine under (epoch, tag, use count)."""
    DONE = auto()
    """All result bytes have arrived; the verdict is pending."""
    STOPPED = auto()
    """Stopped by the engine before it was done."""
    REFUSED = auto()
    """Refused by the engine."""
    COMMITTED = auto()
    """Committed by the master before the engine reported it done."""
    SETTLED = auto()
    """COMMITTED, then reported done while ops were stopped. It ends with the next view."""
    ENDING = auto()
    """The verdict is known; the engine returns the buffers, after restoring the input of an aborted op."""
    HELD = auto()
    """Released by the engine; the result waits for the next view."""
    ENDED = auto()
    """The caller has the result."""


_S = OpState
TRANSITIONS = {
    _S.QUEUED: {_S.RUNNING, _S.ENDED},
    _S.RUNNING: {_S.DONE, _S.STOPPED, _S.REFUSED, _S.COMMITTED, _S.ENDING},
    _S.DONE: {_S.ENDING, _S.ENDED},
    _S.STOPPED: {_S.REFUSED, _S.ENDING},
    _S.REFUSED: {_S.HELD, _S.ENDED},
    _S.COMMITTED: {_S.SETTLED, _S.REFUSED, _S.ENDING, _S.ENDED},
    _S.SETTLED: {_S.ENDING},
    _S.ENDING: {_S.HELD, _S.ENDED},
    _S.HELD: {_S.ENDED},
    _S.ENDED: set[OpState](),
}
UNDECIDED = frozenset({_S.RUNNING, _S.DONE, _S.STOPPED, _S.REFUSED, _S.COMMITTED, _S.SETTLED})
"""States of a submitted op whose verdict has not been applied."""
IS_DONE = frozenset({_S.DONE, _S.SETTLED})
MAY_BE_DONE = frozenset({_S.RUNNING, _S.DONE, _S.COMMITTED, _S.SETTLED})
"""Undecided states in which the op is done or may become done."""


class OpWait(NamedTuple):
    """An op that waits for its result, as described to `wait_reasons`."""

    op: int
    tag: int
    since: float
    pair: tuple[int, bool] | None
    is_queued: bool
    """Whether the op has not started."""


@dataclass(eq=False)
class Op:
    op: int
    tag: int
    launched_at: float
    pair: tuple[int, bool] | None = None
    state: OpState = OpState.QUEUED
    ref: OpRef | None = None
    is_mutual: bool = False
    """Whether its participants complete it without the master: see `completion`."""
    world_size: int = 0
    traffic: tuple[int, int] = (0, 0)
    failure: Failure | None = None
    has_voted_abort: bool = False
    """Whether this peer has promised not to commit the op without the master."""
    stall_reported: bool = False
    verdict: Failure | None = None
    awaits_view: bool = False

    def move(self, state: OpState) -> None:
        assert state in TRANSITIONS[self.state], f"op {self.op} with tag {self.tag}: {self.state} to {state}"
        self.state = state


FORGOTTEN_AT_ONCE = 64
"""Maximum number of unlaunched uses of a tag to forget at once. Late messages for earlier uses are not dropped."""


class Uses:
    """Use counts of one epoch's tags, and what is known about future uses.

    All peers make the same calls and so reach the same counts, but at different times: other peers may abort an op, or
    the master may request an abort vote, before this peer launches it. Both facts are kept until the launch. After an
    exclusive group call no op is in flight, so any abort that is still kept belongs to a call that this peer skipped.
    That call counts as made, because later calls with the tag would otherwise be matched wrongly.
    """

    def __init__(self) -> None:
        self._made: dict[int, int] = {}
        self.aborts: dict[OpRef, Failure] = {}
        """Future uses that are already aborted."""
        self.promises: dict[OpRef, Failure] = {}
        """Future uses that this peer has promised not to commit by itself."""

    @property
    def tags(self) -> int:
        return len(self._made)

    def made(self, tag: int) -> int:
        return self._made.get(tag, 0)

    def is_made(self, op: OpRef) -> bool:
        return op.sequence < self._made.get(op.tag, 0)

    def make(self, tag: int) -> OpRef:
        sequence = self._made.get(tag, 0)
        self._made[tag] = sequence + 1
        return OpRef(tag, sequence)

    def abort(self, op: OpRef, failure: Failure, counts_as_made: bool) -> None:
        """Keep the abort of a future use, unless it counts as made."""
        if counts_as_made and op.sequence == self.made(op.tag):
            self._made[op.tag] = op.sequence + 1
        else:
            self.aborts[op] = failure

    def make_aborted(self) -> None:
        """Count aborted future uses as made, because all peers are past these calls."""
        for op in sorted(self.aborts):
            if op.sequence == self.made(op.tag):
                self._made[op.tag] = op.sequence + 1
                del self.aborts[op]

    def unmade_until(self, op: OpRef) -> range:
        """Return this use and the last few unmade uses before it, because late messages for them may still arrive."""
        first = min(op.sequence, max(self.made(op.tag), op.sequence + 1 - FORGOTTEN_AT_ONCE))
        return range(first, op.sequence + 1)


ABORTS_KEPT_MAX = 1000
"""Number of successive aborted uses of one tag that are kept for the next master."""
ABORTS_KEPT_IN_ALL_MAX = 10_000
"""Number of aborted uses of all tags that are kept."""


def failure_of(code: int, reason: str) -> Failure:
    """Return a failure sent by the master. Raises ProtocolError for an invalid code."""
    if code not in m.FAILURES:
        raise ProtocolError(f"a failure with code {code}")
    return Result(code), reason


class KnownVerdicts:
    """The verdicts of an epoch that other peers may lack, kept for the next master.

    A peer has at most one op per tag in flight, so a commit implies that all earlier uses of the tag are decided. It is
    enough to keep each tag's last commit and the aborts after it.
    """

    def __init__(self) -> None:
        self._by_tag: dict[int, list[tuple[int, Failure | None]]] = {}
        self._aborts: deque[OpRef] = deque()
        """All aborts, the oldest first, including superseded ones."""

    def __len__(self) -> int:
        return sum(map(len, self._by_tag.values()))

    def commit(self, op: OpRef) -> None:
        known = self._by_tag.setdefault(op.tag, [])
        if (op.sequence, None) not in known:
            # Later uses may have been aborted before this peer made them.
            known[:] = [verdict for verdict in known if verdict[0] > op.sequence]
            known.append((op.sequence, None))

    def abort(self, op: OpRef, failure: Failure) -> None:
        known = self._by_tag.setdefault(op.tag, [])
        if (op.sequence, failure) in known:
            return
        if known and known[-1][1] == failure:
            failure = known[-1][1]  # share one copy of the text
        if len(known) >= ABORTS_KEPT_MAX:
            del known[0]
        self._aborts.append(op)
        if len(self._aborts) > ABORTS_KEPT_IN_ALL_MAX:
            self._forget(self._aborts.popleft())
        known.append((op.sequence, failure))

    def _forget(self, abort: OpRef) -> None:
        known = self._by_tag[abort.tag]
        known[:] = [verdict for verdict in known if verdict[0] != abort.sequence or verdict[1] is None]

    def was_aborted(self, op: OpRef) -> bool:
        known = self._by_tag.get(op.tag, ())
        return any(sequence == op.sequence and failure is not None for sequence, failure in known)

    def newest(self) -> tuple[list[OpRef], list[m.Aborted]]:
        commits, aborts = [], []
        for tag, verdicts in self._by_tag.items():
            for sequence, failure in verdicts:
                if failure is None:
                    commits.append(OpRef(tag, sequence))
                else:
                    aborts.append(m.Aborted(tag, sequence, *failure))
        return commits, aborts
