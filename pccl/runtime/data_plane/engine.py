"""The C library's engine: one or more threads of this process that transfer the elements of ops.

Only `EngineFastPath.run` and the functions that `EngineFastPath.start` returns wait for the network.

Ops on device arrays are *staged*: their source copies the arrays to host memory, and then the op is submitted to the
engine like any other. Other peers cannot distinguish it from an op on host memory.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

from pccl.protocol.auth import Keys
from pccl.protocol.peer.effects import SubmitOp
from pccl.runtime.data_plane import op_records
from pccl.runtime.data_plane.events import (
    READERS,
    EngineEvent,
    EngineFailedError,
    OpDetached,
    OpEnded,
    OpFrozen,
    OpRefused,
)
from pccl.runtime.data_plane.op_request import OpRequest
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec, Source
from pccl.runtime.extension import ffi, lib
from pccl.runtime.extension import text as _text
from pccl.runtime.network.datagrams import Datagrams
from pccl.runtime.network.handshake import link_keys
from pccl.runtime.network.shared_memory import SharedMemory
from pccl.runtime.threads.process import number_of

EVENTS_MAX = 256
CLOSED = "the engine is closed"
_STATS_FIELDS = tuple(name for name, _ in ffi.typeof("pccl_engine_stats").fields)
RECORDS = int(number_of("PCCL_FLIGHT_RECORDS", 4096, 2**20))
"""Number of ops that a communicator's flight recorder keeps; 0 disables it."""


class Verdict(IntEnum):
    """A verdict on an op. COMMIT_BY_ALL means that all ranks have reported OpDone, so its buffers are released now."""

    ABORT = lib.PCCL_ABORT
    COMMIT = lib.PCCL_COMMIT
    COMMIT_BY_ALL = lib.PCCL_COMMIT_BY_ALL


