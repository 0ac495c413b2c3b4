"""A session's ops. Any thread launches, cancels and releases them; the trio thread submits them to the engine.

Launches, cancels and releases each have a queue and wake the trio thread, where `_take` passes them to the machine.
While the fast path is open, small ops use it instead. A release returns the arrays of an op that its caller gave up
before its verdict is known; the op's tag stays in use until the verdict.

1. The queues have no lock, because a signal handler that closes the communicator may interrupt a launch and then waits
   for the trio thread.
2. At any moment an op is in a queue, in the table, on the fast path, or over. So the end of the session misses none.
3. Ops with the same tag reach the machine in the order of the tag's uses. Before the tag of an op on the fast path
   becomes free, the engine's events report the op. So `_take` first notes the lengths of the queues, then reads the
   events, and takes no more launches than noted, so that the predecessor of each is already counted.
4. The length of the queue of cancels is noted before that of launches. So an op whose cancel is taken is known to the
   machine, is contained in the events, or was interrupted before it was submitted.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Protocol

import trio

from pccl.protocol.names import peers_named
from pccl.protocol.peer import effects as ps
from pccl.protocol.peer.machine import Peer
from pccl.runtime.data_plane import events
from pccl.runtime.data_plane.engine import Engine, StagedOps, Verdict
from pccl.runtime.data_plane.fast_path import FastPath
from pccl.runtime.data_plane.op_spec import OpSpec, RootLostError
from pccl.runtime.data_plane.pending import OpName, PendingOp
from pccl.runtime.session.driver import Driver, Handlers, Lifetime, SessionError
from pccl.runtime.session.recorder import FlightRecorder
from pccl.runtime.session.reports import WorkCounters
from pccl.runtime.threads.waking import Latch
from pccl.types import Result

LEAVE_S = 5.0

OPS_AS_EXPECTED = frozenset(
    {
        events.OpHandedOver,
        events.OpFastCompleted,
        events.OpDone,
        events.OpCompleted,
        events.OpEnded,
        events.OpDetached,
    }
)
"""Kinds of op events that require no decision by the machine."""
AS_EXPECTED = OPS_AS_EXPECTED | {events.LinkCounters}
"""All such kinds of events. The fast path may stay open while they are read."""


class Session(Protocol):
    """The session's methods for any thread."""

    def abandon(self, error: BaseException) -> None: ...

    def store_failed(self, reason: str) -> SessionError: ...

    def whom(self, op: PendingOp) -> str: ...


