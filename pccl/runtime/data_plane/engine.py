"""A C engine, one thread of this process: plain numbers in, a batch of events out. A communicator has one or more of
them, see `engine_threads`.

Methods may be called from any thread except where they
say otherwise; none waits for the network.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Protocol

from pccl.protocol.auth import Keys
from pccl.protocol.direct_limit import UNKNOWN
from pccl.protocol.peer import SubmitOp
from pccl.runtime.data_plane import dimensions
from pccl.runtime.extension import ffi, lib
from pccl.runtime.extension import text as _text
from pccl.runtime.network.encrypted import link_keys
from pccl.types import Collective, DataType, QuantizationAlgorithm, QuantizationOptions, ReduceAlgorithm, ReduceOp

EVENTS_MAX = 256


@dataclass(frozen=True, slots=True)
class Buffers:
    """What an op works on. `keep` holds whoever owns the memory."""

    send: int
    recv: int
    count: int
    keep: Any


class Feed(Protocol):
    """One launch of an op on arrays that are not in memory; see `staged_ops`."""

    @property
    def piece_count(self) -> int:
        """At least 1; the same on all peers."""

    def begin(self, ready: Callable[[int, Buffers], None], failed: Callable[[BaseException], None]) -> None:
        """Once. `ready` hears from any thread of each piece that is in memory, `failed` that no more will come."""

    def abandon(self) -> None:
        """No more pieces are wanted."""

    def release(self, told: Callable[[], None]) -> None:
        """`told` is called once, from any thread, when what has begun to read the caller's arrays has done so."""

    def deliver(self) -> None:
        """Puts the results of a committed op where the caller wants them, in the caller's thread."""


class Placement(Protocol):
    """Buffers of an op whose sizes depend on who takes part, which is known when it starts."""

    def place(self, rank: int, world_size: int) -> Buffers:
        """`count` is that of the engine's `pccl_collective`. ValueError if the caller's arrays do not fit."""


@dataclass(frozen=True, slots=True)
class Root:
    """Whose elements all get, as its caller saw it."""

    rank: int
    peer: int
    """0: there was no such rank."""

    def rank_in(self, ring: Sequence[int]) -> int:
        """ValueError if there was no such rank, RootLostError if the peer is not in this ring any more."""
        if self.peer == 0:
            raise ValueError(f"there is no rank {self.rank} in a group of {len(ring)} peers")
        if self.peer not in ring:
            raise RootLostError(f"peer {self.peer}, the root, has left; call again with a rank of the present group")
        return ring.index(self.peer)


class RootLostError(Exception):
    """The peer that was to be the root is not there any more."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The other peer of an op of two, and whether its elements are ours."""

    peer: int
    is_sender: bool


@dataclass(frozen=True, slots=True)
class OpSpec:
    """An op as its caller describes it: what all peers must agree on, and this peer's buffers."""

    tag: int
    dtype: DataType
    reduce_op: ReduceOp
    quantization: QuantizationOptions | None
    buffers: Buffers | Placement
    algorithm: ReduceAlgorithm | None = None
    collective: Collective = Collective.ALL_REDUCE
    root: Root | None = None
    """Of a broadcast."""
    pair: Pair | None = None
    """Of a send or recv."""
    feed: Feed | None = None
    """Where it is given, the buffers tell only the count."""
    new_feed: Callable[[], Feed] | None = None
    """Makes a feed for each launch, in the thread that launches."""
    segment_bytes: int = 0
    """0: what suits the op."""
    step: int | None = None
    """The caller's own count, which all peers must have alike; None: it gives none."""
    shape: tuple[int, ...] | None = None
    """Of the array that the caller gives, which all peers must have alike; None: there is no array."""
    bytes_of: str = ""
    """Of what dtype the array is where it travels as bytes, which all must have alike, too."""

    def launched(self) -> OpSpec:
        return self if self.new_feed is None else replace(self, feed=self.new_feed(), new_feed=None)

    def placed(self, rank: int, world_size: int) -> OpSpec:
        """With buffers for whoever takes part. ValueError as `Placement.place`."""
        buffers = self.buffers
        return self if isinstance(buffers, Buffers) else replace(self, buffers=buffers.place(rank, world_size))