class Engine:
    """A session's engine. Methods must be called by one thread at a time, except `stats` and `records`."""

    def __init__(self, group: int, segment_bytes: int = 0, force_poll: bool = False) -> None:
        """Start one thread. Raises OSError if the system denies the thread or another resource."""
        self._group = group
        self._segment_bytes = segment_bytes
        self._force_poll = force_poll
        self._request = self.new_request()
        self._buffer = ffi.new("pccl_event[]", EVENTS_MAX)
        self._start(1)
        self._last_stats = self.stats()
        """The counters when the engine was closed."""

    def _start(self, threads: int) -> None:
        options = ffi.new("pccl_engine_options *")
        lib.pccl_engine_options_default(options)
        options.force_poll = self._force_poll
        options.records = RECORDS
        error = ffi.new("char[256]")
        handle = lib.pccl_engines_create(options, threads, error, len(error))
        if handle == ffi.NULL:
            raise OSError(f"the engine cannot start: {_text(error)}")
        self._handle = handle
        self._threads = threads
        self._views = [self._new_path(number) for number in range(threads)]
        """The threads' fast paths. Even a closed engine can be queried through them. They take no Python lock, because
        a signal handler that closes the communicator might interrupt the holder."""

    def divide(self, threads: int) -> None:
        """Set the number of threads, before links and ops exist. On OSError the engine is unchanged."""
        if threads != self._threads:
            old = self._handle
            self._start(threads)
            lib.pccl_engines_destroy(old)

    @property
    def event_fds(self) -> list[int]:
        """File descriptors, at least one of which is readable while events are pending."""
        return [lib.pccl_engines_event_fd(self._open, number) for number in range(self._threads)]

    def close(self) -> None:
        """Stop the threads, abort open ops and restore their buffers. `stats` and `records` still work afterwards."""
        self._last_stats = self.stats()
        handle, self._handle = self._handle, ffi.NULL
        if handle != ffi.NULL:
            lib.pccl_engines_destroy(handle)

    @property
    def _open(self) -> Any:
        handle = self._handle
        if handle == ffi.NULL:
            raise EngineFailedError(CLOSED)
        return handle

    @property
    def is_closed(self) -> bool:
        return bool(self._handle == ffi.NULL)

    def forget_after_fork(self) -> None:
        """Close the copy in a forked child, where its threads do not exist."""
        if self._handle != ffi.NULL:
            lib.pccl_engines_forget_after_fork(self._handle)
            self._handle = ffi.NULL
            self._views = []

    def new_fast_paths(self) -> list[EngineFastPath]:
        """Return a fast path into each thread. Call this after `divide`."""
        return [EngineFastPath(self._new_path(number)) for number in range(self._threads)]

    def _new_path(self, number: int) -> Any:
        return ffi.gc(lib.pccl_engines_fast_path(self._open, number), lib.pccl_fast_path_release)

    def new_request(self) -> OpRequest:
        """Return an empty request for ops in this group."""
        return OpRequest(self._group, self._segment_bytes)

    # Ops.

    def check(self, launch: SubmitOp, spec: OpSpec) -> None:
        """Raise the exception that `submit` would raise for these arguments, without submitting the op."""
        self._request.fill(launch, spec)

    def submit(self, launch: SubmitOp, spec: OpSpec) -> None:
        """Start an op. Raises ValueError, RootLostError or MemoryError if the engine does not accept it."""
        request, threads = self._request, self._threads
        request.fill(launch, spec)
        slices = request.slices(threads) if threads > 1 else 1
        self._call(lib.pccl_engines_submit, request.native, slices)

    def end(self, op: int, verdict: Verdict) -> None:
        """Execute a verdict. OpEnded follows unless the verdict is COMMIT_BY_ALL or the op was refused."""
        self._call(lib.pccl_engines_end, op, verdict)

    def freeze(self, epoch: int) -> None:
        """Stop all ops of this epoch and earlier ones. GroupFrozen follows."""
        self._call(lib.pccl_engines_freeze, self._group, epoch)

    def freeze_op(self, op: int) -> None:
        """Stop an op. OpFrozen follows unless the op was refused."""
        self._call(lib.pccl_engines_freeze_op, op)

    def detach(self, op: int) -> None:
        """Stop an op and restore its caller's arrays. OpDetached follows, even if the op is unknown."""
        self._call(lib.pccl_engines_detach, op)

    def forget_ops(self, epoch: int, tag: int, uses: range) -> None:
        """Drop the data received for these uses of a tag, because their ops will not be submitted here."""
        last = ffi.new("pccl_op_key *", {"epoch": epoch, "tag": tag, "sequence": uses[-1], "group": self._group})
        self._call(lib.pccl_engines_forget_ops, last, len(uses))

    # Links.

    def link_add_udp(self, link: int, index: int, datagrams: Datagrams) -> bool:
        """Take ownership of a connected datagram socket, the link's connection `index`. Return False if the system
        lacks what UDP needs."""
        fd = datagrams.sock.detach()
        try:
            keys, handle = link_keys(datagrams.keys), self._open
        except BaseException:
            os.close(fd)
            raise
        secret, is_dialer = datagrams.secret, datagrams.is_dialer
        return bool(lib.pccl_engines_link_add_udp(handle, link, index, fd, secret, is_dialer, keys) == lib.PCCL_OK)

    def link_add(self, link: int, index: int, fd: int, payload: Keys | SharedMemory | None = None) -> None:
        """Take ownership of a connected socket, the link's connection `index`. Its traffic is encrypted with keys, or
        goes through memory that is shared with the process at the other end."""
        try:
            native_keys = link_keys(None if isinstance(payload, SharedMemory) else payload)
            if self._handle == ffi.NULL:
                raise EngineFailedError(CLOSED)
        except BaseException:
            os.close(fd)
            raise
        if isinstance(payload, SharedMemory):
            self._call(lib.pccl_engines_link_add_memory, link, index, fd, payload.detach())
        else:
            self._call(lib.pccl_engines_link_add, link, index, fd, native_keys)

    def set_link_timeout(self, seconds: float) -> None:
        """Set how long data may be in flight without progress before a link is lost; 0 means no limit."""
        lib.pccl_engines_set_link_timeout(self._open, round(seconds * 1000))

    def count_link(self, link: int) -> None:
        """Request a link's counters. LinkCounters from each thread follow if the link exists."""
        self._call(lib.pccl_engines_request_link_metrics, link)

    def link_close(self, link: int) -> None:
        self._call(lib.pccl_engines_link_close, link)

    # Events and counters.

    def events(self) -> list[EngineEvent]:
        """Return the events since the last call, in order for each op and each link."""
        handle = self._handle
        if handle == ffi.NULL:
            raise EngineFailedError(CLOSED)
        found: list[EngineEvent] = []
        count = EVENTS_MAX
        while count == EVENTS_MAX:
            count = lib.pccl_engines_poll_events(handle, self._buffer, EVENTS_MAX)
            for event in self._buffer[0:count]:
                found.append(READERS[event.kind](event))
        return found

    def wake(self) -> None:
        """Make one of `event_fds` readable. Thread-safe."""
        views = self._views
        if views:
            lib.pccl_fast_path_wake_owner(views[0])

    def records(self, since_ns: int) -> list[op_records.Row]:
        """Return the flight recorder's entries for ops in flight or ended after `since_ns`; none after `close`."""
        size = -(-RECORDS // self._threads)
        return [row for view in self._views for row in op_records.read(view, size, since_ns)]

    def stats(self) -> dict[str, int]:
        """Return the counters of all threads together; after `close`, their final values."""
        all_stats = self.stats_by_thread()
        if len(all_stats) < self._threads:
            return dict(self._last_stats)
        total = {name: sum(stats[name] for stats in all_stats) for name in _STATS_FIELDS}
        for name in ("op_wait_us", "late_ms"):
            total[name] = max(stats[name] for stats in all_stats)
        # Threads work on an op's slices concurrently, so take the maximum. The times of unsliced ops are summed.
        del total["in_slices_us"]
        total["in_ops_us"] += max(stats["in_slices_us"] for stats in all_stats)
        return total

    def stats_by_thread(self) -> list[dict[str, int]]:
        """Return the counters of each thread; empty after `close`."""
        found = []
        for view in self._views:
            stats = ffi.new("pccl_engine_stats *")
            if lib.pccl_fast_path_get_stats(view, stats):
                found.append({name: getattr(stats, name) for name in _STATS_FIELDS})
        return found

    def _call(self, function: Callable[..., int], *args: Any) -> None:
        """Call a function of the C library for this engine. Raises EngineFailedError if it is closed."""
        handle = self._handle
        if handle == ffi.NULL:
            raise EngineFailedError(CLOSED)
        status = function(handle, *args)
        if status == lib.PCCL_E_MEMORY:
            raise MemoryError(f"engine: {function.__name__}")
        if status == lib.PCCL_E_INVALID:
            raise ValueError(f"the engine refused the arguments of {function.__name__}")
        if status != lib.PCCL_OK:  # the system or OpenSSL now denies a resource that was available before
            raise EngineFailedError(f"{function.__name__} failed (status {status})")


@dataclass(slots=True)
class _Staged:
    launch: SubmitOp
    spec: OpSpec
    source: Source
    """The source holds the op's host memory, so it is kept until the engine has ended the op."""
    is_submitted: bool = False
    is_frozen: bool = False


class StagedOps:
    """A session's ops that have a source. Each is submitted to the engine once its input is in host memory."""

    def __init__(self, engine: Engine) -> None:
        self.ops: dict[int, _Staged] = {}
        self.posted: deque[Callable[[], EngineEvent | None]] = deque()
        """Calls posted by sources, which `events` executes. Each may return an event."""
        self._engine = engine

    def submit(self, launch: SubmitOp, spec: OpSpec, source: Source) -> None:
        """Start an op, like `Engine.submit`."""
        self._engine.check(launch, spec)
        op = launch.op
        self.ops[op] = _Staged(launch, spec, source)
        source.begin(lambda found: self._post(lambda: self._arrived(op, found)))

    def _arrived(self, op: int, found: Buffers | BaseException) -> EngineEvent | None:
        staged = self.ops.get(op)
        if staged is None:
            return None
        if isinstance(found, BaseException):
            del self.ops[op]
            return OpRefused(op, f"{type(found).__name__}: {found}")
        if staged.is_frozen:
            return None
        try:
            self._engine.submit(staged.launch, staged.spec._replace(buffers=found))
        except MemoryError as error:
            del self.ops[op]
            return OpRefused(op, f"out of memory: {error}")
        staged.is_submitted = True
        return None

    def _post(self, call: Callable[[], EngineEvent | None]) -> None:
        self.posted.append(call)
        self._engine.wake()

    def end(self, op: int, verdict: Verdict) -> None:
        """End an op in `ops`, like `Engine.end`."""
        staged = self.ops[op]
        staged.source.abandon()
        if staged.is_submitted:
            if verdict is Verdict.COMMIT_BY_ALL:
                del self.ops[op]
            self._engine.end(op, verdict)
        else:
            del self.ops[op]
            self._post(lambda: OpEnded(op, 0, 0))

    def freeze_op(self, op: int) -> None:
        """Stop an op in `ops`, like `Engine.freeze_op`."""
        staged = self.ops[op]
        if staged.is_submitted:
            self._engine.freeze_op(op)
        else:
            staged.is_frozen = True
            self._post(lambda: OpFrozen(op))

    def detach(self, op: int) -> None:
        """Report OpDetached once the device no longer reads the op's arrays. The engine uses only host memory."""
        self.ops[op].source.release(lambda: self._post(lambda: OpDetached(op)))

    def events(self, found: list[EngineEvent]) -> list[EngineEvent]:
        """Return `found`, the engine's new events, extended by those of staged ops."""
        for each in found:
            if isinstance(each, OpEnded | OpRefused):
                self.ops.pop(each.op, None)
        while self.posted:
            event = self.posted.popleft()()
            if event is not None:
                found.append(event)
        return found

    def close(self) -> None:
        """Cancel copies that have not begun."""
        for staged in self.ops.values():
            staged.source.abandon()


COMPLETED: int = lib.PCCL_FAST_PATH_COMPLETED
"""The op is committed, and its buffers belong to the caller again."""
HANDED_OVER: int = lib.PCCL_FAST_PATH_HANDED_OVER
"""The op is in flight and now belongs to the session, which receives OpHandedOver."""


class EngineFastPath:
    """The fast path into one engine thread, for any thread (native/src/fast_path.h). May outlive the engine."""

    def __init__(self, native: Any) -> None:
        """`native` is a `pccl_fast_path *`, released with this object."""
        self._native = native

    def in_ops_ns(self, of_slices: bool) -> int:
        """Return the time that the thread has spent in whole ops, or in slices; 0 after the thread has ended."""
        ns: int = lib.pccl_fast_path_in_ops_ns(self._native, of_slices)
        return ns

    def open(self) -> int:
        """Accept ops until `close`. Return the number of this opening."""
        number: int = lib.pccl_fast_path_open(self._native)
        return number

    def close(self) -> None:
        """Stop accepting ops. The engine's events then report every accepted op."""
        lib.pccl_fast_path_close(self._native)

    def run(self, opening: int, request: OpRequest, uses: Any, wait_ms: int) -> tuple[int, int, int]:
        """Submit an op and wait for its end, at most `wait_ms`. No signal handler runs during the wait.

        Return the outcome and the numbers of bytes sent and received. The outcome is COMPLETED, HANDED_OVER, or
        another number if the path was closed before the op was submitted.
        """
        result = ffi.new("pccl_fast_path_result *")
        outcome = lib.pccl_fast_path_run(self._native, opening, request.native, uses, wait_ms, result)
        return outcome, result.tx_bytes, result.rx_bytes

    def start(
        self, opening: int, request: OpRequest, uses: Any, wait_ms: int
    ) -> Callable[[], tuple[bool, int, int]] | None:
        """Submit an op without waiting, or return None if the path is closed.

        The returned function waits, at most `wait_ms`, until the op has left the fast path. It returns whether the op
        has completed, and the bytes sent and received. If no thread waits for the end, the engine's events report it.
        """
        call = ffi.new("pccl_fast_path_call **")
        outcome = lib.pccl_fast_path_start(self._native, opening, request.native, uses, wait_ms, call)
        if outcome != lib.PCCL_OK:
            return None
        native = ffi.gc(call[0], partial(lib.pccl_fast_path_forget, self._native))
        return partial(_join, self._native, native)


def forget_join(join: Callable[[], tuple[bool, int, int]]) -> None:
    """Prevent the release of a started op in a forked child, where the fast path's lock may be held."""
    if isinstance(join, partial):
        ffi.gc(join.args[1], None)


def _join(path: Any, native: Any) -> tuple[bool, int, int]:
    result = ffi.new("pccl_fast_path_result *")
    outcome = lib.pccl_fast_path_wait(path, native, result)
    return outcome == COMPLETED, result.tx_bytes, result.rx_bytes


def use_counter(uses: int) -> Any:
    """Return a counter of a tag's uses that `EngineFastPath.run` reads and advances; the count is at index 0."""
    return ffi.new("uint64_t *", uses)


def first_thread(tag: int, sequence: int, threads: int) -> int:
    """Return the engine thread of an op's first slice."""
    thread: int = lib.pccl_first_engine(tag, sequence, threads)
    return thread
