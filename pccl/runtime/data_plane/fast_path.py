"""Small ops that the caller's thread runs by itself, past the trio thread.

Theory of operation. An op that the session launches takes the way caller, trio thread, engine, trio thread, caller; of
64 KiB between two processes of one machine that is three quarters of its time. Where nothing is to be decided, a caller
that would do nothing but wait goes on the engine's fast path instead (native/src/fast_path.h): it submits the op, waits
until all participants are done, and has its result; the session hears of it later. Rules:

1. The session opens the fast path while its machine has a `plain_start`, and *takes over* before it tells the machine
   anything that bears on ops, such as a message of the master: it closes the fast path, which is a cut, and tells the
   machine what has come of the ops on its far side. So the machine decides as if it had launched each of them.
2. A use of a tag is counted in one place at a time: by the fast path from the first op with that tag that comes through
   it until it is closed or the session launches one (`forget_uses`), otherwise by the machine. No two threads count the
   same tag, for no two ops in flight have the same one. Point-to-point ops have tags of their own for each pair and
   direction.
3. A tag's first op in an epoch is the machine's. What is launched after an op that came through the fast path finds
   that one counted: see the order in which `engine_bridge` hears of both.
4. An op may also be started here by a caller that waits later, or never (`start`). Who waits for it is there when the
   engine completes it; otherwise the session hears of it at once, and ends it. A caller that gives it up asks the
   session, which takes over before it deals with that: then the op is the session's, if it is not over.
5. A signal handler may raise at any moment in the caller's thread: before the one call that submits, the op is not
   there; after it, the session hears of it like of any other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pccl.protocol.peer import OpResult, Peer, SubmitOp, pair_start
from pccl.runtime.data_plane.engine import (
    COMPLETED,
    HANDED_OVER,
    Engine,
    EngineCall,
    EngineFastPath,
    first_thread,
    use_counter,
)
from pccl.runtime.data_plane.events import OpFastCompleted, OpHandedOver
from pccl.runtime.data_plane.op_request import OpRequest
from pccl.runtime.data_plane.op_spec import Buffers, OpSpec, Pair, RootLostError
from pccl.runtime.data_plane.pending import OpName, PendingOp
from pccl.types import Result

WAIT_MS = 20
"""Time that a caller waits on the fast path, where no signal ends its wait; a longer op becomes the session's."""
BYTES_MAX = 16 << 20
"""Larger ops take longer anyway."""


class _Tag:
    """A tag that has come through. The claim of its op in flight protects it."""

    __slots__ = ("is_suited", "request", "uses")

    def __init__(self, uses: int, request: OpRequest) -> None:
        self.uses = use_counter(uses)
        self.request = request
        """That of the last op: most often the next one is of the same kind."""
        self.is_suited = False
        """Whether ops of that kind may take the fast path."""


@dataclass(slots=True)
class _Opening:
    """An opening of the fast path, until it is closed."""

    numbers: list[int]
    """The opening's number in each engine thread."""
    start: SubmitOp
    tags: dict[OpName, _Tag] = field(default_factory=dict)
    """The tags whose uses are counted here."""
    pairs: dict[Pair, SubmitOp | None] = field(default_factory=dict)
    """The starts of point-to-point ops."""