class Verdict(IntEnum):
    """On an op. COMMIT_BY_ALL: all ranks have reported OpDone, so its buffers are the caller's again at once."""

    ABORT = lib.PCCL_ABORT
    COMMIT = lib.PCCL_COMMIT
    COMMIT_BY_ALL = lib.PCCL_COMMIT_BY_ALL


@dataclass(frozen=True, slots=True)
class OpStarted:
    """One that came through the gate, and is from now on as if it had been submitted."""

    op: int
    sequence: int


@dataclass(frozen=True, slots=True)
class OpRan:
    """One that came through the gate: all who take part in it are done, and it is over."""

    op: int
    sequence: int
    tx_bytes: int
    rx_bytes: int


@dataclass(frozen=True, slots=True)
class OpDone:
    op: int
    tx_bytes: int
    rx_bytes: int


@dataclass(frozen=True, slots=True)
class OpAgreed:
    """All who take part in it are done."""

    op: int


@dataclass(frozen=True, slots=True)
class OpFrozen:
    """If it is not done by now it never will be."""

    op: int


@dataclass(frozen=True, slots=True)
class StepMismatch:
    """An op is of a step, or of none, of which another peer's is not."""

    verb: str
    """What mine does to its step."""
    mine: int | None
    theirs: int | None

    def text(self, me: str, them: str) -> str:
        """For the callers of these peers."""
        if self.mine is None or self.theirs is None:
            mine, theirs = ("none" if step is None else f"step {step}" for step in (self.mine, self.theirs))
            return f"{me} gives {mine} where {them} gives {theirs}; all have to give the same step, or none"
        return (
            f"{me} {self.verb} step {self.mine} where {them} {self.verb} step {self.theirs}; "
            "one of them has missed or repeated a step"
        )


@dataclass(frozen=True, slots=True)
class OpDetached:
    """Its caller's arrays are neither read nor written any more, and hold what they held when it was submitted. Also of
    one that has ended by now."""

    op: int


@dataclass(frozen=True, slots=True)
class OpMismatch:
    op: int
    link: int
    mine: str
    theirs: str
    is_other_call: bool = False
    """Not the arguments differ, but what was called."""
    size_bytes: tuple[int, int] = (0, 0)
    """Of mine and theirs."""
    steps: StepMismatch | None = None
    """Where these differ."""
    their_piece_bytes: int = 0
    """Theirs is the guard of an op in pieces of this size; see `staged_ops`. 0: it is none."""


@dataclass(frozen=True, slots=True)
class OpEnded:
    op: int
    tx_bytes: int
    rx_bytes: int


@dataclass(frozen=True, slots=True)
class OpRefused:
    """It had been submitted, but is not taken after all, and its buffers are as they were."""

    op: int
    reason: str


@dataclass(frozen=True, slots=True)
class GroupFrozen:
    epoch: int


@dataclass(frozen=True, slots=True)
class LinkDown:
    link: int
    reason: str


@dataclass(frozen=True, slots=True)
class LinkDegraded:
    """The link goes on over its other connections."""

    link: int
    reason: str
    lane: int = 0


@dataclass(frozen=True, slots=True)
class LinkCounted:
    """Its payload so far, how long it was what held up its ops, and what got across meanwhile."""

    link: int
    tx_bytes: int
    rx_bytes: int
    full_ms: int
    full_bytes: int
    lane: int = 0


@dataclass(frozen=True, slots=True)
class LinkLimited:
    """More connections would let it send faster."""

    link: int
    lane: int = 0


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """It does nothing any more but to be closed, and no peer is to blame."""

    reason: str


class EngineFailedError(Exception):
    """An engine has failed for what this machine or this process has done; the text says what."""


EngineEvent = (
    OpStarted
    | OpRan
    | OpDone
    | OpAgreed
    | OpFrozen
    | OpDetached
    | OpMismatch
    | OpEnded
    | OpRefused
    | GroupFrozen
    | LinkDown
    | LinkDegraded
    | LinkLimited
    | LinkCounted
    | EngineFailed
)


