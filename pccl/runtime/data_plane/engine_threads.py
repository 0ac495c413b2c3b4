"""The engines of a communicator as its session sees them: one data plane, of one or more threads.

Theory of operation. A lane is an engine, so a thread, with its share of each link's connections. How many lanes there
are is the run's choice, because both ends of a connection must give it to the same lane: the connection's index (which
`LinkHello` tells) modulo the number of lanes. Every link begins with a connection to each lane; one that is lost is
replaced in its lane.

An op that is large enough is divided into slices, one for each lane: every n-th segment of it. Slicing changes neither
the chunks of an op nor its segments, and with them neither the order of any addition nor a quantized block, nor the
stream of stochastic rounding: results are the same bits whatever the number of lanes, and one lane does what it
would without all this. An op that is too small for slices is whole in one lane, which its tag and sequence choose.
The lanes share no state: not a lock is taken for a segment.

An op that comes through a gate is whole in the lane whose gate it is, and must be one that has no slices.

What lanes report is joined. An op is done, agreed on, frozen, detached, or has ended, when all its slices are or have;
a verdict goes to all of them, so that an abort restores what any of them has overwritten. A group is frozen when all
lanes have frozen it: by then each has reported what is done. A link is lost when one lane has lost it; the session then
closes it in all.

A slice that an engine has no memory for, when others of its op run already, is the one irregular case: these are
aborted, and when all have given the buffers back the op is reported as refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pccl.protocol.auth import Keys
from pccl.protocol.peer import SubmitOp
from pccl.runtime.data_plane.engine import (
    Buffers,
    Engine,
    EngineEvent,
    GroupFrozen,
    LinkCounted,
    LinkDegraded,
    LinkLimited,
    OpAgreed,
    OpDetached,
    OpDone,
    OpEnded,
    OpFrozen,
    OpMismatch,
    OpRefused,
    OpRequest,
    OpSpec,
    OpStarted,
    Verdict,
)

GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: its multiples are spread evenly, whatever their distance."""


def first_thread(tag: int, sequence: int, lanes: int) -> int:
    """Where the first slice of an op is."""
    return ((tag + sequence) * GOLDEN % 2**64) * lanes >> 64


@dataclass(slots=True)
class _SliceCount:
    """Of slices that have yet to report something."""

    left: int
    tx_bytes: int = 0
    rx_bytes: int = 0

    def add(self, event: OpDone | OpEnded) -> bool:
        """Whether it was the last."""
        self.left -= 1
        self.tx_bytes += event.tx_bytes
        self.rx_bytes += event.rx_bytes
        return self.left == 0


@dataclass(slots=True)
class _Sliced:
    """An op in several lanes, or in one of several."""

    engines: list[Engine]
    """Those that have taken a slice."""
    done: _SliceCount
    ended: _SliceCount
    unagreed: int
    """Slices that are not agreed on, and that are not frozen."""
    unfrozen: int
    is_mismatched: bool = False
    refusal: str = ""


