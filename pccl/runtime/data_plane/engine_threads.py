"""The engines of a communicator, one or more threads, as one.

Theory of operation. Each engine thread has its share of each link's connections. How many threads there are is the
run's choice, because both ends of a connection must give it to the same thread: the connection's index (which
`LinkHello` tells) modulo the number of threads. Every link begins with a connection to each thread; one that is lost is
replaced in its thread.

An op that is large enough is divided into slices, one for each thread: every n-th segment of it (striping, as over
several rails). An op that is too
small for slices is whole in one thread, which its tag and sequence choose. An op on the fast path is whole in the
thread whose fast path it takes, and must be one that has no slices.

1. Slicing changes neither the chunks of an op nor its segments, and with them neither the order of any addition, nor a
   quantized block, nor the stream of stochastic rounding. So results are the same bits whatever the number of threads.
2. The threads share no state: not a lock is taken for a segment.
3. With one thread, calls and events pass through as they are.

What threads report is joined. An op is done, completed, frozen, detached, or has ended, when all its slices are or
have; a verdict goes to all of them, so that an abort restores what any of them has overwritten. A group is frozen when
all threads have frozen it: by then each has reported what is done. A link is lost when one thread has lost it; the
session then closes it in all.

A slice for which one thread has no memory, when others of its op run already, is the one irregular case: these are
aborted, and when all have given the buffers back the op is reported as refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pccl.protocol.auth import Keys
from pccl.protocol.peer import SubmitOp
from pccl.runtime.data_plane import op_records
from pccl.runtime.data_plane.engine import Engine, EngineFastPath, Verdict
from pccl.runtime.data_plane.events import (
    EngineEvent,
    GroupFrozen,
    LinkCounters,
    LinkDegraded,
    LinkLimited,
    OpCompleted,
    OpDetached,
    OpDone,
    OpEnded,
    OpFrozen,
    OpHandedOver,
    OpMismatch,
    OpRefused,
)
from pccl.runtime.data_plane.op_request import OpRequest
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: its multiples are spread evenly, whatever their distance."""


def first_thread(tag: int, sequence: int, threads: int) -> int:
    """Return the engine thread of an op's first slice."""
    return ((tag + sequence) * GOLDEN % 2**64) * threads >> 64


@dataclass(slots=True)
class _SliceCount:
    """Slices that have yet to report something, and the traffic of those that have."""

    left: int
    tx_bytes: int = 0
    rx_bytes: int = 0

    def add(self, event: OpDone | OpEnded) -> bool:
        """Count a slice's report. Return whether it was the last."""
        self.left -= 1
        self.tx_bytes += event.tx_bytes
        self.rx_bytes += event.rx_bytes
        return self.left == 0


@dataclass(slots=True)
class _Sliced:
    """An op in several engine threads, or in one of several."""

    engines: list[Engine]
    """The engines that have taken a slice."""
    done: _SliceCount
    ended: _SliceCount
    uncompleted: int
    """Slices that are not completed."""
    unfrozen: int
    """Slices that are not frozen."""
    is_mismatched: bool = False
    """Whether a mismatch was reported: those of further slices are the same."""
    refusal: str = ""
    """The reason why an engine has not taken its slice."""


