"""Small ops that the caller's thread runs itself, without the trio thread.

A launched op is handed over four times: from the caller to the trio thread, to the engine, back to the trio thread, and
back to the caller. Small ops use the engine's fast path instead (native/src/fast_path.h): the caller submits the op and
waits until all participants are done, and the session is notified later. Rules:

1. The session opens the fast path while its machine has a `plain_start`. Before it passes the machine any input that
   affects ops, such as a message from the master, it closes the fast path and reports all ops that used it to the
   machine. So the machine decides as if it had launched each of them itself.
2. The fast path counts a tag's uses from its first op with that tag until the path is closed or the session launches
   an op with the tag (`forget_uses`). At all other times the machine counts them. Two threads never count the
   same tag, because ops in flight have different tags. Point-to-point ops have separate tags for each pair and
   direction.
3. The machine launches a tag's first op in an epoch. When it launches a later one, ops on the fast path are already
   counted (see the order of events in `session.ops`).
4. A caller may also start an op and wait later, or never (`start`). If a caller is waiting when the engine completes
   the op, the caller ends it; otherwise the session is notified and ends it. To give an op up, a caller asks the
   session, which first closes the path; if the op is still not over, the session owns it.
5. A signal handler may raise at any moment in the caller's thread. Before the single call that submits it, the op does
   not exist; afterwards, it is reported to the session like any other op.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pccl.protocol.peer.effects import SubmitOp
from pccl.protocol.peer.machine import Peer
from pccl.protocol.peer.ops import pair_start
from pccl.runtime.data_plane.engine import (
    COMPLETED,
    HANDED_OVER,
    Engine,
    EngineFastPath,
    first_thread,
    use_counter,
)
from pccl.runtime.data_plane.events import OpFastCompleted, OpHandedOver
from pccl.runtime.data_plane.op_request import OpRequest
from pccl.runtime.data_plane.op_spec import Buffers, Pair, RootLostError
from pccl.runtime.data_plane.pending import OpName, PendingOp

WAIT_MS = 20
"""Longest wait on the fast path, during which no signal is handled; a longer op is handed over to the session."""
BYTES_MAX = 16 << 20
"""Larger ops do not use the fast path, because their hand-overs cost relatively little."""
COUNT_SAFE = BYTES_MAX // 8
"""This many elements of any type fit into BYTES_MAX."""


class _Tag:
    """A tag with an op on the fast path. The op in flight has claimed the tag, so only the op's caller uses this
    object."""

    __slots__ = ("is_suited", "request", "uses")

    def __init__(self, uses: int, request: OpRequest) -> None:
        self.uses = use_counter(uses)
        self.request = request
        """The last op's request, because the next op is usually of the same kind."""
        self.is_suited = False
        """Whether ops of this kind may use the fast path."""


@dataclass(slots=True)
class _Opening:
    """One period during which the fast path is open."""

    numbers: list[int]
    """The opening's number in each engine thread."""
    start: SubmitOp
    tags: dict[OpName, _Tag] = field(default_factory=dict)
    """The tags whose uses are counted here."""
    pairs: dict[Pair, SubmitOp | None] = field(default_factory=dict)
    """The starts of point-to-point ops."""


