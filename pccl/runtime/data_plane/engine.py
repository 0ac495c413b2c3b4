"""The C library's engine: one thread of this process, plain numbers in, a batch of events out.

All calls into the engine go through this module. A communicator has one engine or more (`engine_threads`). Methods may
be called from any thread unless they say otherwise. None waits for the network, but for `EngineFastPath.run`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from pccl.protocol.auth import Keys
from pccl.runtime.data_plane import op_records
from pccl.runtime.data_plane.events import READERS, EngineEvent, EngineFailedError
from pccl.runtime.data_plane.op_request import OpRequest
from pccl.runtime.data_plane.op_spec import Buffers
from pccl.runtime.environment import number_of
from pccl.runtime.extension import ffi, lib
from pccl.runtime.extension import text as _text
from pccl.runtime.network.handshake import link_keys

EVENTS_MAX = 256
_STATS_FIELDS = ffi.typeof("pccl_engine_stats").fields
RECORDS = int(number_of("PCCL_FLIGHT_RECORDS", 4096, 2**20))
"""Number of ops that the flight recorder of a communicator remembers; 0: none."""


class Verdict(IntEnum):
    """A verdict on an op. COMMIT_BY_ALL: all ranks have reported OpDone, so its buffers are the caller's again at
    once."""

    ABORT = lib.PCCL_ABORT
    COMMIT = lib.PCCL_COMMIT
    COMMIT_BY_ALL = lib.PCCL_COMMIT_BY_ALL


class Engine:
    """Owns an engine thread from construction to `close`."""

    def __init__(self, group: int, force_poll: bool = False, engines: int = 1) -> None:
        """Start the thread, as one of so many `engines`, which share the memory that a communicator may hold. OSError
        if the system denies a thread or something else."""
        options = ffi.new("pccl_engine_options *")
        lib.pccl_engine_options_default(options)
        options.force_poll = force_poll
        options.pool_bytes_max //= engines
        options.op_scratch_bytes_max //= engines
        self._records = options.records = -(-RECORDS // engines)
        error = ffi.new("char[256]")
        self._handle = lib.pccl_engine_create(options, error, len(error))
        if self._handle == ffi.NULL:
            raise OSError(f"the engine cannot start: {_text(error)}")
        self._group = group
        self._events = ffi.new("pccl_event[]", EVENTS_MAX)
        self._view = self._new_path()
        """What may be asked though the engine is closed meanwhile. No lock of Python's would do: a signal handler that
        closes the communicator may interrupt whoever holds it."""
        self._last_stats = self.stats()
        """The counters at the end."""

    @property
    def event_fd(self) -> int:
        """A descriptor that is readable while `events` has something to return."""
        fd: int = lib.pccl_engine_event_fd(self._open)
        return fd

    def close(self) -> None:
        """Stop the thread; open ops are aborted and their buffers restored. Of the other methods only `stats` and
        `records` may be called meanwhile, and later; the others raise EngineFailedError then."""
        self._last_stats = self.stats()
        handle, self._handle = self._handle, ffi.NULL
        if handle != ffi.NULL:
            lib.pccl_engine_destroy(handle)

    @property
    def _open(self) -> Any:
        """The engine. EngineFailedError once it is closed: another thread may do so that finds the event loop dead."""
        handle = self._handle
        if handle == ffi.NULL:
            raise EngineFailedError("the engine is closed")
        return handle

    @property
    def is_closed(self) -> bool:
        return bool(self._handle == ffi.NULL)

    def forget_after_fork(self) -> None:
        """Close the copy in a forked child, where the thread does not run."""
        if self._handle != ffi.NULL:
            lib.pccl_engine_forget_after_fork(self._handle)
            self._handle = ffi.NULL
            self._view = None

    def new_fast_path(self) -> EngineFastPath:
        """Return the way of small ops into this engine."""
        return EngineFastPath(self._new_path())

    def _new_path(self) -> Any:
        return ffi.gc(lib.pccl_engine_fast_path(self._open), lib.pccl_fast_path_release)

    def submit(self, request: OpRequest) -> None:
        """Start an op. ValueError for what the engine does not take, MemoryError."""
        self._check(lib.pccl_engine_submit(self._open, request.native), "submit")

    def end(self, op: int, verdict: Verdict) -> None:
        """Carry a verdict out. OpEnded follows, unless it is COMMIT_BY_ALL."""
        self._check(lib.pccl_engine_end(self._open, op, verdict), "end")

    def freeze(self, epoch: int) -> None:
        """Stop all ops up to this epoch. GroupFrozen follows."""
        self._check(lib.pccl_engine_freeze(self._open, self._group, epoch), "freeze")

    def freeze_op(self, op: int) -> None:
        """Stop an op. OpFrozen follows, if there is such an op."""
        self._check(lib.pccl_engine_freeze_op(self._open, op), "freeze_op")

    def forget_ops(self, epoch: int, tag: int, uses: range) -> None:
        """Drop what has come for these uses of a tag, which will not be submitted here."""
        last = ffi.new("pccl_op_key *", {"epoch": epoch, "tag": tag, "sequence": uses[-1], "group": self._group})
        self._check(lib.pccl_engine_forget_ops(self._open, last, len(uses)), "forget_ops")

    def detach(self, op: int, private: Buffers | None) -> None:
        """Take the caller's arrays from an op, which goes on with this memory, or stops. OpDetached follows."""
        send, recv = (private.send, private.recv) if private is not None else (0, 0)
        pointers = ffi.cast("void *", send), ffi.cast("void *", recv)
        self._check(lib.pccl_engine_detach(self._open, op, *pointers), "detach")

    def link_add(self, link: int, fd: int, keys: Keys | None = None) -> None:
        """Take ownership of a connected socket as a connection of the link. `keys`: all that travels on it is
        encrypted."""
        self._check(lib.pccl_engine_link_add(self._open, link, fd, link_keys(keys)), "link_add")

    def set_link_timeout(self, seconds: float) -> None:
        """Set how long bytes may lie on a link and none get across before it is lost; 0: for ever."""
        lib.pccl_engine_set_link_timeout(self._open, round(seconds * 1000))

    def count_link(self, link: int) -> None:
        """Ask for the counters of a link. LinkCounters follows, if there is such a link."""
        self._check(lib.pccl_engine_request_link_metrics(self._open, link), "count_link")

    def link_close(self, link: int) -> None:
        self._check(lib.pccl_engine_link_close(self._open, link), "link_close")

    def events(self) -> list[EngineEvent]:
        """Return what has happened since the last call, in order. Only from one thread at a time."""
        found: list[EngineEvent] = []
        count = EVENTS_MAX
        while count == EVENTS_MAX:
            count = lib.pccl_engine_poll_events(self._open, self._events, EVENTS_MAX)
            found += [READERS[event.kind](event) for event in self._events[0:count]]
        return found

    def records(self, since_ns: int) -> list[op_records.Row]:
        """Return what the flight recorder holds of ops that have not ended, or have after `since_ns`; nothing once the
        engine is closed."""
        view = self._view
        return op_records.read(view, self._records, since_ns) if view is not None else []

    def stats(self) -> dict[str, int]:
        """Return the counters; after `close` those at the end."""
        view, stats = self._view, ffi.new("pccl_engine_stats *")
        if view is None or not lib.pccl_fast_path_get_stats(view, stats):
            return dict(self._last_stats)
        return {name: getattr(stats, name) for name, _ in _STATS_FIELDS}

    def _check(self, status: int, call: str) -> None:
        if status == lib.PCCL_E_MEMORY:
            raise MemoryError(f"engine {call}")
        if status != lib.PCCL_OK:
            raise ValueError(f"engine {call} refused its arguments (status {status})")


