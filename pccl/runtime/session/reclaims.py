"""Gives callers the arrays back of ops that they give up, whatever becomes of the op: see `data_plane.detached`.

The tag of such an op stays in use until its verdict is known.

An op that goes on with a copy is one that the engine has, or one that is never committed:

1. It is detached in a turn of its own, when all effects of earlier ones have been carried out. So one that has an epoch
   was submitted, and one that is committed because all participants are done has its result, and is not detached.
2. Its caller asks for it after it has left the fast path, and the engine is heard before the request is taken
   (`launches`). So one that was handed over is in the table, and known to all threads of the engine. Besides, only
   handles have ops go on, and these are launched past the fast path.
3. One whose verdict is known is not detached: the engine gives its arrays back anyway.
4. That leaves those that the engine has refused. They are never done here, and so committed nowhere.
"""

from __future__ import annotations

import select

import trio

from pccl.protocol import peer as ps
from pccl.runtime.data_plane.detached import PrivateCopy
from pccl.runtime.data_plane.engine import Engine
from pccl.runtime.data_plane.fast_path import FastPath
from pccl.runtime.data_plane.op_spec import Buffers
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.session.driver import Driver
from pccl.runtime.session.engine_bridge import EngineBridge
from pccl.runtime.session.lifetime import Lifetime
from pccl.runtime.session.op_table import OpTable
from pccl.types import Result

DEVICE_GRACE_S = 5.0
"""Time for which the array of an op that goes on may still be copied from its device after its caller wanted it
back."""
ENGINE_POLL_MS = 1000


class Reclaims:
    """Arrays that their callers want back before their op is over. Only for the trio thread."""

    def __init__(
        self,
        driver: Driver,
        lifetime: Lifetime,
        engine: Engine,
        fast_path: FastPath,
        table: OpTable,
        bridge: EngineBridge,
    ) -> None:
        self._driver = driver
        self._lifetime = lifetime
        self._engine = engine
        self._fast_path = fast_path
        self._table = table
        self._bridge = bridge

    def ends_with_the_session(self, op: PendingOp) -> bool:
        """Return whether the session has a fault, and the engine may have the op until it is closed, which gives the
        arrays back."""
        return self._lifetime.is_broken and (op.op in self._table.ops or self._fast_path.has(op))

    def take(self, machine: ps.Peer, op: PendingOp, goes_on: bool) -> None:
        """Have the arrays of an op given back, if they are not. The op stops, or `goes_on` with a copy."""
        if op.is_released or op.is_detached or self.ends_with_the_session(op):
            return
        if op.op not in self._table.ops:
            # Interrupted before it was in the queue, or on the fast path.
            self._fast_path.drop(op)
            text = "its caller was interrupted before it began"
            self._table.finish(op, ps.OpResult(op.op, Result.TIMEOUT, text, 0))
            return
        if machine.hasten(op.op) or self._lifetime.failure is not None:
            return  # the engine gives the buffers back, if it has not done so
        if op.epoch is None:
            self._reclaim_queued(machine, op, goes_on)
        else:
            self._detach(machine, op, goes_on)

    def release_here(self, op: PendingOp) -> None:
        """Wait for the release in the trio thread, for a caller there that does not await: nobody else hears the engine
        meanwhile."""
        poller = select.poll()
        for event_fd in self._engine.event_fds:
            poller.register(event_fd, select.POLLIN)
        end_s = trio.current_time() + DEVICE_GRACE_S
        while not op.is_released:
            poller.poll(ENGINE_POLL_MS)
            with self._lifetime.contain, self._driver.hearing as machine:
                if op.source is not None and trio.current_time() >= end_s:
                    self._stop_reading(machine, op)
            if self._lifetime.is_broken:
                self._bridge.hear_last()
                self._engine.close()
                op.release()

    def _reclaim_queued(self, machine: ps.Peer, op: PendingOp, goes_on: bool) -> None:
        spec = op.spec
        assert spec is not None
        if goes_on and spec.source is None and isinstance(spec.buffers, Buffers):
            copy = self._copied(machine, op)
            if copy is not None:
                copy.fill()
                op.spec = spec._replace(buffers=copy.buffers)
                op.copy, op.is_detached = copy, True
                op.release()
                return
        reason = "taken back before it began: its caller did not wait any longer"
        machine.cancel(op.op, Result.TIMEOUT, reason)

    def _detach(self, machine: ps.Peer, op: PendingOp, goes_on: bool) -> None:
        copy = None
        if op.source is None:
            copy = self._copied(machine, op) if goes_on else None
        elif not goes_on:
            op.source.abandon()
        op.copy, op.is_detached = copy, True
        self._bridge.detaching[op.op] = op
        self._engine.detach_from(op.op, copy)
        if op.source is not None and goes_on:
            self._lifetime.spawn(self._bound_reading, op)

    async def _bound_reading(self, op: PendingOp) -> None:
        await trio.sleep(DEVICE_GRACE_S)
        with self._driver.hearing as machine:
            self._stop_reading(machine, op)

    @staticmethod
    def _stop_reading(machine: ps.Peer, op: PendingOp) -> None:
        """Give up an op that should go on: its device has not copied what its caller wants back."""
        if op.is_released:
            return
        if op.source is not None:
            op.source.abandon()
        reason = f"peer {machine.peer} gave up; its device has copied nothing for {DEVICE_GRACE_S:g} s"
        machine.cancel(op.op, Result.INTERNAL_ERROR, f"aborted on all peers: {reason}")
        op.release()

    @staticmethod
    def _copied(machine: ps.Peer, op: PendingOp) -> PrivateCopy | None:
        """Return memory for the op to go on with. None: there is none, and the op has been given up on all peers."""
        try:
            return op.copied(machine.peer)
        except MemoryError:
            reason = f"peer {machine.peer} has no memory for a copy of its arrays, which its caller has taken back"
            machine.cancel(op.op, Result.INTERNAL_ERROR, f"aborted on all peers: {reason}")
            return None
