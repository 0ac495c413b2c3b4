"""Small ops that the caller's thread runs by itself, past the trio thread.

Theory of operation. An op that the session launches takes the way caller, trio thread, engine, trio thread, caller; of
64 KiB between two processes of one machine that is three quarters of its time. Where nothing is to be decided, a caller
that would do nothing but wait goes on the engine's fast path instead (native/src/fast_path.h): it submits the op, waits
for the peers' agreement, and has its result; the session hears of it later.

The session opens the gate while its machine has a `plain_start`, and *takes over* before it tells the machine anything
that bears on ops, such as a message of the master: it closes the gate, which is a cut, and tells the machine what has
come of the ops on its far side. So the machine decides as if each of them had been launched by it.

A use of a tag is counted in one place at a time: by the gate from the first op with that tag that comes through it
until the gate is closed or the session launches one (`forget_uses`), otherwise by the machine. No two threads count the
same tag, for no two ops in flight have the same one, but for ops of two, which have tags of their own and never come
here. A tag's first op in an epoch is the machine's. What is launched after an op that came through the gate finds
that one counted: see the order in which `engine_bridge` hears of both.

Everything is as it was at any moment at which a signal handler may raise in the caller's thread: before the one call
that submits, the op is not there, after it the session hears of it like of any other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pccl.protocol.peer import OpResult, Peer, SubmitOp
from pccl.runtime.data_plane.engine import Buffers, OpRan, OpRequest, OpSpec, OpStarted
from pccl.runtime.data_plane.engine_threads import EngineThreads, first_thread
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.data_plane.staged_ops import piece_elements
from pccl.runtime.extension import ffi, lib
from pccl.types import Result

WAIT_MS = 5
"""So long a caller waits in the gate, where no signal ends its wait; an op that takes longer becomes the session's."""
BYTES_MAX = 8 << 20
"""Larger ops take longer anyway."""


@dataclass(slots=True)
class _Opening:
    """From one opening to the next."""

    numbers: list[int]
    """By lane."""
    start: SubmitOp
    uses: dict[int, Any] = field(default_factory=dict)
    """By tag a `uint64_t *`."""


class FastPath:
    """Of one session. The trio thread opens and closes it; `run` is for all others."""

    def __init__(self, machine: Peer, engine: EngineThreads) -> None:
        self._machine = machine
        self._engine = engine
        self._natives: list[Any] = []
        """By lane."""
        self._opening: _Opening | None = None
        self._running: dict[int, PendingOp] = {}
        """Those whose callers are here, and those that the session has not heard of yet."""
        self._requests: deque[OpRequest] = deque()

    def attach(self) -> None:
        """The engine has its lanes, each with a gate of its own. An op comes through one of them: so that it does not
        matter that they are closed one after the other."""
        self._natives = self._engine.new_gates()

    @property
    def has_lanes(self) -> bool:
        """Several: one that a tag's ops go through says nothing of those that went through another."""
        return len(self._natives) > 1

    def is_as(self, start: SubmitOp | None) -> bool:
        """Whether it is open for ops that start so; None: whether it is closed."""
        return self._opening is None if start is None else self._opening is not None and self._opening.start == start

    def open(self, start: SubmitOp) -> None:
        assert self._opening is None, "what came through it is to be heard first"
        self._opening = _Opening([lib.pccl_fast_path_open(native) for native in self._natives], start)

    def close(self) -> bool:
        """Whether it was open: then the engine's events tell of all that has come through it."""
        if self._opening is None:
            return False
        self._opening = None
        for native in self._natives:
            lib.pccl_fast_path_close(native)
        return True

    def forget_uses(self, tag: int) -> None:
        """The machine is about to launch an op with this tag, and has heard of all before it."""
        if self._opening is not None:
            self._opening.uses.pop(tag, None)

    def started(self, event: OpStarted) -> PendingOp:
        return self._running.pop(event.op)

    def ran(self, event: OpRan) -> PendingOp:
        """Its caller may have been interrupted: it is over now."""
        op = self._running.pop(event.op)
        op.finish(_result(op, event.tx_bytes, event.rx_bytes))
        return op

    def has(self, op: PendingOp) -> bool:
        """Whether it may have been submitted, and the session has not heard of it."""
        return op.op in self._running

    def drop(self, op: PendingOp) -> None:
        """Its caller was interrupted before it was submitted."""
        self._running.pop(op.op, None)

    @property
    def running(self) -> list[PendingOp]:
        return list(self._running.values())

    def run(self, op: PendingOp) -> bool:
        """Runs an op whose tag is the caller's now, and which nobody else can know. True: it is committed and over, or
        the session's from now on. False: it has to be launched."""
        opening = self._opening
        spec = op.spec
        assert spec is not None
        if opening is None or spec.pair is not None or spec.feed is not None or spec.root is not None:
            return False
        uses = opening.uses.get(op.tag)
        if uses is None:
            uses_before = self._machine.uses_of(op.tag)
            if uses_before == 0:
                return False
            uses = opening.uses.setdefault(op.tag, ffi.new("uint64_t *", uses_before))
        try:
            request = self._requests.pop()
        except IndexError:
            request = self._engine.new_request()
        has_run = self._suits(request, opening.start, op, spec) and self._run(request, opening, op, uses)
        self._requests.append(request)
        return has_run

    def _suits(self, request: OpRequest, start: SubmitOp, op: PendingOp, spec: OpSpec) -> bool:
        """Whether it is a small op, in one lane, and none that others may have in pieces. Fills the request."""
        try:
            is_placed = isinstance(spec.buffers, Buffers)
            request.fill(start, spec if is_placed else op.placed(spec, start.rank, start.world_size))
        except ValueError:
            return False  # as the session will say
        request.native.op, request.native.key.tag = op.op, op.tag
        count: int = request.native.shape.count
        item_bytes = spec.dtype.itemsize
        if count * item_bytes > BYTES_MAX or count > (piece_elements(item_bytes) or count):
            return False
        lanes = len(self._natives)
        return lanes == 1 or request.slices(lanes) == 1

    def _run(self, request: OpRequest, opening: _Opening, op: PendingOp, uses: Any) -> bool:
        start = opening.start
        lane = first_thread(op.tag, uses[0], len(self._natives))
        op.epoch, op.ring, op.rank = start.epoch, start.ring, start.rank
        result = ffi.new("pccl_fast_path_result *")
        self._running[op.op] = op
        outcome = lib.pccl_fast_path_run(
            self._natives[lane], opening.numbers[lane], request.native, uses, WAIT_MS, result
        )
        if outcome == lib.PCCL_FAST_PATH_COMPLETED:
            op.finish(_result(op, result.tx_bytes, result.rx_bytes))
        elif outcome != lib.PCCL_FAST_PATH_HANDED_OVER:
            op.epoch = None
            self.drop(op)
            return False
        return True


def _result(op: PendingOp, tx_bytes: int, rx_bytes: int) -> OpResult:
    return OpResult(op.op, Result.SUCCESS, "", len(op.ring), tx_bytes, rx_bytes)
