"""Between the machine of a session and its engine: ops and verdicts down, events up.

A link to a peer that breaks is noticed here: the engine reports it, and the machine tells the master, who judges.

Ops with one tag must reach the machine in the order in which the tag was used, although some come through the fast path
and some through the queue of launches, in different threads. They do, because

1. the caller that has the tag of an op frees it only once the op is over, and an op that the fast path has completed or
   handed over is among the engine's events before its caller knows;
2. so whatever came through the fast path before a launch of the same tag was queued is among the events by then;
3. `launches` first notes how many launches there are, then has the engine heard, and takes no more than those: each
   finds its predecessor counted. The fast path may stay open meanwhile, also for the tags of later launches;
4. cancels are noted before the launches. So an op whose cancel is taken is in the machine, or among the events heard,
   or was submitted by nobody and never will be.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import trio

from pccl.protocol import peer as ps
from pccl.runtime.data_plane import events
from pccl.runtime.data_plane.engine import Engine, Verdict
from pccl.runtime.data_plane.fast_path import FastPath
from pccl.runtime.data_plane.op_spec import RootLostError
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.session.driver import Handlers
from pccl.runtime.session.flight_recorder import FlightRecorder
from pccl.runtime.session.op_table import OpTable
from pccl.runtime.session.reports import WorkCounters
from pccl.types import Result

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
"""Kinds of events of ops that call for no decision of the machine."""
AS_EXPECTED = OPS_AS_EXPECTED | {events.LinkCounters}
"""Kinds of events that call for none. The fast path may stay open while they are heard."""


class EngineBridge:
    """Carries out what the machine decides about ops, and tells it what the engine reports."""

    def __init__(
        self, engine: Engine, fast_path: FastPath, table: OpTable, counters: WorkCounters, recorder: FlightRecorder
    ) -> None:
        self.detaching: dict[int, PendingOp] = {}
        """Ops whose arrays the engine was told to let go of, and has not let go yet."""
        self._engine = engine
        self._fast_path = fast_path
        self._table = table
        self._counters = counters
        reports: dict[type, Callable[[ps.Peer, Any], None]] = {
            events.OpHandedOver: self._op_handed_over,
            events.OpDone: lambda machine, event: machine.op_done(event.op, event.tx_bytes, event.rx_bytes),
            events.OpCompleted: lambda machine, event: machine.op_completed(event.op),
            events.OpEnded: lambda machine, event: machine.op_ended(event.op, event.tx_bytes, event.rx_bytes),
            events.OpDetached: self._op_detached,
            events.OpFrozen: lambda machine, event: machine.op_frozen(event.op),
            events.OpMismatch: self._op_mismatch,
            events.OpRefused: lambda machine, event: machine.op_refused(event.op, Result.INTERNAL_ERROR, event.reason),
            events.GroupFrozen: lambda machine, event: machine.frozen(event.epoch),
            events.LinkDown: lambda machine, event: machine.link_lost(event.link, event.reason),
            events.LinkDegraded: lambda machine, event: machine.connection_lost(event.link, event.reason, event.thread),
            events.LinkCounters: lambda _, event: counters.link_counted(event),
            events.LinkLimited: lambda machine, event: machine.link_limited(event.link, event.thread, event.by_loss),
        }
        self._reports = recorder.noting(reports)
        self.handlers: Handlers = {
            ps.SubmitOp: self._submit,
            ps.FreezeOps: lambda _, effect: engine.freeze(effect.epoch),
            ps.FreezeOp: lambda _, effect: engine.freeze_op(effect.op),
            ps.EndOp: self._end_op,
            ps.ForgetOp: lambda _, effect: self._end(effect.op, Verdict.COMMIT_BY_ALL),
            ps.ForgetUnlaunched: self._forget_unmade,
            ps.OpResult: self._op_result,
        }

    # Events.

    def hear(self, machine: ps.Peer) -> None:
        """Tell the machine all that the engine has reported by now."""
        engine, fast_path = self._engine, self._fast_path
        has_threads = fast_path.has_threads
        if has_threads:
            fast_path.close()  # else what is heard of one thread might come after what is not heard yet of another
        heard = engine.events()
        if not AS_EXPECTED.issuperset(map(type, heard)) and fast_path.close():
            heard += engine.events()
        # First: whatever else there is to tell depends on what has been committed.
        completed = [(event, fast_path.completed(event)) for event in heard if type(event) is events.OpFastCompleted]
        for each, op in sorted(completed, key=lambda one: one[0].sequence) if has_threads else completed:
            assert op.epoch is not None
            self._counters.op_ended(op.epoch, is_committed=True)
            machine.op_fast_completed(op.shared_tag, each.sequence)
        if len(completed) == len(heard):
            return
        failed = next((event for event in heard if type(event) is events.EngineFailed), None)
        if failed is not None:  # what else there is follows from it
            raise events.EngineFailedError(failed.reason)
        for event in heard:
            if type(event) is not events.OpFastCompleted:
                self._reports[type(event)](machine, event)

    def hear_last(self) -> None:
        """End committed ops whose callers were interrupted before they took note of it."""
        for event in self._engine.events() if not self._engine.is_closed else ():
            if type(event) is events.OpFastCompleted:
                self._fast_path.completed(event)

    def _op_handed_over(self, machine: ps.Peer, event: events.OpHandedOver) -> None:
        op = self._table.ops[event.op] = self._fast_path.handed_over(event)
        pair = op.name[1]
        way = None if pair is None else (pair.peer, pair.is_sender)
        machine.op_handed_over(event.op, op.tag, event.sequence, trio.current_time(), way)

    def _op_detached(self, _: ps.Peer, event: events.OpDetached) -> None:
        self.detaching.pop(event.op).release()

    def _op_mismatch(self, machine: ps.Peer, event: events.OpMismatch) -> None:
        what = "different ops with the same tag" if event.is_other_call else "the same op with different arguments"
        op = self._table.ops.get(event.op)
        other = machine.peer_at(event.link)
        if op is not None and event.rank is not None and event.rank != op.rank:
            other = op.ring[event.rank]
        who = "another one" if other is None else f"peer {other}"
        lead = f"{event.steps.text(f'peer {machine.peer}', who)}: " if event.steps is not None else ""
        mine, theirs = f"peer {machine.peer} has {event.mine}", f"{who} has {event.theirs}"
        text = f"{lead}peers called {what}: {mine}, {theirs}"
        machine.op_mismatch(event.op, text, event.is_other_call)

    # Effects.

    def _submit(self, machine: ps.Peer, effect: ps.SubmitOp) -> None:
        op = self._table.ops[effect.op]
        op.epoch = effect.epoch
        assert op.spec is not None
        op.ring, op.rank = effect.ring, effect.ring.index(machine.peer)
        try:
            self._engine.submit(effect, op.spec.placed(effect.rank, effect.world_size))
        except ValueError as error:
            reason = f"peer {machine.peer} cannot take part: {error}"
            machine.op_refused(effect.op, Result.INVALID_ARGUMENT, reason)
        except RootLostError as error:
            machine.op_refused(effect.op, Result.RANK_CONNECTION_LOST, str(error))
        except MemoryError as error:
            machine.op_refused(effect.op, Result.INTERNAL_ERROR, f"out of memory: {error}")

    def _end_op(self, _: ps.Peer, effect: ps.EndOp) -> None:
        self._end(effect.op, Verdict.COMMIT if effect.commit else Verdict.ABORT)

    def _end(self, number: int, verdict: Verdict) -> None:
        self._engine.end(number, verdict)
        op = self._table.ops.get(number)
        if op is not None and verdict is not Verdict.ABORT:
            op.is_committed = True

    def _forget_unmade(self, _: ps.Peer, effect: ps.ForgetUnlaunched) -> None:
        with suppress(MemoryError):
            self._engine.forget_ops(effect.epoch, effect.tag, effect.uses)

    def _op_result(self, _: ps.Peer, effect: ps.OpResult) -> None:
        op = self._table.ops[effect.op]
        if op.epoch is not None:
            self._counters.op_ended(op.epoch, effect.code is Result.SUCCESS)
        self._table.finish(op, effect)