class FastPath:
    """The fast path of a session. The trio thread opens and closes it; `run` is for all others."""

    def __init__(self, machine: Peer, engine: Engine) -> None:
        self._machine = machine
        self._engine = engine
        self._paths: list[EngineFastPath] = []
        """The ways into the engine threads."""
        self._opening: _Opening | None = None
        self._running: dict[int, PendingOp] = {}
        """Ops whose callers are on the way, and those of which the session has not heard yet."""

    def attach(self) -> None:
        """Make the ways into the engine threads, whose number is set by now. They are closed one after the other, which
        does not matter, since an op takes one of them."""
        self._paths = self._engine.new_fast_paths()

    @property
    def has_threads(self) -> bool:
        """Whether there are several engine threads: the events of one say nothing of a tag's ops in another."""
        return len(self._paths) > 1

    def is_as(self, start: SubmitOp | None) -> bool:
        """Return whether it is open for ops that start so; None: whether it is closed."""
        return self._opening is None if start is None else self._opening is not None and self._opening.start == start

    def open(self, start: SubmitOp) -> None:
        """Let ops through that start so."""
        assert self._opening is None, "what came through it is to be heard first"
        self._opening = _Opening([path.open() for path in self._paths], start)

    def close(self) -> bool:
        """Let no more ops through. Return whether it was open: then the engine's events tell of all that came
        through."""
        if self._opening is None:
            return False
        self._opening = None
        for path in self._paths:
            path.close()
        return True

    def in_ops_ns(self) -> int:
        """Return the time that the engine has spent in ops, as its `in_ops_us`. Any thread."""
        if len(self._paths) == 1:
            return self._paths[0].in_ops_ns(of_slices=False)
        slices = max((path.in_ops_ns(of_slices=True) for path in self._paths), default=0)
        return slices + sum(path.in_ops_ns(of_slices=False) for path in self._paths)

    def forget_uses(self, name: OpName) -> None:
        """Stop counting a tag: the machine is about to launch an op with it, and has heard of all before it."""
        if self._opening is not None:
            self._opening.tags.pop(name, None)

    def handed_over(self, event: OpHandedOver) -> PendingOp:
        """Return an op that was handed over."""
        return self._running.pop(event.op)

    def completed(self, event: OpFastCompleted) -> PendingOp:
        """Return an op that is over. Its caller may have been interrupted before it took note of the result."""
        op = self._running.pop(event.op)
        op.finish(_result(op, event.tx_bytes, event.rx_bytes))
        return op

    def has(self, op: PendingOp) -> bool:
        """Return whether an op may have been submitted here, and the session has not heard of it."""
        return op.op in self._running

    def drop(self, op: PendingOp) -> None:
        """Forget an op whose caller was interrupted before it was submitted."""
        self._running.pop(op.op, None)

    @property
    def running(self) -> list[PendingOp]:
        return list(self._running.values())

    def run(self, op: PendingOp, waits: bool = True) -> bool:
        """Run an op that nobody else knows yet, and whose tag is the caller's. True: it is committed and over, or the
        session's from now on; or, without `waits`, it is started. False: it has to be launched."""
        opening = self._opening
        spec = op.spec
        assert spec is not None
        if opening is None or spec.source is not None:
            return False
        start = opening.start if spec.pair is None else self._pair_start(opening, spec.pair)
        if start is None:
            return False
        try:
            buffers = op.place(spec, start.rank, start.world_size)
        except ValueError:
            return False  # as the session will report
        if buffers.count * spec.dtype.itemsize > BYTES_MAX:
            return False
        op.shared_tag = start.tag | op.tag
        tag = opening.tags.get(op.name)
        if tag is None:
            uses_before = self._machine.uses_of(op.shared_tag)
            if uses_before == 0:
                return False
            tag = opening.tags.setdefault(op.name, _Tag(uses_before, self._engine.new_request()))
        return self._suits(tag, start, op, spec, buffers) and self._run(opening, op, tag, waits)

    @staticmethod
    def _pair_start(opening: _Opening, pair: Pair) -> SubmitOp | None:
        """Return how a point-to-point op starts; None if the other peer has left."""
        if pair not in opening.pairs:
            opening.pairs[pair] = pair_start(opening.start, (pair.peer, pair.is_sender))
        return opening.pairs[pair]

    def _suits(self, tag: _Tag, start: SubmitOp, op: PendingOp, spec: OpSpec, buffers: Buffers) -> bool:
        """Fill the tag's request. Return whether the op fits one engine thread."""
        request = tag.request
        try:
            if request.refill(start, spec, buffers):
                threads = len(self._paths)
                tag.is_suited = threads == 1 or request.slices(threads) == 1
        except (ValueError, RootLostError):
            return False  # as the session will report
        request.rename(op.op, op.shared_tag)
        return tag.is_suited

    def _run(self, opening: _Opening, op: PendingOp, tag: _Tag, waits: bool) -> bool:
        start, request, uses = opening.start, tag.request, tag.uses
        threads = len(self._paths)
        thread = first_thread(op.shared_tag, uses[0], threads) if threads > 1 else 0
        op.epoch, op.ring, op.rank = start.epoch, start.ring, start.rank
        self._running[op.op] = op
        if not waits:
            return self._start(request, opening.numbers[thread], thread, op, uses)
        outcome, tx_bytes, rx_bytes = self._paths[thread].run(opening.numbers[thread], request, uses, WAIT_MS)
        if outcome == COMPLETED:
            op.finish(_result(op, tx_bytes, rx_bytes))
        elif outcome != HANDED_OVER:
            op.epoch = None
            self.drop(op)
            return False
        return True

    def _start(self, request: OpRequest, opening: int, thread: int, op: PendingOp, uses: Any) -> bool:
        call = self._paths[thread].start(opening, request, uses, WAIT_MS)
        if call is None:
            op.epoch = None
            self.drop(op)
            return False
        op.join = partial(_join, op, call)
        return True


def _join(op: PendingOp, call: EngineCall) -> None:
    """Wait for an op that was started, until it is over or the session's."""
    outcome, tx_bytes, rx_bytes = call.wait()
    if outcome == COMPLETED:
        op.finish(_result(op, tx_bytes, rx_bytes))
    else:
        op.join = None


def _result(op: PendingOp, tx_bytes: int, rx_bytes: int) -> OpResult:
    return OpResult(op.op, Result.SUCCESS, "", len(op.ring), tx_bytes, rx_bytes)