class Ops:
    """The ops of a session."""

    def __init__(
        self,
        session: Session,
        lifetime: Lifetime,
        engine: Engine,
        fast_path: FastPath,
        counters: WorkCounters,
        recorder: FlightRecorder,
        table: dict[int, PendingOp],
    ) -> None:
        """`table` maps numbers to the ops that the machine knows or is about to get."""
        self.driver: Driver
        """Set by the session before the first op."""
        self.table = table
        self.holders: dict[OpName, PendingOp] = {}
        """The op in flight that holds each name, which no other op can use."""
        self.detaching: dict[int, PendingOp] = {}
        """Ops whose arrays the engine will release."""
        self.whom = session.whom
        self._session = session
        self._lifetime = lifetime
        self._engine = engine
        self._staged = StagedOps(engine)
        self._fast_path = fast_path
        self._counters = counters
        self._token = trio.lowlevel.current_trio_token()
        self._numbers = itertools.count(1)
        self._launched: deque[PendingOp] = deque()
        self._cancelled: deque[tuple[PendingOp, Result, str]] = deque()
        self._releases: deque[PendingOp] = deque()
        reports: Handlers = {
            events.OpHandedOver: self._op_handed_over,
            events.OpEnded: lambda machine, event: machine.op_ended(event.op, event.tx_bytes, event.rx_bytes),
            events.OpDetached: lambda _, event: self.detaching.pop(event.op).release(),
            events.OpFrozen: lambda machine, event: machine.op_frozen(event.op),
            events.OpMismatch: self._op_mismatch,
            events.OpRefused: lambda machine, event: machine.op_refused(event.op, Result.INTERNAL_ERROR, event.reason),
            events.GroupFrozen: lambda machine, event: machine.frozen(event.epoch),
            events.LinkDown: lambda machine, event: machine.link_lost(event.link, event.reason),
            events.LinkDegraded: lambda machine, event: machine.connection_lost(
                event.link, event.reason, event.thread, event.over_udp
            ),
            events.LinkCounters: lambda _, event: counters.link_counted(event),
            events.LinkLimited: lambda machine, event: machine.link_limited(
                event.link, event.thread, event.limit, event.round_trip_s
            ),
        }
        self._reports = recorder.noting(reports)
        self.handlers: Handlers = {
            ps.SubmitOp: self._submit,
            ps.FreezeOps: lambda _, effect: engine.freeze(effect.epoch),
            ps.FreezeOp: self._freeze_op,
            ps.EndOp: self._end_op,
            ps.ForgetOp: self._forget_op,
            ps.ForgetUnlaunched: self._forget_unmade,
            ps.OpResult: self._op_result,
        }
        lifetime.at_end(self._finish_queued)

    # Any thread.

    def new(self, spec: OpSpec) -> PendingOp:
        """Return an op to launch. It can be cancelled even if a signal interrupts its launch."""
        is_plain = spec.new_source is None and spec.feedback is None
        return PendingOp(next(self._numbers), spec if is_plain else spec.launched(), self)

    def launch(self, op: PendingOp) -> None:
        """Launch an op. Raises SessionError if its tag or error feedback is in flight or the session is over."""
        self._claim_tag(op)
        self._enqueue(op)

    def launch_waiting(self, op: PendingOp) -> None:
        """Launch an op from a thread that then waits for it. The op may be over on return."""
        self._claim_tag(op)
        if not self._fast_path.run(op, waits=True):
            self._enqueue(op)

    def start(self, op: PendingOp) -> None:
        """Launch an op from a thread that waits later (`PendingOp.join_started`) or never."""
        self._claim_tag(op)
        if not self._fast_path.run(op, waits=False):
            self._enqueue(op)

    def cancel(self, op: PendingOp, code: Result, reason: str) -> None:
        """Request that an op be aborted on all peers; the master decides its outcome. The op's launch may have been
        interrupted at any point."""
        self._cancelled.append((op, code, reason))
        self._wake()

    def ask_for_release(self, op: PendingOp) -> None:
        """Stop an op and return its caller's arrays. `PendingOp.reclaim` calls it."""
        self._releases.append(op)
        if not self._wake():
            # The engine was closed before the run ended, and has restored all buffers.
            reason = self._lifetime.failure or SessionError(Result.NOT_INITIALIZED, "the trio run has ended")
            op.finish(ps.OpResult(op.op, reason.result, reason.message, 0))
            op.release()

    def wait_for_release(self, op: PendingOp) -> None:
        if not self.is_own_thread():  # the trio thread would wait for itself
            op.wait_released()

    def leave_for(self, reason: str) -> None:
        """Leave the run. The session is over on return."""
        if self.is_own_thread():
            self._session.store_failed(reason)
            return
        has_left = Latch()

        def leave() -> None:
            self._session.store_failed(reason)
            has_left.set()

        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(leave)
            has_left.wait(LEAVE_S)

    def free_tag(self, op: PendingOp) -> None:
        """Free the tag of an op that is over. `PendingOp.finish` calls it."""
        if self.holders.get(op.name) is op:
            self.holders.pop(op.name, None)  # another thread may free it at the same time

    def _claim_tag(self, op: PendingOp) -> None:
        if self._lifetime.failure is not None:
            self._require_alive_for(op)
        if op.residuals is not None and not op.residuals.claim(op):
            text = "the feedback is that of an op in flight; wait for it, and use one ErrorFeedback for each array"
            raise self._refused(op, SessionError(Result.INVALID_USAGE, text))
        holder = self.holders.setdefault(op.name, op)
        if holder is op:
            return
        text = f"an op with tag {op.tag} is already in flight; wait for it or use another tag"
        if holder.is_given_up:
            text = (
                f"an op with tag {op.tag} is still in flight: its caller gave it up, and neither the master nor the "
                f"other peers have confirmed its outcome; use another tag, or try again later"
            )
        raise self._refused(op, SessionError(Result.INVALID_USAGE, text))

    def _require_alive_for(self, op: PendingOp) -> None:
        failure = self._lifetime.failure
        if failure is not None:
            raise self._refused(op, SessionError(failure.result, failure.message))

    @staticmethod
    def _refused(op: PendingOp, error: SessionError) -> SessionError:
        """End an op that has not been launched, and return the error to raise."""
        op.finish(ps.OpResult(op.op, error.result, error.message, 0))
        return error

    def _enqueue(self, op: PendingOp) -> None:
        op.launched_ns, op.caller = time.monotonic_ns(), threading.get_native_id()
        self._launched.append(op)
        try:
            self._token.run_sync_soon(self._take, idempotent=True)
        except OSError as error:  # the run cannot be woken
            self._session.abandon(error)
        except trio.RunFinishedError:
            # The session and its trio run have ended after the tag was claimed.
            with suppress(ValueError):
                self._launched.remove(op)
            self._require_alive_for(op)
            raise

    def _wake(self) -> bool:
        """Call `_take` in the trio thread soon. Return False if its run has ended."""
        try:
            self._token.run_sync_soon(self._take, idempotent=True)
        except OSError as error:  # the run cannot be woken
            self._session.abandon(error)
        except trio.RunFinishedError:
            return False
        return True

    def is_own_thread(self) -> bool:
        """Whether the caller runs in the session's trio run, which must not be blocked."""
        return trio.lowlevel.in_trio_run() and trio.lowlevel.current_trio_token() is self._token

    # The trio thread: the queues.

    @property
    def in_flight(self) -> list[PendingOp]:
        """All ops that are not over."""
        return [*self._launched, *self._fast_path.running, *self.table.values()]

    def finish(self, op: PendingOp, result: ps.OpResult) -> None:
        """End an op for its caller."""
        op.finish(result)
        self.table.pop(op.op, None)

    def _take(self) -> None:
        """Pass the contents of the queues to the machine. Called by trio, whose run would end if this raised."""
        with self._lifetime.contain:
            releases, cancels, launches = len(self._releases), len(self._cancelled), len(self._launched)
            if self._lifetime.failure is None:
                try:
                    self.driver.hear()
                except Exception as error:
                    self._lifetime.break_off(error)
            if cancels or releases:
                self._hand_over_given_up(cancels, releases)
            with self.driver.after_hearing as machine:
                for _ in range(launches):
                    self._take_launch(machine)
                for _ in range(cancels):
                    self._take_cancel(machine, *self._cancelled.popleft())
            for _ in range(releases):
                with self.driver.after_hearing as machine:
                    self._take_release(machine, self._releases.popleft())

    def _hand_over_given_up(self, cancels: int, releases: int) -> None:
        """Take over ops on the fast path that their callers have given up. The queues may grow during this."""
        given_up = [self._cancelled[at][0] for at in range(cancels)]
        given_up += [self._releases[at] for at in range(releases)]
        if self._lifetime.failure is None and any(map(self._fast_path.has, given_up)):
            with self._lifetime.contain, self.driver.taking_over:
                pass

    def _take_launch(self, machine: Peer) -> None:
        if not self._launched:
            return
        op = self.table[self._launched[0].op] = self._launched[0]
        self._launched.popleft()  # only now, because a child may be forked at any moment
        failure = self._lifetime.failure
        if failure is not None:
            self.finish(op, ps.OpResult(op.op, failure.result, failure.message, 0))
            return
        spec = op.spec
        assert spec is not None
        pair = None if spec.pair is None else (spec.pair.peer, spec.pair.is_sender)
        self._fast_path.forget_uses(op.name)
        machine.launch(op.op, op.tag, trio.current_time(), pair)

    def _take_cancel(self, machine: Peer, op: PendingOp, code: Result, reason: str) -> None:
        if self._ends_with_the_session(op):
            return
        if op.op in self.table:
            machine.cancel(op.op, code, reason)
        elif not op.is_over and self.holders.get(op.name) is op:
            # A signal interrupted its launch before it was in the queue or on the fast path.
            self.free_tag(op)
            self._fast_path.drop(op)

    def _take_release(self, machine: Peer, op: PendingOp) -> None:
        if op.is_released or op.is_given_up or self._ends_with_the_session(op):
            return
        if op.op not in self.table:
            # A signal interrupted its launch before it was in the queue or on the fast path.
            self._fast_path.drop(op)
            text = "its caller was interrupted before it began"
            self.finish(op, ps.OpResult(op.op, Result.TIMEOUT, text, 0))
            return
        if machine.expedite(op.op) or self._lifetime.failure is not None:
            return  # the engine returns the arrays
        if op.epoch is None:
            machine.cancel(op.op, Result.TIMEOUT, "its caller gave it up before it began")
            return
        if op.source is not None:
            op.source.abandon()
        op.is_given_up = True
        self.detaching[op.op] = op
        if op.op in self._staged.ops:
            self._staged.detach(op.op)
        else:
            self._engine.detach(op.op)

    def _ends_with_the_session(self, op: PendingOp) -> bool:
        """Whether the session has a fault and the engine may hold the op. Closing the engine then returns the
        arrays."""
        return self._lifetime.is_broken and (op.op in self.table or self._fast_path.has(op))

    def _finish_queued(self, failure: SessionError) -> None:
        while self._launched:
            op = self.table[self._launched[0].op] = self._launched[0]
            self._launched.popleft()
            self.finish(op, ps.OpResult(op.op, failure.result, failure.message, 0))

    def end_all(self, failure: SessionError) -> None:
        """End all ops after the engine was closed. Ops that it was told to commit have succeeded."""
        self._staged.close()
        for op in [*self.table.values(), *self._fast_path.running]:
            failed = ps.OpResult(op.op, failure.result, failure.message, 0)
            succeeded = ps.OpResult(op.op, Result.SUCCESS, "", len(op.ring))
            self.finish(op, succeeded if op.is_committed else failed)
        for op in self.detaching.values():
            op.release()

    # The trio thread: the engine's events.

    def hear(self, machine: Peer) -> None:
        """Pass the engine's events to the machine."""
        engine, fast_path, staged = self._engine, self._fast_path, self._staged
        has_threads = fast_path.has_threads
        if has_threads:
            fast_path.close()  # otherwise events of one thread might be read before earlier ones of another
        heard = engine.events()
        if staged.ops or staged.posted:
            heard = staged.events(heard)
        if not heard:
            return
        if not AS_EXPECTED.issuperset(map(type, heard)) and fast_path.close():
            heard += staged.events(engine.events())
        # Completions first, because the other events depend on them.
        completed = []
        for event in heard:
            if type(event) is events.OpFastCompleted:
                completed.append((event, fast_path.completed(event)))
        for each, op in sorted(completed, key=lambda one: one[0].sequence) if has_threads else completed:
            assert op.epoch is not None
            self._counters.op_ended(op.epoch, is_committed=True)
            machine.op_fast_completed(op.shared_tag, each.sequence)
        if len(completed) == len(heard):
            return
        for event in heard:
            if isinstance(event, events.EngineFailed):  # it has caused the other events
                raise events.EngineFailedError(event.reason)
        for event in heard:
            if isinstance(event, events.OpDone):
                machine.op_done(event.op, event.tx_bytes, event.rx_bytes)
            elif isinstance(event, events.OpCompleted):
                machine.op_completed(event.op)
            elif not isinstance(event, events.OpFastCompleted):
                for report in self._reports[type(event)]:
                    report(machine, event)

    def hear_last(self) -> None:
        """End committed ops whose callers were interrupted before they could end them."""
        for event in self._engine.events() if not self._engine.is_closed else ():
            if type(event) is events.OpFastCompleted:
                self._fast_path.completed(event)

    def _op_handed_over(self, machine: Peer, event: events.OpHandedOver) -> None:
        op = self.table[event.op] = self._fast_path.handed_over(event)
        pair = op.name[1]
        way = None if pair is None else (pair.peer, pair.is_sender)
        machine.op_handed_over(event.op, op.tag, event.sequence, trio.current_time(), way)

    def _op_mismatch(self, machine: Peer, event: events.OpMismatch) -> None:
        what = "different ops with the same tag" if event.is_other_call else "the same op with different arguments"
        op = self.table.get(event.op)
        other = machine.peer_at(event.link)
        calls = [event.mine, event.theirs]
        pair = None if op is None else op.name[1]
        if pair is not None:
            other = pair.peer
            calls[pair.is_sender] = calls[pair.is_sender].replace("send", "recv", 1)  # the engine has one collective
        elif op is not None and event.rank is not None and event.rank != op.rank:
            other = op.ring[event.rank]
        me, who = peers_named([machine.peer], machine.name_of), "another peer"
        if other is not None:
            who = peers_named([other], machine.name_of)
        lead = f"{event.steps.text(me, who)}: " if event.steps is not None else ""
        text = f"{lead}peers called {what}: {me} has {calls[0]}, {who} has {calls[1]}"
        machine.op_mismatch(event.op, text, event.is_other_call)

    # The trio thread: the machine's effects.

    def _submit(self, machine: Peer, effect: ps.SubmitOp) -> None:
        op = self.table[effect.op]
        op.epoch = effect.epoch
        assert op.spec is not None
        op.ring, op.rank = effect.ring, effect.ring.index(machine.peer)
        try:
            if op.source is None:
                self._engine.submit(effect, op.spec)
            else:
                self._staged.submit(effect, op.spec, op.source)
        except ValueError as error:
            reason = f"peer {machine.peer} cannot take part: {error}"
            machine.op_refused(effect.op, Result.INVALID_ARGUMENT, reason)
        except RootLostError as error:
            machine.op_refused(effect.op, Result.RANK_CONNECTION_LOST, str(error))
        except MemoryError as error:
            machine.op_refused(effect.op, Result.INTERNAL_ERROR, f"out of memory: {error}")

    def _freeze_op(self, _: Peer, effect: ps.FreezeOp) -> None:
        if effect.op in self._staged.ops:
            self._staged.freeze_op(effect.op)
        else:
            self._engine.freeze_op(effect.op)

    def _end_op(self, _: Peer, effect: ps.EndOp) -> None:
        self._end(effect.op, Verdict.COMMIT if effect.commit else Verdict.ABORT)

    def _forget_op(self, _: Peer, effect: ps.ForgetOp) -> None:
        self._end(effect.op, Verdict.COMMIT_BY_ALL)

    def _end(self, number: int, verdict: Verdict) -> None:
        if number in self._staged.ops:
            self._staged.end(number, verdict)
        else:
            self._engine.end(number, verdict)
        op = self.table.get(number)
        if op is not None and verdict is not Verdict.ABORT:
            op.is_committed = True

    def _forget_unmade(self, _: Peer, effect: ps.ForgetUnlaunched) -> None:
        with suppress(MemoryError):
            self._engine.forget_ops(effect.epoch, effect.tag, effect.uses)

    def _op_result(self, _: Peer, effect: ps.OpResult) -> None:
        op = self.table[effect.op]
        if op.epoch is not None:
            self._counters.op_ended(op.epoch, effect.code is Result.SUCCESS)
        self.finish(op, effect)