class OpRequest:
    """An op in the engine's terms, filled anew for each. Only from one thread at a time."""

    def __init__(self, group: int, segment_bytes: int = 0) -> None:
        """`segment_bytes` 0: what suits the op."""
        self._segment_bytes = segment_bytes
        self._rank_links: Any = ffi.NULL
        self._spread_count = 0
        self.native = ffi.new("pccl_op_request *")
        self.native.key.group = group

    def fill(self, launch: SubmitOp, spec: OpSpec) -> None:
        """ValueError for an algorithm that the links leave no way for, and as `Placement.place` and `Root.rank_in`."""
        request = self.native
        rank, world_size, links = launch.rank, launch.world_size, launch.links
        buffers = spec.buffers
        if not isinstance(buffers, Buffers):
            buffers = buffers.place(rank, world_size)
        request.op = launch.op
        request.key.epoch = launch.epoch
        request.key.tag = launch.tag
        request.key.sequence = launch.sequence
        shape = request.shape
        shape.collective = spec.collective
        shape.root = spec.root.rank_in(launch.ring) if spec.root is not None else 0
        shape.count = buffers.count
        # As if each rank had a chunk: a broadcast's only one is all of it.
        is_whole = spec.collective in (Collective.BROADCAST, Collective.SEND)
        self._spread_count = buffers.count * (world_size if is_whole else 1)
        shape.dtype = spec.dtype
        shape.reduce_op = spec.reduce_op
        quantization = spec.quantization
        if quantization is None or quantization.algorithm is QuantizationAlgorithm.NONE:
            shape.quantization = shape.quantized_dtype = shape.quantization_block = 0
            request.rounding = request.rounding_seed = 0
        else:
            shape.quantization = quantization.algorithm
            shape.quantized_dtype = code_type(quantization)
            shape.quantization_block = quantization.block_size
            request.rounding = lib.PCCL_ROUND_STOCHASTIC if quantization.stochastic else lib.PCCL_ROUND_NEAREST
            request.rounding_seed = quantization.seed
        shape.step = 0 if spec.step is None else spec.step + 1
        shape.dimensions = dimensions.number_of(spec.shape, spec.bytes_of)
        shape.segment_bytes = max(
            spec.dtype.itemsize,
            spec.segment_bytes
            or self._segment_bytes
            or lib.pccl_segment_bytes_default(self._spread_count, spec.dtype, world_size, launch.is_local),
        )
        shape.world_size = world_size
        algorithm = spec.algorithm
        if algorithm is None:
            algorithm = ReduceAlgorithm.RING
            if launch.is_meshed:
                algorithm = self._algorithm(launch, spec.dtype)
        elif algorithm is ReduceAlgorithm.DIRECT and not launch.is_meshed:
            raise ValueError("algorithm DIRECT needs a link between every two peers of the group, which there is not")
        shape.algorithm = algorithm
        request.rank = rank
        request.link_prev = links[rank - 1]
        request.link_next = links[(rank + 1) % world_size]
        self._rank_links = ffi.new("uint64_t[]", links) if launch.is_meshed else ffi.NULL
        request.rank_links = self._rank_links
        request.awaits_completion = launch.agrees
        request.send = ffi.cast("void *", buffers.send)
        request.recv = ffi.cast("void *", buffers.recv)

    def _algorithm(self, launch: SubmitOp, dtype: DataType) -> ReduceAlgorithm:
        """What suits the op, alike on all peers."""
        shape = self.native.shape
        if launch.direct_limit != UNKNOWN and not shape.quantization:
            is_direct = self._spread_count * dtype.itemsize <= launch.direct_limit
            return ReduceAlgorithm.DIRECT if is_direct else ReduceAlgorithm.RING
        return ReduceAlgorithm(
            lib.pccl_algorithm_default(self._spread_count, dtype, shape.quantization, launch.world_size)
        )

    def slices(self, engines: int) -> int:
        """Into how many slices the op is best divided where each peer has so many engines."""
        shape = self.native.shape
        found: int = lib.pccl_slices_default(
            self._spread_count, shape.dtype, shape.segment_bytes, shape.world_size, engines
        )
        return found

    def cut(self, number: int, slices: int) -> None:
        """Makes it one slice of the op, or the whole again: the only slice of one."""
        self.native.shape.slice = number
        self.native.shape.last_slice = slices - 1