class EngineThreads:
    """The engine threads of a session: one, until `divide`. Only from one thread at a time, but for `stats`
    and `records`."""

    def __init__(self, group: int, segment_bytes: int = 0, force_poll: bool = False) -> None:
        """Start one thread. OSError if the system denies it or something else."""
        self._group = group
        self._force_poll = force_poll
        self._segment_bytes = segment_bytes
        self._request = self.new_request()
        self._engines = [Engine(group, force_poll)]
        self._ops: dict[int, _Sliced] = {}
        """Empty with one thread."""
        self._freezing: dict[int, int] = {}
        """Number of threads that have yet to freeze an epoch."""
        self._detaching: dict[int, int] = {}
        """Number of threads that have yet to detach an op, which may have ended meanwhile."""
        self._unknown: set[int] = set()
        """Those of these ops that a thread did not have."""
        self._joins: dict[type, Callable[[int, Any], EngineEvent | None]] = {
            OpHandedOver: self._op_handed_over,
            OpDone: self._op_done,
            OpCompleted: self._op_completed,
            OpFrozen: self._op_frozen,
            OpDetached: self._op_detached,
            OpEnded: self._op_ended,
            OpMismatch: self._op_mismatch,
            GroupFrozen: self._group_frozen,
            LinkDegraded: self._name_thread,
            LinkLimited: self._name_thread,
            LinkCounters: self._name_thread,
        }
        """Functions that return what an event of one thread means for all of them, if anything. Other events pass as
        they are."""

    def divide(self, threads: int) -> None:
        """Set the number of engine threads, before there are links and ops. OSError if the system denies the threads;
        then the one there is stays."""
        if threads == len(self._engines):
            return
        engines: list[Engine] = []
        try:
            for _ in range(threads):
                engines.append(Engine(self._group, self._force_poll, threads))
        except OSError:
            for engine in engines:
                engine.close()
            raise
        old, self._engines = self._engines, engines
        for engine in old:
            engine.close()

    @property
    def event_fds(self) -> list[int]:
        """Descriptors, one of which is readable while `events` has something to return."""
        return [engine.event_fd for engine in self._engines]

    def close(self) -> None:
        """Stop the threads; open ops are aborted and their buffers restored. Of the other methods only `stats` and
        `records` may be called later."""
        for engine in self._engines:
            engine.close()

    @property
    def is_closed(self) -> bool:
        return self._engines[0].is_closed

    def forget_after_fork(self) -> None:
        """Close the copies in a forked child."""
        for engine in self._engines:
            engine.forget_after_fork()

    def new_fast_paths(self) -> list[EngineFastPath]:
        """Return a fast path into each thread. After `divide`."""
        return [engine.new_fast_path() for engine in self._engines]

    def new_request(self) -> OpRequest:
        """Return a request to fill, for ops of this group."""
        return OpRequest(self._group, self._segment_bytes)

    def check(self, launch: SubmitOp, spec: OpSpec) -> None:
        """Raise what `submit` would raise for the arguments, without submitting anything."""
        self._request.fill(launch, spec)

    def submit(self, launch: SubmitOp, spec: OpSpec) -> None:
        """Start an op. Errors as in `OpRequest.fill` and `Engine.submit`."""
        request = self._request
        request.fill(launch, spec)
        if len(self._engines) == 1:
            self._engines[0].submit(request)
            return
        threads = len(self._engines)
        slices = request.slices(threads)
        first = first_thread(launch.tag, launch.sequence, threads)
        sliced = _Sliced([], _SliceCount(slices), _SliceCount(slices), slices, slices)
        for number in range(slices):
            engine = self._engines[(first + number) % threads]
            request.cut(number, slices)
            try:
                engine.submit(request)
            except MemoryError as error:
                if number == 0:
                    raise
                self._refuse(launch.op, sliced, f"out of memory: {error}")
                break
            sliced.engines.append(engine)
        self._ops[launch.op] = sliced

    def _refuse(self, op: int, sliced: _Sliced, reason: str) -> None:
        sliced.refusal = reason
        sliced.ended.left = len(sliced.engines)
        for engine in sliced.engines:
            engine.end(op, Verdict.ABORT)

    def end(self, op: int, verdict: Verdict) -> None:
        """Carry a verdict out. OpEnded follows, unless it is COMMIT_BY_ALL, or an OpRefused that is on its way
        already, or the op was refused when it was submitted: the verdict may have been decided before that was
        known."""
        if len(self._engines) == 1:
            self._engines[0].end(op, verdict)
            return
        sliced = self._ops.get(op)
        if sliced is None or sliced.refusal:
            return
        if verdict is Verdict.COMMIT_BY_ALL:
            del self._ops[op]
        for engine in sliced.engines:
            engine.end(op, verdict)

    def freeze(self, epoch: int) -> None:
        """Stop all ops up to this epoch. GroupFrozen follows."""
        if len(self._engines) > 1:
            self._freezing[epoch] = len(self._engines)
        for engine in self._engines:
            engine.freeze(epoch)

    def freeze_op(self, op: int) -> None:
        """Stop an op. OpFrozen follows, or an OpRefused that is on its way already; nothing if it was refused when it
        was submitted."""
        if len(self._engines) == 1:
            self._engines[0].freeze_op(op)
            return
        sliced = self._ops.get(op)
        for engine in sliced.engines if sliced is not None else ():
            engine.freeze_op(op)

    def forget_ops(self, epoch: int, tag: int, uses: range) -> None:
        """Drop what has come for these uses of a tag, which will not be submitted here."""
        for engine in self._engines:
            engine.forget_ops(epoch, tag, uses)

    def detach(self, op: int, private: Buffers | None) -> bool:
        """Take the caller's arrays from an op, as `Engine.detach`. False: there is no such op, and no event follows."""
        if len(self._engines) == 1:
            self._engines[0].detach(op, private)
            return True
        sliced = self._ops.get(op)
        if sliced is None:
            return False
        self._detaching[op] = len(sliced.engines)
        for engine in sliced.engines:
            engine.detach(op, private)
        return True

    def link_add(self, link: int, index: int, fd: int, keys: Keys | None = None) -> None:
        """Take ownership of a connected socket, the link's connection of this index. `keys`: all that travels on it is
        encrypted."""
        self._engines[index % len(self._engines)].link_add(link, fd, keys)

    def set_link_timeout(self, seconds: float) -> None:
        """Set how long bytes may lie on a link's connections of one thread and none get across before the link is lost;
        0: for ever."""
        for engine in self._engines:
            engine.set_link_timeout(seconds)

    def count_link(self, link: int) -> None:
        """Ask for the counters of a link. A LinkCounters of each thread follows."""
        for engine in self._engines:
            engine.count_link(link)

    def link_close(self, link: int) -> None:
        for engine in self._engines:
            engine.link_close(link)

    def events(self) -> list[EngineEvent]:
        """Return what has happened since the last call; for each op and for each link in order."""
        if len(self._engines) == 1:
            return self._engines[0].events()
        found: list[EngineEvent] = []
        for thread, engine in enumerate(self._engines):
            for event in engine.events():
                join = self._joins.get(type(event))
                joined = event if join is None else join(thread, event)
                if joined is not None:
                    found.append(joined)
        return found

    def _op_handed_over(self, thread: int, event: OpHandedOver) -> EngineEvent:
        self._ops[event.op] = _Sliced([self._engines[thread]], _SliceCount(1), _SliceCount(1), 1, 1)
        return event

    def _op_done(self, _: int, event: OpDone) -> EngineEvent | None:
        done = self._ops[event.op].done
        return OpDone(event.op, done.tx_bytes, done.rx_bytes) if done.add(event) else None

    def _op_completed(self, _: int, event: OpCompleted) -> EngineEvent | None:
        sliced = self._ops.get(event.op)
        if sliced is None:
            return None  # a verdict was there before
        sliced.uncompleted -= 1
        return event if sliced.uncompleted == 0 else None

    def _op_frozen(self, _: int, event: OpFrozen) -> EngineEvent | None:
        sliced = self._ops.get(event.op)
        if sliced is None:
            return None
        sliced.unfrozen -= 1
        return event if sliced.unfrozen == 0 else None

    def _op_detached(self, _: int, event: OpDetached) -> EngineEvent | None:
        self._detaching[event.op] -= 1
        if not event.is_known:
            self._unknown.add(event.op)
        if self._detaching[event.op]:
            return None
        del self._detaching[event.op]
        is_known = event.op not in self._unknown
        self._unknown.discard(event.op)
        return OpDetached(event.op, is_known)

    def _op_ended(self, _: int, event: OpEnded) -> EngineEvent | None:
        sliced = self._ops[event.op]
        if not sliced.ended.add(event):
            return None
        del self._ops[event.op]
        if sliced.refusal:
            return OpRefused(event.op, sliced.refusal)
        return OpEnded(event.op, sliced.ended.tx_bytes, sliced.ended.rx_bytes)

    def _op_mismatch(self, _: int, event: OpMismatch) -> EngineEvent | None:
        sliced = self._ops[event.op]
        if sliced.is_mismatched or sliced.refusal:
            return None
        sliced.is_mismatched = True
        return event

    def _group_frozen(self, _: int, event: GroupFrozen) -> EngineEvent | None:
        self._freezing[event.epoch] -= 1
        if self._freezing[event.epoch]:
            return None
        del self._freezing[event.epoch]
        return event

    @staticmethod
    def _name_thread(thread: int, event: LinkDegraded | LinkLimited | LinkCounters) -> EngineEvent:
        return replace(event, thread=thread)

    def records(self, since_ns: int) -> list[op_records.Row]:
        """Return the records of all threads, as `Engine.records`. Any thread."""
        return [row for engine in self._engines for row in engine.records(since_ns)]

    def stats(self) -> dict[str, int]:
        """Return the counters of all threads together; after `close` those at the end. With several threads there is no
        `scratch_bytes_max`: they do not reach their marks at the same time."""
        all_stats = [engine.stats() for engine in self._engines]
        total = {name: sum(stats[name] for stats in all_stats) for name in all_stats[0]}
        for name in ("op_wait_us", "late_ms"):
            total[name] = max(stats[name] for stats in all_stats)
        # The slices of an op are in flight together, its whole neighbours one by one.
        del total["in_slices_us"]
        total["in_ops_us"] += max(stats["in_slices_us"] for stats in all_stats)
        if len(all_stats) > 1:
            del total["scratch_bytes_max"]
        return total
