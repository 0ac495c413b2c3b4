"""An engine in Python, behind the interface of the one that ships: arrays of numbers that travel over links.

Every giver's elements go to all participants, straight where there are links between all, otherwise from neighbour to
neighbour, and each computes the result by itself, in the order of ranks. Sums grow in the caller's array as
the real engine's do, so that an abort has something to put back. Commands take effect a moment later and in order, as
in a thread. What arrives before its op is submitted is kept.

Done, frozen, completed, detached and mismatched mean what `native/include/pccl_native.h` says they do.
"""

from __future__ import annotations

import ctypes
import random
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import trio

from pccl.protocol.auth import Keys
from pccl.protocol.peer.effects import SubmitOp
from pccl.runtime.data_plane.engine import EngineFastPath, Verdict
from pccl.runtime.data_plane.events import (
    READERS,
    EngineEvent,
    EngineFailedError,
    GroupFrozen,
    OpCompleted,
    OpDetached,
    OpDone,
    OpEnded,
    OpFrozen,
)
from pccl.runtime.data_plane.op_records import Row
from pccl.runtime.data_plane.op_request import OpRequest
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec
from pccl.runtime.extension import ffi, lib
from pccl.types import Collective, DataType, ReduceAlgorithm, ReduceOp
from tests.simulation.session.engine_links import Links
from tests.simulation.session.heartbeats import Spawn

Key = tuple[int, int, int]
COMMAND_S_MAX = 0.002
REDUCERS = {ReduceOp.SUM: np.add, ReduceOp.MAX: np.maximum, ReduceOp.MIN: np.minimum, ReduceOp.PROD: np.multiply}


class NoFastPath:
    """A fast path that no thread takes: all calls come from trio."""

    def open(self) -> int:
        return 1

    def close(self) -> None:
        pass

    def in_ops_ns(self, of_slices: bool) -> int:
        return 0


@dataclass
class _Op:
    number: int
    key: Key
    shape: bytes
    rank: int
    world_size: int
    links: tuple[int, ...]
    is_direct: bool
    is_mutual: bool
    collective: Collective
    reduce_op: ReduceOp
    dtype: DataType
    givers: frozenset[int]
    recv: int
    """Address of the result, which a detached op may lose: 0."""
    recv_bytes: int
    before: bytes
    """The content of the result's memory before the op."""
    keep: Any
    parts: dict[int, bytes] = field(default_factory=dict)
    done_by: set[int] = field(default_factory=set)
    is_done: bool = False
    is_stopped: bool = False
    is_mismatched: bool = False
    told: set[int] = field(default_factory=set)
    """Links where the other side was told what this op is, for it has another."""
    rx_bytes: int = 0

    def write(self, data: bytes) -> None:
        if self.recv and data:
            ctypes.memmove(self.recv, data, min(len(data), self.recv_bytes))

    def result(self) -> bytes:
        """Return the result of what has come until now."""
        if self.collective in (Collective.BROADCAST, Collective.SEND):
            return b"".join(self.parts.values())
        parts = [self.parts[rank] for rank in sorted(self.parts)]
        if self.collective is Collective.ALL_GATHER:
            return b"".join(parts)
        arrays = [np.frombuffer(part, self.dtype.to_numpy_dtype()) for part in parts]
        total = arrays[0].copy()
        for array in arrays[1:]:
            total = REDUCERS[self.reduce_op](total, array)
        if self.collective is Collective.REDUCE_SCATTER:
            total = np.array_split(total, self.world_size)[self.rank]
        return total.tobytes()


