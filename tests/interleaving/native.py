"""The engines of a schedule's peers, behind the functions of the C library that `pccl.runtime.data_plane.engine` calls.

An engine is one more managed thread. It has a queue of commands and one of frames from other engines, and takes one
thing of either at a time, in an order that the seed decides; between any two everybody else may go on. What it says
and when is that of native/include/pccl_native.h and fast_path.h:

    submit      the input is copied out and sent to all that take part; a peer that has all inputs writes the result,
                with something wrong in between, as partial sums are, and is done
    done        is told to all that take part; a peer that has it from all is at the completion
    fast path   a mutex's critical section is one turn here; a caller waits for its completion, or is handed over
    end, freeze, freeze_op, detach      carried out in order, as commands

Every function gives the turn away when it begins and when it ends, as cffi gives the interpreter's lock away.
"""

from __future__ import annotations

import errno
import os
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pccl.runtime.extension import ffi, lib
from pccl.types import Collective, DataType
from tests.interleaving.scheduler import Scheduler, Torn

Key = tuple[int, int, int, int]

QUIET_MAX = 64
WRONG = 0x5A
"""The byte that partial results consist of."""


@dataclass(eq=False)
class Call:
    """A caller on the fast path."""

    op: Op | None = None
    is_done: bool = False
    is_completed: bool = False
    is_started: bool = False
    waiting: int = 0
    end_s: float = 0.0
    traffic: tuple[int, int] = (0, 0)


@dataclass(eq=False)
class Op:
    """An op that an engine has."""

    number: int
    key: Key
    rank: int
    world: int
    collective: int
    dtype: DataType
    count: int
    shape: bytes
    """The description as it travels."""
    is_mutual: bool
    send: int
    recv: int
    send_bytes: int
    recv_bytes: int
    original: bytes = b""
    """The bytes of `send` at its submission."""
    was_in_place: bool = False
    call: Call | None = None
    is_fast: bool = False
    has_started: bool = False
    is_spoilt: bool = False
    """Whether wrong values are in `recv`."""
    is_done: bool = False
    is_stopped: bool = False
    is_released: bool = False
    is_mismatched: bool = False
    result: bytes = b""
    inputs: dict[int, bytes] = field(default_factory=dict)
    dones: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Frame:
    """A message of one engine to another."""

    key: Key
    sender: int
    """The rank that has sent it."""
    payload: bytes | None
    """An input; None: the sender is done."""
    shape: bytes = b""


class FastPath:
    """The fast path of one engine: see native/src/fast_path.c, which this follows line by line."""

    def __init__(self, engine: Engine) -> None:
        self.engine: Engine | None = engine
        self.number = 0
        self.last_number = 0
        self.calls: list[Call] = []
        self._events = engine

    def close(self) -> bool:
        was_open = self.number != 0
        self.number = 0
        while self.calls:
            self.hand_over(self.calls[0])
        return was_open

    def open(self) -> int:
        self.close()
        if self.engine is not None:
            self.last_number += 1
            self.number = self.last_number
        return self.number

    def shut(self) -> None:
        self.close()
        self.engine = None

    def hand_over(self, call: Call) -> None:
        assert call.op is not None
        self._events.post_op(lib.PCCL_EVENT_OP_HANDED_OVER, call.op)
        if call.is_done:
            self._events.post_op(lib.PCCL_EVENT_OP_DONE, call.op)
        self._end(call)

    def complete(self, op: Op) -> bool:
        call = op.call
        if call is None:
            return False
        assert call.is_done
        is_quiet = not call.is_started or call.waiting > 0
        self._events.post_op(lib.PCCL_EVENT_OP_FAST_COMPLETED, op, is_quiet=is_quiet)
        call.is_completed = True
        self._end(call)
        return True

    def _end(self, call: Call) -> None:
        assert call.op is not None
        call.op.call = None
        call.op = None
        self.calls.remove(call)


