"""Launching ops, cancelling them, and returning their arrays, from any thread.

Launches, cancels and releases each go into a queue and wake the trio thread once; `_take` passes them to the machine.
Small ops of callers that wait take the fast path instead, while it is open.

1. The queues take no lock: a signal handler that closes the communicator may run in the middle of a launch, and waits
   there for the trio thread.
2. They are taken in the order that `engine_bridge` explains, so that the machine counts the uses of tags as their
   callers did.
3. At any moment an op is in the queue, in the table, or over, so that ending the session finds every op.

A release returns the arrays of an op that its caller gave up, before its verdict is known. The tag stays in use until
then. An op whose verdict is known is left alone: the engine is about to return its arrays.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import trio

from pccl.protocol import peer as ps
from pccl.runtime.data_plane.engine import Engine
from pccl.runtime.data_plane.fast_path import FastPath
from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.session.driver import Driver
from pccl.runtime.session.engine_bridge import EngineBridge
from pccl.runtime.session.lifetime import Lifetime
from pccl.runtime.session.op_table import OpTable
from pccl.runtime.session.options import SessionError
from pccl.runtime.threads.latch import Latch
from pccl.types import Result

LEAVE_S = 5.0


class Launches:
    """The ops of a session as its callers' threads see them."""

    def __init__(
        self,
        driver: Driver,
        lifetime: Lifetime,
        fast_path: FastPath,
        engine: Engine,
        table: OpTable,
        bridge: EngineBridge,
        abandon: Callable[[BaseException], None],
        leave: Callable[[str], object],
        whom: Callable[[PendingOp], str],
    ) -> None:
        """`abandon` ends the session when its trio run cannot be woken; `leave` leaves the run with a reason; `whom`
        names the peers that an op waits for."""
        self._driver = driver
        self._lifetime = lifetime
        self._fast_path = fast_path
        self._engine = engine
        self._table = table
        self._holders = table.holders
        self.free_tag = table.release_tag
        self._bridge = bridge
        self._abandon = abandon
        self._leave = leave
        self.whom = whom
        self._token = trio.lowlevel.current_trio_token()
        self._numbers = itertools.count(1)
        self._launched: deque[PendingOp] = deque()
        self._cancelled: deque[tuple[PendingOp, Result, str]] = deque()
        self._releases: deque[PendingOp] = deque()
        lifetime.at_end(self._finish_queued)

    # Any thread.

    def new(self, spec: OpSpec) -> PendingOp:
        """Return an op to `launch`. Its caller can cancel it from now on, should a signal come in the middle of
        `launch`."""
        return PendingOp(next(self._numbers), spec if spec.new_source is None else spec.launched(), self)

    def launch(self, op: PendingOp) -> None:
        """Launch an op from any thread. SessionError at once for a tag in flight or a session that is over."""
        self._claim_tag(op)
        self._enqueue(op)

    def launch_waiting(self, op: PendingOp) -> None:
        """Launch an op from a thread that only waits for it. It may be over already on return."""
        self._claim_tag(op)
        if not self._fast_path.run(op, waits=True):
            self._enqueue(op)

    def start(self, op: PendingOp) -> None:
        """Launch an op from a thread that goes on and usually waits for it soon (`PendingOp.join_started`)."""
        self._claim_tag(op)
        if not self._fast_path.run(op, waits=False):
            self._enqueue(op)

    def cancel(self, op: PendingOp, code: Result, reason: str) -> None:
        """Ask for an op to be aborted on all peers, from any thread. It ends as the master says. Its `launch` may have
        been interrupted anywhere."""
        self._cancelled.append((op, code, reason))
        self._wake()

    def ask_for_release(self, op: PendingOp) -> None:
        """Stop an op and return its caller's arrays, from any thread. `PendingOp.reclaim` calls it."""
        self._releases.append(op)
        if not self._wake():
            # The engine was closed before the run ended, and has put everything back.
            reason = self._lifetime.failure or SessionError(Result.NOT_INITIALIZED, "the trio run has ended")
            op.finish(ps.OpResult(op.op, reason.result, reason.message, 0))
            op.release()

    def wait_for_release(self, op: PendingOp) -> None:
        if not self.is_own_thread():  # which would wait for itself
            op.wait_released()

    def leave_for(self, reason: str) -> None:
        """Leave the run, from any thread, which then finds the session over."""
        if self.is_own_thread():
            self._leave(reason)
            return
        has_left = Latch()

        def leave() -> None:
            self._leave(reason)
            has_left.set()

        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(leave)
            has_left.wait(LEAVE_S)

    def _claim_tag(self, op: PendingOp) -> None:
        if self._lifetime.failure is not None:
            self._require_alive_for(op)
        holder = self._holders.setdefault(op.name, op)
        if holder is op:
            return
        text = f"an op with tag {op.tag} is in flight already; wait for it or use another tag"
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
            self._abandon(error)
        except trio.RunFinishedError:
            # The session has ended with its trio run, since we looked.
            with suppress(ValueError):
                self._launched.remove(op)
            self._require_alive_for(op)
            raise

    def _wake(self) -> bool:
        """Have the trio thread take what has gathered. Return False if its run has ended."""
        try:
            self._token.run_sync_soon(self._take, idempotent=True)
        except OSError as error:  # the run cannot be woken
            self._abandon(error)
        except trio.RunFinishedError:
            return False
        return True

    def is_own_thread(self) -> bool:
        """Whether the caller runs in the session's trio run, which must not be blocked."""
        return trio.lowlevel.in_trio_run() and trio.lowlevel.current_trio_token() is self._token

    # The trio thread.

    @property
    def queued(self) -> list[PendingOp]:
        return list(self._launched)

    def _take(self) -> None:
        """Pass on what has gathered. Called by trio, where an exception would end everything in this thread."""
        with self._lifetime.contain:
            releases, cancels, launches = len(self._releases), len(self._cancelled), len(self._launched)
            if self._lifetime.failure is None:
                with self._lifetime.contain:
                    self._driver.hear()
            self._hand_over_given_up(cancels, releases)
            with self._driver.after_hearing as machine:
                for _ in range(launches):
                    self._take_launch(machine)
                for _ in range(cancels):
                    self._take_cancel(machine, *self._cancelled.popleft())
            for _ in range(releases):
                with self._driver.after_hearing as machine:
                    self._take_release(machine, self._releases.popleft())

    def _hand_over_given_up(self, cancels: int, releases: int) -> None:
        """Take ops over from the fast path whose callers have given them up. The queues may grow during this."""
        given_up = [self._cancelled[at][0] for at in range(cancels)]
        given_up += [self._releases[at] for at in range(releases)]
        if self._lifetime.failure is None and any(map(self._fast_path.has, given_up)):
            with self._lifetime.contain, self._driver.taking_over:
                pass

    def _take_launch(self, machine: ps.Peer) -> None:
        op = self._next()
        if op is None:
            return
        failure = self._lifetime.failure
        if failure is not None:
            self._table.finish(op, ps.OpResult(op.op, failure.result, failure.message, 0))
            return
        spec = op.spec
        assert spec is not None
        pair = None if spec.pair is None else (spec.pair.peer, spec.pair.is_sender)
        self._fast_path.forget_uses(op.name)
        machine.launch(op.op, op.tag, trio.current_time(), pair)

    def _take_cancel(self, machine: ps.Peer, op: PendingOp, code: Result, reason: str) -> None:
        if self._ends_with_the_session(op):
            return
        if op.op in self._table.ops:
            machine.cancel(op.op, code, reason)
        elif not op.is_over and self._table.holds_tag(op):
            # Interrupted before it was in the queue, or on the fast path.
            self._table.release_tag(op)
            self._fast_path.drop(op)

    def _take_release(self, machine: ps.Peer, op: PendingOp) -> None:
        if op.is_released or op.is_given_up or self._ends_with_the_session(op):
            return
        if op.op not in self._table.ops:
            # Interrupted before it was in the queue, or on the fast path.
            self._fast_path.drop(op)
            text = "its caller was interrupted before it began"
            op.finish(ps.OpResult(op.op, Result.TIMEOUT, text, 0))
            return
        if machine.hasten(op.op) or self._lifetime.failure is not None:
            return  # the engine returns the arrays
        if op.epoch is None:
            machine.cancel(op.op, Result.TIMEOUT, "its caller gave it up before it began")
            return
        if op.source is not None:
            op.source.abandon()
        op.is_given_up = True
        self._bridge.detaching[op.op] = op
        self._engine.detach_from(op.op)

    def _ends_with_the_session(self, op: PendingOp) -> bool:
        """Whether the session has a fault and the engine may hold the op until it is closed, which returns the
        arrays."""
        return self._lifetime.is_broken and (op.op in self._table.ops or self._fast_path.has(op))

    def _next(self) -> PendingOp | None:
        """Take the next op from the queue to the table. At any moment an op is in one of them, or over: a child may be
        forked."""
        if not self._launched:
            return None
        op = self._table.ops[self._launched[0].op] = self._launched[0]
        self._launched.popleft()
        return op

    def _finish_queued(self, failure: SessionError) -> None:
        while (op := self._next()) is not None:
            self._table.finish(op, ps.OpResult(op.op, failure.result, failure.message, 0))