COMPLETED: int = lib.PCCL_FAST_PATH_COMPLETED
"""The op is committed and its buffers are the caller's."""
HANDED_OVER: int = lib.PCCL_FAST_PATH_HANDED_OVER
"""The op is under way, and is the session's from now on: OpHandedOver tells it."""


class EngineFastPath:
    """The way of small ops into one engine, from any thread; see native/src/fast_path.h. May outlive the engine."""

    def __init__(self, native: Any) -> None:
        """`native` is a `pccl_fast_path *`, released with this object."""
        self._native = native

    def in_ops_ns(self, of_slices: bool) -> int:
        """Return the engine's time in whole ops by now, or in slices; 0 after its end."""
        ns: int = lib.pccl_fast_path_in_ops_ns(self._native, of_slices)
        return ns

    def open(self) -> int:
        """Let ops through until `close`. Return the number of this opening."""
        number: int = lib.pccl_fast_path_open(self._native)
        return number

    def close(self) -> None:
        """Let no more ops through. The engine's events then tell of all that have come through."""
        lib.pccl_fast_path_close(self._native)

    def run(self, opening: int, request: OpRequest, uses: Any, wait_ms: int) -> tuple[int, int, int]:
        """Submit an op and wait for its end. Return COMPLETED, HANDED_OVER, or something else if the path has been
        closed since this opening and nothing was submitted; and the bytes sent and received.

        The wait holds no interpreter lock. No signal handler runs in it, so it is bounded by `wait_ms`."""
        result = ffi.new("pccl_fast_path_result *")
        outcome = lib.pccl_fast_path_run(self._native, opening, request.native, uses, wait_ms, result)
        return outcome, result.tx_bytes, result.rx_bytes

    def start(self, opening: int, request: OpRequest, uses: Any, wait_ms: int) -> EngineCall | None:
        """Submit an op. None if the path has been closed since this opening, and nothing was submitted. When nobody
        waits for it, its end comes with the engine's events; after `wait_ms` it is handed over."""
        call = ffi.new("pccl_fast_path_call **")
        outcome = lib.pccl_fast_path_start(self._native, opening, request.native, uses, wait_ms, call)
        return EngineCall(self._native, call[0]) if outcome == lib.PCCL_OK else None


class EngineCall:
    """An op that was started on the fast path. Thread-safe."""

    def __init__(self, path: Any, native: Any) -> None:
        self._path = path
        self._native = ffi.gc(native, lambda call: lib.pccl_fast_path_forget(path, call))

    def wait(self) -> tuple[int, int, int]:
        """Wait until the op is over here, and return COMPLETED or HANDED_OVER, and the bytes sent and received. As in
        `EngineFastPath.run` no signal handler runs meanwhile."""
        result = ffi.new("pccl_fast_path_result *")
        outcome = lib.pccl_fast_path_wait(self._path, self._native, result)
        return outcome, result.tx_bytes, result.rx_bytes


def use_counter(uses: int) -> Any:
    """Return a count of a tag's uses that `EngineFastPath.run` reads and advances; the count itself is at index 0."""
    return ffi.new("uint64_t *", uses)