class FastPath:
    """A session's fast path. The trio thread opens and closes it; `run` is for all other threads."""

    def __init__(self, machine: Peer, engine: Engine) -> None:
        self._machine = machine
        self._engine = engine
        self.has_threads = False
        """Whether there are several engine threads; events of different threads are not ordered."""
        self._paths: list[EngineFastPath] = []
        """The engine threads' fast paths."""
        self.open_with: SubmitOp | None = None
        """The start that ops use while the path is open."""
        self._opening: _Opening | None = None
        self._running: dict[int, PendingOp] = {}
        """Ops on the fast path, and ops whose events the session has not handled yet."""

    def attach(self) -> None:
        """Create the fast paths. Call this after the number of engine threads is set."""
        self._paths = self._engine.new_fast_paths()
        self.has_threads = len(self._paths) > 1

    def open(self, start: SubmitOp) -> None:
        """Start accepting ops with this start."""
        assert self._opening is None, "the last opening's events must be handled first"
        self._opening = _Opening([path.open() for path in self._paths], start)
        self.open_with = start

    def close(self) -> bool:
        """Stop accepting ops. Return whether the path was open; if so, the engine's events report all its ops."""
        if self._opening is None:
            return False
        self._opening = self.open_with = None
        for path in self._paths:
            path.close()
        return True

    def in_ops_ns(self) -> int:
        """Return the time that the engine has spent in ops, like its `in_ops_us`. Thread-safe."""
        if len(self._paths) == 1:
            return self._paths[0].in_ops_ns(of_slices=False)
        slices = max((path.in_ops_ns(of_slices=True) for path in self._paths), default=0)
        return slices + sum(path.in_ops_ns(of_slices=False) for path in self._paths)

    def forget_uses(self, name: OpName) -> None:
        """Stop counting a tag: the machine is about to launch an op with it, and knows all earlier ones."""
        if self._opening is not None:
            self._opening.tags.pop(name, None)

    def handed_over(self, event: OpHandedOver) -> PendingOp:
        """Remove and return an op that was handed over."""
        return self._running.pop(event.op)

    def completed(self, event: OpFastCompleted) -> PendingOp:
        """Finish and return a completed op. A signal may have interrupted its caller before it took the result."""
        op = self._running.pop(event.op)
        op.succeed(event.tx_bytes, event.rx_bytes)
        return op

    def has(self, op: PendingOp) -> bool:
        """Return whether an op may have been submitted here and the session has not handled its events yet."""
        return op.op in self._running

    def drop(self, op: PendingOp) -> None:
        """Forget an op whose caller was interrupted before it was submitted."""
        self._running.pop(op.op, None)

    @property
    def running(self) -> list[PendingOp]:
        return list(self._running.values())

    def run(self, op: PendingOp, waits: bool = True) -> bool:
        """Run a new op whose tag the caller has claimed. Return False if the session must launch the op. Otherwise the
        op is over, belongs to the session or, without `waits`, has been started."""
        opening, spec = self._opening, op.spec
        assert spec is not None
        if opening is None or spec.source is not None or spec.residuals is not None:
            return False
        start = opening.start if spec.pair is None else self._pair_start(opening, spec.pair)
        if start is None:
            return False
        buffers = spec.buffers
        if type(buffers) is not Buffers:
            try:
                buffers = buffers.place(start.rank, start.world_size)  # type: ignore[union-attr]
            except ValueError:
                return False  # the session reports it
        if buffers.count > COUNT_SAFE and buffers.count * spec.dtype.itemsize > BYTES_MAX:
            return False
        op.shared_tag = start.tag | op.tag
        tag = opening.tags.get(op.name)
        if tag is None:
            uses_before = self._machine.uses_of(op.shared_tag)
            if uses_before == 0:
                return False
            tag = opening.tags.setdefault(op.name, _Tag(uses_before, self._engine.new_request()))
        request, threads = tag.request, len(self._paths)
        try:
            if request.refill(start, spec, buffers, op.op, op.shared_tag):
                tag.is_suited = threads == 1 or request.slices(threads) == 1
        except (ValueError, RootLostError):
            return False  # the session reports it
        if not tag.is_suited:
            return False
        thread = first_thread(op.shared_tag, tag.uses[0], threads) if threads > 1 else 0
        group = opening.start  # `start` has the ranks of a pair
        op.epoch, op.ring, op.rank = group.epoch, group.ring, group.rank
        self._running[op.op] = op
        path, number = self._paths[thread], opening.numbers[thread]
        if waits:
            outcome, tx_bytes, rx_bytes = path.run(number, request, tag.uses, WAIT_MS)
            if outcome == COMPLETED:
                op.succeed(tx_bytes, rx_bytes)
                return True
            if outcome == HANDED_OVER:
                return True
        else:
            op.join = path.start(number, request, tag.uses, WAIT_MS)
            if op.join is not None:
                return True
        op.epoch = None
        self.drop(op)
        return False

    @staticmethod
    def _pair_start(opening: _Opening, pair: Pair) -> SubmitOp | None:
        """Return the start of a point-to-point op; None if the other peer has left."""
        if pair not in opening.pairs:
            opening.pairs[pair] = pair_start(opening.start, (pair.peer, pair.is_sender))
        return opening.pairs[pair]