class Engine:
    """Owns the engine thread from construction to `close`."""

    def __init__(self, group: int, force_poll: bool = False, engines: int = 1) -> None:
        """`engines` share what memory a communicator may hold. OSError if the system denies a thread or else."""
        options = ffi.new("pccl_engine_options *")
        lib.pccl_engine_options_default(options)
        options.force_poll = force_poll
        options.pool_bytes_max //= engines
        options.op_scratch_bytes_max //= engines
        error = ffi.new("char[256]")
        self._handle = lib.pccl_engine_create(options, error, len(error))
        if self._handle == ffi.NULL:
            raise OSError(f"the engine cannot start: {_text(error)}")
        self._group = group
        self._events = ffi.new("pccl_event[]", EVENTS_MAX)
        self._stats = ffi.new("pccl_engine_stats *")
        self._closing = threading.Lock()

    @property
    def event_fd(self) -> int:
        """Readable while `events` has something to return."""
        fd: int = lib.pccl_engine_event_fd(self._handle)
        return fd

    def close(self) -> None:
        """Stops the thread; open ops are aborted and their buffers restored. Of the other methods only `stats` may be
        called meanwhile and later."""
        self.stats()
        with self._closing:
            handle, self._handle = self._handle, ffi.NULL
        if handle != ffi.NULL:
            lib.pccl_engine_destroy(handle)

    @property
    def is_closed(self) -> bool:
        return bool(self._handle == ffi.NULL)

    def forget_after_fork(self) -> None:
        if self._handle != ffi.NULL:
            lib.pccl_engine_forget_after_fork(self._handle)
            self._handle = ffi.NULL

    def new_gate(self) -> Any:
        """A `pccl_fast_path *` that may be used as long as anybody has it. See native/src/fast_path.h."""
        return ffi.gc(lib.pccl_engine_fast_path(self._handle), lib.pccl_fast_path_release)

    def submit(self, request: OpRequest) -> None:
        """ValueError for what the engine does not take."""
        self._check(lib.pccl_engine_submit(self._handle, request.native), "submit")

    def end(self, op: int, verdict: Verdict) -> None:
        """Ends with an OpEnded, but for COMMIT_BY_ALL."""
        self._check(lib.pccl_engine_end(self._handle, op, verdict), "end")

    def freeze(self, epoch: int) -> None:
        self._check(lib.pccl_engine_freeze(self._handle, self._group, epoch), "freeze")

    def freeze_op(self, op: int) -> None:
        """Ends with an OpFrozen if there is such an op."""
        self._check(lib.pccl_engine_freeze_op(self._handle, op), "freeze_op")

    def forget_ops(self, epoch: int, tag: int, uses: range) -> None:
        """What others have announced of these uses of a tag, which will not be submitted here."""
        last = ffi.new("pccl_op_key *", {"epoch": epoch, "tag": tag, "sequence": uses[-1], "group": self._group})
        self._check(lib.pccl_engine_forget_ops(self._handle, last, len(uses)), "forget_ops")

    def detach(self, op: int, private: Buffers | None) -> None:
        """Takes the caller's arrays from an op, which goes on with this memory, or stops. Ends with an OpDetached."""
        send, recv = (private.send, private.recv) if private is not None else (0, 0)
        pointers = ffi.cast("void *", send), ffi.cast("void *", recv)
        self._check(lib.pccl_engine_detach(self._handle, op, *pointers), "detach")

    def link_add(self, link: int, fd: int, keys: Keys | None = None) -> None:
        """Takes ownership of a connected socket. `keys`: all that travels on it is encrypted."""
        self._check(lib.pccl_engine_link_add(self._handle, link, fd, link_keys(keys)), "link_add")

    def set_link_timeout(self, seconds: float) -> None:
        """How long bytes may lie on a link and none get across before it is lost; 0: for ever."""
        lib.pccl_engine_set_link_timeout(self._handle, round(seconds * 1000))

    def count_link(self, link: int) -> None:
        """Asks for a LinkCounted, of which there is none for an unknown link."""
        self._check(lib.pccl_engine_request_link_metrics(self._handle, link), "count_link")

    def link_close(self, link: int) -> None:
        self._check(lib.pccl_engine_link_close(self._handle, link), "link_close")

    def events(self) -> list[EngineEvent]:
        """What has happened since the last call, in order. Only from one thread at a time. EngineFailedError once it is
        closed, as by a thread that finds the event loop dead while a task of that runs on."""
        if self._handle == ffi.NULL:
            raise EngineFailedError("the engine is closed")
        found: list[EngineEvent] = []
        count = EVENTS_MAX
        while count == EVENTS_MAX:
            count = lib.pccl_engine_poll_events(self._handle, self._events, EVENTS_MAX)
            found += [_event(self._events[i]) for i in range(count)]
        return found

    def stats(self) -> dict[str, int]:
        """Counters; after `close` those of the end."""
        with self._closing:
            if self._handle != ffi.NULL:
                lib.pccl_engine_get_stats(self._handle, self._stats)
            return {name: getattr(self._stats, name) for name, _ in ffi.typeof("pccl_engine_stats").fields}

    def _check(self, status: int, call: str) -> None:
        if status == lib.PCCL_E_MEMORY:
            raise MemoryError(f"engine {call}")
        if status != lib.PCCL_OK:
            raise ValueError(f"engine {call} refused its arguments (status {status})")