class SimEngine:
    """The engine of a session: see `pccl.runtime.data_plane.engine.Engine`."""

    def __init__(self, group: int, segment_bytes: int, chance: random.Random, spawn: Spawn) -> None:
        self._group = group
        self._segment_bytes = segment_bytes
        self._random = chance
        self._request = self.new_request()
        self._mailbox = Mailbox()
        self._reported: list[EngineEvent] = []
        self._ops: dict[int, _Op] = {}
        self._by_key: dict[Key, _Op] = {}
        self._parked: dict[Key, list[tuple[int, Any]]] = {}
        self._frozen_epoch = -1
        self._commands: deque[Callable[[], None]] = deque()
        self._has_commands = trio.Event()
        self._links = Links(chance, spawn, self._report, self._arrive)
        self._scope = trio.CancelScope()
        self.is_closed = False
        spawn(self._run)

    # What the session asks.

    @property
    def event_fds(self) -> list[int]:
        return [self._mailbox.fileno()]

    def divide(self, threads: int) -> None:
        pass

    def new_fast_paths(self) -> list[EngineFastPath]:
        return [cast(EngineFastPath, NoFastPath())]

    def new_request(self) -> OpRequest:
        return OpRequest(self._group, self._segment_bytes)

    def check(self, launch: SubmitOp, spec: OpSpec) -> None:
        self._request.fill(launch, spec)

    def submit(self, launch: SubmitOp, spec: OpSpec) -> None:
        self._request.fill(launch, spec)
        spec = spec.placed(launch.rank, launch.world_size)
        op = self._op(launch, spec)
        self._command(lambda: self._take_up(op, spec))

    def end(self, op: int, verdict: Verdict) -> None:
        self._command(lambda: self._end_op(op, verdict))

    def freeze(self, epoch: int) -> None:
        self._command(lambda: self._freeze(epoch))

    def freeze_op(self, op: int) -> None:
        self._command(lambda: self._stop_op(op))

    def forget_ops(self, epoch: int, tag: int, uses: range) -> None:
        self._command(lambda: [self._parked.pop((epoch, tag, use), None) for use in uses] and None)

    def detach(self, op: int) -> None:
        self._command(lambda: self._detach_op(op))

    def link_add(self, link: int, index: int, fd: int, keys: Keys | None = None) -> None:
        self._links.add(link, fd)

    def link_close(self, link: int) -> None:
        self._links.close(link)

    def set_link_timeout(self, seconds: float) -> None:
        self._links.timeout_s = seconds

    def count_link(self, link: int) -> None:
        self._links.count(link)

    def records(self, since_ns: int) -> list[Row]:
        return []

    def stats(self) -> dict[str, int]:
        return dict.fromkeys((name for name, _ in ffi.typeof("pccl_engine_stats").fields), 0)

    def events(self) -> list[EngineEvent]:
        if self.is_closed:
            raise EngineFailedError("the engine is closed")
        self._mailbox.empty()
        found, self._reported = self._reported, []
        return found

    def close(self) -> None:
        """Stop; open ops are aborted and their buffers restored."""
        if self.is_closed:
            return
        self.is_closed = True
        self._scope.cancel()
        for op in self._ops.values():
            op.write(op.before)
        self._ops.clear()
        self._links.close_all()
        self._mailbox.close()

    def forget_after_fork(self) -> None:
        raise AssertionError("no fork happens here")

    # The thread.

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._has_commands.set()

    async def _run(self) -> None:
        with self._scope:
            while True:
                while self._commands:
                    if self._random.random() < 0.5:
                        await trio.sleep(self._random.random() * COMMAND_S_MAX)
                    self._commands.popleft()()
                self._has_commands = trio.Event()
                await self._has_commands.wait()

    def wake(self) -> None:
        if not self.is_closed:
            self._mailbox.wake()

    def _report(self, event: EngineEvent) -> None:
        if not self.is_closed:
            self._reported.append(event)
            self._mailbox.wake()

    def _op(self, launch: SubmitOp, spec: OpSpec) -> _Op:
        shape = self._request.native.shape
        buffers = spec.buffers
        assert isinstance(buffers, Buffers)
        is_one_way = spec.collective in (Collective.BROADCAST, Collective.SEND)
        givers = frozenset({shape.root} if is_one_way else range(launch.world_size))
        _, recv_bytes = buffer_bytes(spec, buffers, launch.rank, launch.world_size, launch.rank == shape.root)
        before = ctypes.string_at(buffers.recv, recv_bytes) if buffers.recv and recv_bytes else b""
        return _Op(
            launch.op,
            (launch.epoch, launch.tag, launch.sequence),
            bytes(ffi.buffer(ffi.addressof(shape))),
            launch.rank,
            launch.world_size,
            launch.links,
            launch.is_meshed and shape.algorithm == ReduceAlgorithm.DIRECT,
            launch.is_mutual,
            spec.collective,
            spec.reduce_op,
            spec.dtype,
            givers,
            buffers.recv,
            recv_bytes,
            before,
            buffers.keep,
        )

    def _take_up(self, op: _Op, spec: OpSpec) -> None:
        buffers = spec.buffers
        assert isinstance(buffers, Buffers)
        self._ops[op.number] = self._by_key[op.key] = op
        op.is_stopped = op.key[0] <= self._frozen_epoch
        if op.rank in op.givers:
            send_bytes, _ = buffer_bytes(spec, buffers, op.rank, op.world_size, True)
            part = ctypes.string_at(buffers.send, send_bytes) if buffers.send and send_bytes else b""
            if not op.is_stopped:
                for link in self._next_links(op):
                    self._links.send(link, ("part", *op.key, op.rank, op.shape, part))
            self._take(op, op.rank, part)
        elif not op.is_stopped:
            for link in self._next_links(op):  # what it was called with
                self._links.send(link, ("part", *op.key, -1, op.shape, b""))
        for link, content in self._parked.pop(op.key, ()):
            self._arrive(link, content)

    @staticmethod
    def _next_links(op: _Op) -> list[int]:
        if op.is_direct:
            return [link for rank, link in enumerate(op.links) if rank != op.rank]
        return [op.links[(op.rank + 1) % op.world_size]] if op.world_size > 1 else []

    def _arrive(self, link: int, content: Any) -> None:
        kind, epoch, tag, sequence, rank, shape, part = content
        key = epoch, tag, sequence
        if self.is_closed or epoch <= self._frozen_epoch:
            return
        op = self._by_key.get(key)
        if op is None:
            self._parked.setdefault(key, []).append((link, content))
        elif not op.is_stopped and kind == "done":
            op.done_by.add(rank)
            self._complete(op)
        elif not op.is_stopped and shape != op.shape:
            self._find_mismatch(op, link, shape)
        elif not op.is_stopped and rank >= 0 and rank not in op.parts:
            following = (op.rank + 1) % op.world_size
            if not op.is_direct and following != rank:
                self._links.send(op.links[following], content)
            op.rx_bytes += len(part)
            self._take(op, rank, part)

    def _take(self, op: _Op, rank: int, part: bytes) -> None:
        op.parts[rank] = part
        if op.is_stopped:
            return
        if op.collective is not Collective.SEND or rank != op.rank:
            op.write(op.result())
        if op.parts.keys() >= op.givers and not op.is_done:
            op.is_done = True
            self._report(OpDone(op.number, 0, op.rx_bytes))
            if op.is_mutual:
                op.done_by.add(op.rank)
                for other, link in enumerate(op.links):
                    if other != op.rank:
                        self._links.send(link, ("done", *op.key, op.rank, b"", b""))
                self._complete(op)

    def _complete(self, op: _Op) -> None:
        if op.is_done and len(op.done_by) == op.world_size:
            self._report(OpCompleted(op.number))

    def _find_mismatch(self, op: _Op, link: int, theirs: bytes) -> None:
        if link not in op.told:
            op.told.add(link)
            self._links.send(link, ("part", *op.key, -1, op.shape, b""))
        if op.is_mismatched:
            return
        op.is_mismatched = True
        event = ffi.new("pccl_event *")
        event.kind, event.id, event.link = lib.PCCL_EVENT_OP_MISMATCH, op.number, link
        ffi.memmove(ffi.addressof(event.mine), op.shape, len(op.shape))
        ffi.memmove(ffi.addressof(event.theirs), theirs, len(theirs))
        self._report(READERS[event.kind](event))

    def _end_op(self, number: int, verdict: Verdict) -> None:
        op = self._ops.pop(number, None)
        if op is None:
            return
        del self._by_key[op.key]
        if verdict is Verdict.ABORT:
            op.write(op.before)
        else:
            assert op.is_done, "an op is committed that is not done"
        if verdict is not Verdict.COMMIT_BY_ALL:
            self._report(OpEnded(number, 0, op.rx_bytes))

    def _freeze(self, epoch: int) -> None:
        self._frozen_epoch = max(self._frozen_epoch, epoch)
        for op in self._ops.values():
            op.is_stopped = op.is_stopped or op.key[0] <= epoch
        self._parked = {key: frames for key, frames in self._parked.items() if key[0] > epoch}
        self._report(GroupFrozen(epoch))

    def _stop_op(self, number: int) -> None:
        op = self._ops.get(number)
        if op is not None:
            op.is_stopped = True
            self._report(OpFrozen(number))

    def _detach_op(self, number: int) -> None:
        op = self._ops.get(number)
        if op is not None:
            op.write(op.before)
            op.recv, op.keep = 0, None
            op.is_stopped = True
        self._report(OpDetached(number))


def buffer_bytes(spec: OpSpec, buffers: Buffers, rank: int, world_size: int, is_root: bool) -> tuple[int, int]:
    """Return the bytes that an op sends and receives here. `is_root`: this peer is the root, or sends."""
    item_bytes = spec.dtype.itemsize
    count = buffers.count
    if spec.collective is Collective.ALL_GATHER:
        return count // world_size * item_bytes, count * item_bytes
    if spec.collective is Collective.REDUCE_SCATTER:
        return count * item_bytes, (count // world_size + (rank < count % world_size)) * item_bytes
    if spec.collective in (Collective.BROADCAST, Collective.SEND):
        return (count * item_bytes, 0) if is_root else (0, count * item_bytes)
    assert spec.collective in (Collective.ALL_REDUCE, Collective.BARRIER), f"{spec.collective} is not played"
    return count * item_bytes, count * item_bytes


class Mailbox:
    """`wake` is for any thread, all else for the owner."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Return a descriptor that is readable after `wake`, until `empty`."""
        return self._reader.fileno()

    def wake(self) -> None:
        with suppress(OSError):  # so full that it is readable anyway
            self._writer.send(b"\0")

    def empty(self) -> None:
        with suppress(OSError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        self._reader.close()
        self._writer.close()