class EngineThreads:
    """One lane, until `divide`. Only from one thread at a time, but for `stats`."""

    def __init__(self, group: int, segment_bytes: int = 0, force_poll: bool = False) -> None:
        """OSError if the system denies a thread or else."""
        self._group = group
        self._force_poll = force_poll
        self._segment_bytes = segment_bytes
        self._request = self.new_request()
        self._engines = [Engine(group, force_poll)]
        self._ops: dict[int, _Sliced] = {}
        """Empty with one lane."""
        self._freezing: dict[int, int] = {}
        """How many lanes have not frozen an epoch yet."""
        self._detaching: dict[int, int] = {}
        """How many lanes have not detached an op yet, which may have ended meanwhile."""

    def divide(self, lanes: int) -> None:
        """Makes it so many, before there are links and ops. OSError if the system denies the threads; then the one
        there is stays."""
        if lanes == len(self._engines):
            return
        engines: list[Engine] = []
        try:
            for _ in range(lanes):
                engines.append(Engine(self._group, self._force_poll, lanes))
        except OSError:
            for engine in engines:
                engine.close()
            raise
        old, self._engines = self._engines, engines
        for engine in old:
            engine.close()

    @property
    def event_fds(self) -> list[int]:
        """Each readable while `events` has something to return."""
        return [engine.event_fd for engine in self._engines]

    def close(self) -> None:
        """Stops the threads; open ops are aborted and their buffers restored. Of the other methods only `stats` may be
        called later."""
        for engine in self._engines:
            engine.close()

    @property
    def is_closed(self) -> bool:
        return self._engines[0].is_closed

    def forget_after_fork(self) -> None:
        for engine in self._engines:
            engine.forget_after_fork()

    def new_gates(self) -> list[Any]:
        """One to each lane, as `Engine.new_gate`. After `divide`."""
        return [engine.new_gate() for engine in self._engines]

    def new_request(self) -> OpRequest:
        return OpRequest(self._group, self._segment_bytes)

    def submit(self, launch: SubmitOp, spec: OpSpec) -> None:
        """As `OpRequest.fill`. ValueError for what engines do not take, MemoryError."""
        request = self._request
        request.fill(launch, spec)
        if len(self._engines) == 1:
            self._engines[0].submit(request)
            return
        lanes = len(self._engines)
        slices = request.slices(lanes)
        first = first_thread(launch.tag, launch.sequence, lanes)
        sliced = _Sliced([], _SliceCount(slices), _SliceCount(slices), slices, slices)
        for number in range(slices):
            engine = self._engines[(first + number) % lanes]
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
        """Ends with an OpEnded, but for COMMIT_BY_ALL, or with an OpRefused that is on its way already."""
        if len(self._engines) == 1:
            self._engines[0].end(op, verdict)
            return
        sliced = self._ops[op]
        if sliced.refusal:
            return
        if verdict is Verdict.COMMIT_BY_ALL:
            del self._ops[op]
        for engine in sliced.engines:
            engine.end(op, verdict)

    def freeze(self, epoch: int) -> None:
        if len(self._engines) > 1:
            self._freezing[epoch] = len(self._engines)
        for engine in self._engines:
            engine.freeze(epoch)

    def freeze_op(self, op: int) -> None:
        """Ends with an OpFrozen, or with an OpRefused that is on its way already."""
        if len(self._engines) == 1:
            self._engines[0].freeze_op(op)
            return
        for engine in self._ops[op].engines:
            engine.freeze_op(op)

    def forget_ops(self, epoch: int, tag: int, uses: range) -> None:
        for engine in self._engines:
            engine.forget_ops(epoch, tag, uses)

    def detach(self, op: int, private: Buffers | None) -> bool:
        """As `Engine.detach`. False: there is no such op, and no event comes."""
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
        """Takes ownership of a connected socket, the link's connection of this index. `keys`: all that travels on it is
        encrypted."""
        self._engines[index % len(self._engines)].link_add(link, fd, keys)

    def set_link_timeout(self, seconds: float) -> None:
        """How long bytes may lie on a link's connections of one lane and none get across before the link is lost; 0:
        for ever."""
        for engine in self._engines:
            engine.set_link_timeout(seconds)

    def count_link(self, link: int) -> None:
        """Asks for a LinkCounted from each lane."""
        for engine in self._engines:
            engine.count_link(link)

    def link_close(self, link: int) -> None:
        for engine in self._engines:
            engine.link_close(link)

    def events(self) -> list[EngineEvent]:
        """What has happened since the last call; of each op and of each link in order."""
        if len(self._engines) == 1:
            return self._engines[0].events()
        found: list[EngineEvent] = []
        for lane, engine in enumerate(self._engines):
            for event in engine.events():
                joined = self._join(lane, event)
                if joined is not None:
                    found.append(joined)
        return found

    def _join(self, lane: int, event: EngineEvent) -> EngineEvent | None:
        """What an event of one lane means for all of them, if anything."""
        if isinstance(event, OpStarted):
            self._ops[event.op] = _Sliced([self._engines[lane]], _SliceCount(1), _SliceCount(1), 1, 1)
            return event
        if isinstance(event, OpDone):
            done = self._ops[event.op].done
            return OpDone(event.op, done.tx_bytes, done.rx_bytes) if done.add(event) else None
        if isinstance(event, OpAgreed):
            agreed = self._ops.get(event.op)
            if agreed is None:
                return None  # a verdict was there before
            agreed.unagreed -= 1
            return event if agreed.unagreed == 0 else None
        if isinstance(event, OpFrozen):
            frozen = self._ops.get(event.op)
            if frozen is None:
                return None
            frozen.unfrozen -= 1
            return event if frozen.unfrozen == 0 else None
        if isinstance(event, OpDetached):
            self._detaching[event.op] -= 1
            if self._detaching[event.op]:
                return None
            del self._detaching[event.op]
            return event
        if isinstance(event, OpEnded):
            sliced = self._ops[event.op]
            if not sliced.ended.add(event):
                return None
            del self._ops[event.op]
            if sliced.refusal:
                return OpRefused(event.op, sliced.refusal)
            return OpEnded(event.op, sliced.ended.tx_bytes, sliced.ended.rx_bytes)
        if isinstance(event, OpMismatch):
            sliced = self._ops[event.op]
            if sliced.is_mismatched or sliced.refusal:
                return None
            sliced.is_mismatched = True
            return event
        if isinstance(event, GroupFrozen):
            self._freezing[event.epoch] -= 1
            if self._freezing[event.epoch]:
                return None
            del self._freezing[event.epoch]
            return event
        if isinstance(event, LinkDegraded | LinkLimited | LinkCounted):
            return replace(event, lane=lane)
        return event

    def stats(self) -> dict[str, int]:
        """Counters, those of all lanes together; after `close` those of the end. With several lanes there is no
        `scratch_bytes_max`: they do not reach their marks at the same time."""
        engines = self._engines
        total = engines[0].stats()
        for engine in engines[1:]:
            for name, value in engine.stats().items():
                total[name] += value
        if len(engines) > 1:
            del total["scratch_bytes_max"]
        return total