FOUR_BITS = {DataType.UINT8: lib.PCCL_CODE_UINT4, DataType.INT8: lib.PCCL_CODE_INT4}


def code_type(quantization: QuantizationOptions) -> int:
    """What the engine calls the type of an element on the wire."""
    datatype = quantization.quantized_datatype
    return FOUR_BITS[datatype] if quantization.bits == 4 else datatype


def _event(event: Any) -> EngineEvent:
    kind = event.kind
    if kind == lib.PCCL_EVENT_OP_FAST_COMPLETED:
        return OpRan(event.id, event.sequence, event.tx_bytes, event.rx_bytes)
    if kind == lib.PCCL_EVENT_OP_HANDED_OVER:
        return OpStarted(event.id, event.sequence)
    if kind == lib.PCCL_EVENT_OP_DONE:
        return OpDone(event.id, event.tx_bytes, event.rx_bytes)
    if kind == lib.PCCL_EVENT_OP_COMPLETED:
        return OpAgreed(event.id)
    if kind == lib.PCCL_EVENT_OP_FROZEN:
        return OpFrozen(event.id)
    if kind == lib.PCCL_EVENT_OP_DETACHED:
        return OpDetached(event.id)
    if kind == lib.PCCL_EVENT_OP_ENDED:
        return OpEnded(event.id, event.tx_bytes, event.rx_bytes)
    if kind == lib.PCCL_EVENT_OP_MISMATCH:
        is_other_call = event.mine.collective != event.theirs.collective
        size_bytes = _size_bytes(event.mine), _size_bytes(event.theirs)
        has_other_shape = event.mine.dimensions != event.theirs.dimensions
        theirs = _describe(event.theirs, has_other_shape)
        steps = _compare_steps(event.mine, event.theirs)
        piece_bytes = _guarded_bytes(event.theirs)
        mine = _describe(event.mine, has_other_shape)
        return OpMismatch(event.id, event.link, mine, theirs, is_other_call, size_bytes, steps, piece_bytes)
    if kind == lib.PCCL_EVENT_GROUP_FROZEN:
        return GroupFrozen(event.id)
    if kind == lib.PCCL_EVENT_LINK_LIMITED:
        return LinkLimited(event.id)
    if kind == lib.PCCL_EVENT_LINK_METRICS:
        return LinkCounted(event.id, event.tx_bytes, event.rx_bytes, event.full_ms, event.full_bytes)
    reason = _text(event.detail)
    if kind == lib.PCCL_EVENT_ENGINE_FAILED:
        return EngineFailed(_failure(reason, event.system_error))
    if event.system_error:
        reason = f"{reason}: {os.strerror(event.system_error)}" if reason else os.strerror(event.system_error)
    reason = reason or "closed by the other side"
    if kind == lib.PCCL_EVENT_CONNECTION_LOST:
        return LinkDegraded(event.id, reason)
    assert kind == lib.PCCL_EVENT_LINK_LOST, kind
    return LinkDown(event.id, reason)