class Wire:
    """What connects the engines of a schedule: every engine that has an op of some key hears of the others'."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.opened = 0
        """Engines that were ever made."""

    def send(self, sender: Engine, frame: Frame) -> None:
        for engine in self.engines:
            if engine is not sender:
                engine.inbox.append(frame)


class Engine:
    """One engine, and its thread."""

    def __init__(self, native: Native) -> None:
        wire = native.wire
        self.wire = wire
        self.fast_path = FastPath(self)
        self.commands: deque[Callable[[], None]] = deque()
        self.inbox: deque[Frame] = deque()
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.ops: dict[int, Op] = {}
        self.is_over = False
        self.is_destroyed = False
        self._by_key: dict[Key, Op] = {}
        self._early: dict[Key, list[Frame]] = {}
        self._frozen_epoch = -1
        self._epoch = -1
        self._events: deque[dict[str, Any]] = deque()
        self._is_signalled = False
        self._is_stopping = False
        self._scheduler = native.scheduler
        self._rng = random.Random(native.scheduler.rng.random())
        wire.opened += 1
        self.name = f"engine {wire.opened}"
        wire.engines.append(self)
        native.scheduler.spawn(self.name, self._run)

    # Events.

    def post(self, event: dict[str, Any], is_quiet: bool = False) -> None:
        self._events.append(event)
        if (not is_quiet or len(self._events) >= QUIET_MAX) and not self._is_signalled:
            self._is_signalled = True
            os.eventfd_write(self.event_fd, 1)

    def post_op(self, kind: int, op: Op, is_quiet: bool = False, **fields: Any) -> None:
        traffic = {"tx_bytes": op.send_bytes, "rx_bytes": op.recv_bytes}
        event = {"kind": kind, "group": op.key[0], "id": op.number, "sequence": op.key[3], **traffic, **fields}
        self.post(event, is_quiet)

    def poll(self, events: Any, most: int) -> int:
        count = 0
        while count < most and self._events:
            event = self._events.popleft()
            native = events[count]
            ffi.memmove(ffi.addressof(native), b"\0" * ffi.sizeof("pccl_event"), ffi.sizeof("pccl_event"))
            for name, value in event.items():
                if name in ("mine", "theirs"):
                    ffi.memmove(ffi.addressof(native, name), value, len(value))
                else:
                    setattr(native, name, value)
            count += 1
        if self._is_signalled and not self._events:
            self._is_signalled = False
            os.eventfd_read(self.event_fd)
        return count

    # Its thread.

    def _run(self) -> None:
        scheduler = self._scheduler
        while True:
            scheduler.wait(lambda: bool(self.commands or self.inbox or self._work()), "the engine")
            choices: list[Callable[[], None]] = []
            if self.commands:
                choices.append(self._command)
            if self.inbox:
                choices.append(self._receive)
            choices += self._work()
            self._rng.choice(choices)()
            if self._is_stopping:
                break
        self.is_over = True

    def _command(self) -> None:
        self.commands.popleft()()

    def _work(self) -> list[Callable[[], None]]:
        """Return what may happen to ops."""
        found: list[Callable[[], None]] = []
        for op in self.ops.values():
            if op.has_started and not op.is_stopped and not op.is_done and not op.is_released:
                if not op.is_spoilt:
                    found.append(lambda op=op: self._spoil(op))  # type: ignore[misc]
                elif len(op.inputs) == op.world and not op.is_mismatched:
                    found.append(lambda op=op: self._be_done(op))  # type: ignore[misc]
            elif op.is_done and len(op.dones) == op.world and op.is_mutual and not op.is_released:
                found.append(lambda op=op: self._complete(op))  # type: ignore[misc]
        return found

    def _receive(self) -> None:
        frame = self.inbox.popleft()
        op = self._by_key.get(frame.key)
        if op is None:
            if frame.key[1] >= self._epoch and frame.key[1] > self._frozen_epoch:
                self._early.setdefault(frame.key, []).append(frame)
            return
        self._take(op, frame)

    def _take(self, op: Op, frame: Frame) -> None:
        if frame.payload is None:
            op.dones.add(frame.sender)
        elif frame.shape != op.shape:
            if not op.is_stopped and not op.is_mismatched:
                op.is_mismatched = True
                if op.call is not None:
                    self.fast_path.hand_over(op.call)
                self.post_op(lib.PCCL_EVENT_OP_MISMATCH, op, mine=op.shape, theirs=frame.shape)
        else:
            op.inputs[frame.sender] = frame.payload

    # Ops.

    def submit(self, request: Any, sequence: int, call: Call | None) -> int:
        """Queue an op, as pccl_engine_submit."""
        shape = request.shape
        dtype = DataType(shape.dtype)
        key = (request.key.group, request.key.epoch, request.key.tag, sequence)
        send_bytes, recv_bytes = _buffer_bytes(shape, request.rank, dtype.itemsize)
        op = Op(
            request.op,
            key,
            request.rank,
            shape.world_size,
            shape.collective,
            dtype,
            shape.count,
            bytes(ffi.buffer(ffi.addressof(shape))),
            bool(request.awaits_completion),
            int(ffi.cast("uintptr_t", request.send)),
            int(ffi.cast("uintptr_t", request.recv)),
            send_bytes,
            recv_bytes,
            call=call,
            is_fast=call is not None,
        )
        if call is not None:
            call.op = op
        self.commands.append(lambda: self._start(op))
        return 0

    def _start(self, op: Op) -> None:
        assert op.number not in self.ops, f"op {op.number} was submitted twice"
        assert op.key not in self._by_key, f"two ops are named {op.key}"
        self.ops[op.number] = self._by_key[op.key] = op
        if op.key[1] > self._epoch:
            self._epoch = op.key[1]
            self._early = {key: frames for key, frames in self._early.items() if key[1] >= self._epoch}
        op.was_in_place = op.send == op.recv
        op.original = _read(op.send, max(op.send_bytes, op.recv_bytes if op.was_in_place else 0))
        if op.key[1] <= self._frozen_epoch:
            op.is_stopped = True
            return
        op.has_started = True
        op.inputs[op.rank] = op.original[: op.send_bytes]
        self.wire.send(self, Frame(op.key, op.rank, op.inputs[op.rank], op.shape))
        for frame in self._early.pop(op.key, ()):
            self._take(op, frame)

    def _spoil(self, op: Op) -> None:
        op.is_spoilt = True
        _write(op.recv, bytes([WRONG]) * op.recv_bytes)

    def _be_done(self, op: Op) -> None:
        op.is_done = True
        op.result = _result(op)
        _write(op.recv, op.result)
        call = op.call
        if call is not None:
            call.is_done = True
        else:
            self.post_op(lib.PCCL_EVENT_OP_DONE, op, is_quiet=op.is_mutual)
        op.dones.add(op.rank)
        if op.is_mutual:
            self.wire.send(self, Frame(op.key, op.rank, None))

    def _complete(self, op: Op) -> None:
        op.is_released = True
        if op.is_fast and self.fast_path.complete(op):
            self._end(op, lib.PCCL_COMMIT_BY_ALL)
        else:
            self.post_op(lib.PCCL_EVENT_OP_COMPLETED, op)

    def end(self, number: int, verdict: int) -> None:
        op = self.ops.get(number)
        if op is not None:
            self._end(op, verdict)

    def _end(self, op: Op, verdict: int) -> None:
        assert op.call is None
        if verdict == lib.PCCL_ABORT or not op.is_done:
            self._restore(op)
        del self.ops[op.number], self._by_key[op.key]
        if verdict != lib.PCCL_COMMIT_BY_ALL:
            self.post_op(lib.PCCL_EVENT_OP_ENDED, op)

    @staticmethod
    def _restore(op: Op) -> None:
        if op.was_in_place and op.original:
            _write(op.recv, op.original)

    def freeze(self, group: int, epoch: int) -> None:
        self._frozen_epoch = max(self._frozen_epoch, epoch)
        for op in self.ops.values():
            if op.key[1] <= epoch:
                op.is_stopped = True
        self._early = {key: frames for key, frames in self._early.items() if key[1] > epoch}
        self.post({"kind": lib.PCCL_EVENT_GROUP_FROZEN, "group": group, "id": epoch})

    def freeze_op(self, number: int) -> None:
        op = self.ops.get(number)
        if op is not None:
            op.is_stopped = True
            self.post_op(lib.PCCL_EVENT_OP_FROZEN, op)

    def forget(self, last: Key, count: int) -> None:
        for sequence in range(last[3], max(-1, last[3] - count), -1):
            self._early.pop((*last[:3], sequence), None)

    def detach(self, number: int) -> None:
        op = self.ops.get(number)
        if op is not None:
            self._restore(op)
            op.is_stopped = True
            op.send = op.recv = 0
            op.original = b""
        unknown = errno.ENOENT if op is None else 0
        self.post({"kind": lib.PCCL_EVENT_OP_DETACHED, "id": number, "system_error": unknown})

    def stop(self) -> None:
        self._is_stopping = True
        for op in list(self.ops.values()):
            self._restore(op)
        self.ops.clear()


def _buffer_bytes(shape: Any, rank: int, item_bytes: int) -> tuple[int, int]:
    count, collective = shape.count * item_bytes, shape.collective
    if collective == Collective.ALL_GATHER:
        return count // shape.world_size, count
    if collective in (Collective.BROADCAST, Collective.SEND):
        return (count, 0) if shape.root == rank else (0, count)
    assert collective in (Collective.ALL_REDUCE, Collective.BARRIER), f"{collective} is not played"
    return count, count


def _result(op: Op) -> bytes:
    if op.collective == Collective.ALL_REDUCE:
        assert op.dtype is DataType.FLOAT
        return np.sum([np.frombuffer(data, np.float32) for data in op.inputs.values()], axis=0).tobytes()
    return b"".join(data for _, data in sorted(op.inputs.items()))[: op.recv_bytes]


def _read(address: int, size: int) -> bytes:
    return bytes(ffi.buffer(ffi.cast("char *", address), size)) if size and address else b""


def _write(address: int, data: bytes) -> None:
    if data and address:
        ffi.memmove(ffi.cast("char *", address), data, len(data))


class Engines:
    """Several engines as one: see native/src/engines.c. No op that is played is large enough for slices."""

    def __init__(self, native: Native, count: int) -> None:
        self.of = [Engine(native) for _ in range(count)]
        self.owners: dict[int, Engine] = {}
        """The engine of each op that was submitted."""
        self._frozen = [0] * count

    def submit(self, request: Any) -> int:
        at = lib.pccl_first_engine(request.key.tag, request.key.sequence, len(self.of))
        self.owners[request.op] = self.of[at]
        return self.of[at].submit(request, request.key.sequence, None)

    def owner(self, op: int) -> Engine:
        """Return the engine that has an op, the first if there is no such op."""
        running = (engine for engine in self.of if op in engine.ops)
        return self.owners.get(op) or next(running, self.of[0])

    def poll(self, events: Any, most: int) -> int:
        joined = 0
        for at, engine in enumerate(self.of):
            while joined < most and engine.poll(events + joined, 1):
                if events[joined].kind == lib.PCCL_EVENT_GROUP_FROZEN:
                    self._frozen[at] += 1
                    if min(self._frozen) < self._frozen[at]:
                        continue
                joined += 1
        return joined


class Native:
    """The C library, whose engines are played. All else is the real one."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.wire = Wire()
        self._kept: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)

    def _engines(self, handle: Any) -> Engines:
        self.scheduler.step("a call of the engine")
        engines: Engines = ffi.from_handle(handle)
        for engine in engines.of:
            if engine.is_destroyed:
                self.scheduler.fail(f"{engine.name} is called after it was destroyed, or while it is")
                raise Torn
        return engines

    def _command(self, engines: Iterable[Engine], command: Callable[[Engine], None]) -> int:
        for engine in engines:
            engine.commands.append(lambda engine=engine: command(engine))  # type: ignore[misc]
        self.scheduler.step("a call of the engine returns")
        return 0

    def _handle(self, thing: object) -> Any:
        handle = ffi.new_handle(thing)
        self._kept.append(handle)
        return handle

    def pccl_engines_create(self, options: Any, count: int, error: Any, error_bytes: int) -> Any:
        return self._handle(Engines(self, count))

    def pccl_engines_event_fd(self, handle: Any, at: int) -> int:
        engines: Engines = ffi.from_handle(handle)
        return engines.of[at].event_fd

    def pccl_engines_destroy(self, handle: Any) -> None:
        for engine in self._engines(handle).of:
            engine.is_destroyed = True
            engine.fast_path.shut()
            engine.commands.append(engine.stop)
            if self.scheduler.me is not None:
                self.scheduler.wait(lambda engine=engine: engine.is_over, "the engine's end")
            self.wire.engines.remove(engine)
            os.close(engine.event_fd)

    def pccl_engines_forget_after_fork(self, handle: Any) -> None:
        engines: Engines = ffi.from_handle(handle)
        for engine in engines.of:
            os.close(engine.event_fd)

    def pccl_engines_submit(self, handle: Any, request: Any, slices: int) -> int:
        assert slices == 1, "no op that is played is large enough for slices"
        status = self._engines(handle).submit(request)
        self.scheduler.step("a call of the engine returns")
        return status

    def pccl_engines_end(self, handle: Any, op: int, verdict: int) -> int:
        return self._command(self._engines(handle).of, lambda engine: engine.end(op, int(verdict)))

    def pccl_engines_freeze(self, handle: Any, group: int, epoch: int) -> int:
        engines = self._engines(handle).of
        for engine in engines:
            engine.fast_path.close()
        return self._command(engines, lambda engine: engine.freeze(group, epoch))

    def pccl_engines_freeze_op(self, handle: Any, op: int) -> int:
        return self._command(self._engines(handle).of, lambda engine: engine.freeze_op(op))

    def pccl_engines_forget_ops(self, handle: Any, last: Any, count: int) -> int:
        key = (last.group, last.epoch, last.tag, last.sequence)
        return self._command(self._engines(handle).of, lambda engine: engine.forget(key, count))

    def pccl_engines_detach(self, handle: Any, op: int) -> int:
        return self._command([self._engines(handle).owner(op)], lambda engine: engine.detach(op))

    def pccl_engines_link_add(self, handle: Any, link: int, index: int, fd: int, keys: Any) -> int:
        return 0

    def pccl_engines_link_close(self, handle: Any, link: int) -> int:
        return 0

    def pccl_engines_set_link_timeout(self, handle: Any, timeout_ms: int) -> None:
        pass

    def pccl_engines_request_link_metrics(self, handle: Any, link: int) -> int:
        counted = {"kind": lib.PCCL_EVENT_LINK_METRICS, "id": link, "tx_bytes": 1, "rx_bytes": 1}
        return self._command(self._engines(handle).of, lambda engine: engine.post(counted))

    def pccl_engines_poll_events(self, handle: Any, events: Any, most: int) -> int:
        count = self._engines(handle).poll(events, most)
        self.scheduler.step("events were polled")
        return count

    def pccl_engines_fast_path(self, handle: Any, at: int) -> Any:
        return self._handle(self._engines(handle).of[at].fast_path)

    def pccl_fast_path_wake_owner(self, handle: Any) -> None:
        raise AssertionError("only ops on devices need it")

    def pccl_fast_path_release(self, path: Any) -> None:
        pass

    def pccl_fast_path_get_stats(self, handle: Any, stats: Any) -> int:
        path: FastPath = ffi.from_handle(handle)
        if path.engine is None:
            return 0
        stats.ops_open = len(path.engine.ops)
        return 1

    def pccl_fast_path_read_records(self, handle: Any, since_ns: int, records: Any, most: int) -> int:
        return 0

    def pccl_fast_path_in_ops_ns(self, handle: Any, of_slices: bool) -> int:
        return 0

    def pccl_fast_path_open(self, handle: Any) -> int:
        path: FastPath = ffi.from_handle(handle)
        self.scheduler.step("the fast path is opened")
        number = path.open()
        self.scheduler.step("the fast path is open")
        return number

    def pccl_fast_path_close(self, handle: Any) -> int:
        path: FastPath = ffi.from_handle(handle)
        self.scheduler.step("the fast path is closed")
        was_open = path.close()
        self.scheduler.step("the fast path is shut")
        return int(was_open)

    def pccl_fast_path_run(self, handle: Any, number: int, request: Any, uses: Any, wait_ms: int, result: Any) -> int:
        started = self._start(handle, number, request, uses, wait_ms)
        return started if isinstance(started, int) else self._wait(handle, started, result)

    def pccl_fast_path_start(self, handle: Any, number: int, request: Any, uses: Any, wait_ms: int, call: Any) -> int:
        started = self._start(handle, number, request, uses, wait_ms)
        if isinstance(started, int):
            return started
        started.is_started = True
        path: FastPath = ffi.from_handle(handle)

        def expire() -> None:
            self.scheduler.wait(lambda: started.op is None, "the fast path's end", started.end_s)
            if started.op is not None:
                path.hand_over(started)

        self.scheduler.spawn("an expiry", expire)
        call[0] = ffi.cast("pccl_fast_path_call *", self._handle(started))
        self.scheduler.step("the op has been started")
        return int(lib.PCCL_OK)

    def pccl_fast_path_wait(self, handle: Any, call: Any, result: Any) -> int:
        return self._wait(handle, ffi.from_handle(ffi.cast("void *", call)), result)

    def pccl_fast_path_forget(self, handle: Any, call: Any) -> None:
        pass

    def _start(self, handle: Any, number: int, request: Any, uses: Any, wait_ms: int) -> Call | int:
        path: FastPath = ffi.from_handle(handle)
        if not request.awaits_completion:
            return int(lib.PCCL_E_INVALID)
        self.scheduler.step("an op comes to the fast path")
        if number == 0 or path.number != number:
            return int(lib.PCCL_FAST_PATH_CLOSED)
        call = Call(end_s=self.scheduler.now + wait_ms / 1000)
        assert path.engine is not None
        path.engine.submit(request, uses[0], call)
        assert call.op is not None
        call.traffic = call.op.send_bytes, call.op.recv_bytes
        uses[0] += 1
        path.calls.append(call)
        return call

    def _wait(self, handle: Any, call: Call, result: Any) -> int:
        path: FastPath = ffi.from_handle(handle)
        scheduler = self.scheduler
        me = scheduler.me
        assert me is not None
        me.is_in_c = True
        call.waiting += 1
        try:
            if not scheduler.wait(lambda: call.op is None, "the fast path", call.end_s) and call.op is not None:
                path.hand_over(call)
        finally:
            me.is_in_c = False
            call.waiting -= 1
        result.tx_bytes, result.rx_bytes = call.traffic
        scheduler.step("the fast path returns")
        return int(lib.PCCL_FAST_PATH_COMPLETED if call.is_completed else lib.PCCL_FAST_PATH_HANDED_OVER)