def _failure(detail: str, system_error: int) -> str:
    if system_error == errno.ENOMEM:
        return f"this process is out of memory: {detail}"
    return (
        f"the engine has ended: {detail}: {os.strerror(system_error)}; something in this process closes descriptors "
        "that are not its own"
    )


def guard_spec(of: OpSpec, piece_bytes: int) -> OpSpec:
    """An op that is nothing but the description of another one, in pieces of this size."""
    nothing = Buffers(0, 0, 0, None)
    mark = guarded(piece_bytes) + 1  # odd, as segments are not
    kind = DataType.UINT8, ReduceOp.SUM, None
    return OpSpec(of.tag, *kind, nothing, ReduceAlgorithm.RING, segment_bytes=mark, step=of.step)


def guarded(piece_bytes: int) -> int:
    """The size of pieces as guards tell it."""
    return piece_bytes & 0xFFFFFFFE


def _guarded_bytes(shape: Any) -> int:
    """As of `OpMismatch.their_piece_bytes`."""
    is_guard = shape.count == 0 and shape.collective == Collective.ALL_REDUCE and shape.dtype == DataType.UINT8
    mark: int = shape.segment_bytes
    return mark - 1 if is_guard and mark % 2 else 0


def _size_bytes(shape: Any) -> int:
    """Of a shape that came over the network, too: 0 for a dtype that is none."""
    size_bytes: int = shape.count * lib.pccl_dtype_bytes(shape.dtype)
    return size_bytes


def _compare_steps(mine: Any, theirs: Any) -> StepMismatch | None:
    if mine.step == theirs.step:
        return None
    is_reduce = mine.collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
    steps = (shape.step - 1 if shape.step else None for shape in (mine, theirs))
    return StepMismatch("reduces" if is_reduce else "is at", *steps)


def _describe(shape: Any, with_dimensions: bool) -> str:
    """A shape that came over the network: its numbers may be anything."""

    def name(kind: Any, value: int) -> str:
        try:
            return str(kind(value).name)
        except ValueError:
            return f"unknown {value}"

    text = name(ReduceOp, shape.reduce_op)
    if shape.collective == Collective.REDUCE_SCATTER:
        text = f"reduce_scatter {text}"
    elif shape.collective != Collective.ALL_REDUCE:
        text = name(Collective, shape.collective).lower()
    text += f" of {shape.count} x {name(DataType, shape.dtype)}"
    if with_dimensions:
        text += dimensions.told(shape.dimensions)
    if shape.collective == Collective.BROADCAST:
        text += f" from rank {shape.root}"
    if shape.quantization:
        four_bits = {code: f"4-bit {datatype.name}" for datatype, code in FOUR_BITS.items()}
        code = four_bits.get(shape.quantized_dtype) or name(DataType, shape.quantized_dtype)
        text += f", {name(QuantizationAlgorithm, shape.quantization)} to {code}"
        if shape.quantization_block:
            text += f" in blocks of {shape.quantization_block}"
    algorithm = name(ReduceAlgorithm, shape.algorithm)
    text += f" ({algorithm}, world {shape.world_size}, segments of {shape.segment_bytes} bytes"
    if shape.last_slice:
        text += f", slice {shape.slice} of {shape.last_slice + 1}"
    return text + ")"
