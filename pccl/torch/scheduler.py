"""The order of a group's calls.

c10d matches a group's collectives by the order of each rank's calls, but pccl matches ops by tags. So every rank
distributes its calls over `QUEUES` queues, round robin. Each queue has one tag. There are few queues, because the first
op with a tag costs more than later ones, which take the fast path.

1. Call n of a group uses queue n mod QUEUES. A call that raises ArgumentError does not count.
2. A work starts when all earlier works in its queue are over, so a tag is never in flight twice.
3. A point-to-point call is not numbered. It uses the queue of its pair, direction and tag.
4. An op that starts in a smaller ring fails on all ranks (`op_specs.Fixed`), as do all calls after the first loss.
5. When a rank leaves on purpose, the new view aborts sends between other ranks; both sides repeat them (`may_repeat`).
   A recv from any rank fails once all others have left. After any other loss, sends and recvs fail.
6. All ranks must see the same loss, because they form the next group without the lost ranks. So a rank that
   left on purpose counts only if it was among the first to leave the run. A lost rank always counts (`_lost`).
7. A group fails if one of its works expires while queued, because the work blocks that queue on the other ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from pccl.errors import PCCLError
from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.torch.background import Deadlines, Progress
from pccl.torch.errors import FATAL, BackendError, Names
from pccl.torch.memory_use import UNUSED, Use, Uses
from pccl.torch.op_specs import FEWER_RANKS
from pccl.torch.transport import LEFT, LocalTransport, Op, Ring, Transport
from pccl.torch.work import PCCLWork
from pccl.types import Result

QUEUES = 8


class Turn:
    """The place in its queue of a point-to-point call that needs no work, because its caller only waits."""

    use = UNUSED

    def __init__(self, queue: Hashable) -> None:
        self.queue = queue
        self.places: deque[Any] = deque((self,))


class Scheduler:
    """The calls of one process group. Thread-safe."""

    def __init__(
        self,
        transport: Transport,
        names: Names,
        peers: Sequence[int] = (0,),
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        peers: The peer number of each rank.
        on_failure: Called in the progress thread after the first loss or timeout.
        """
        self.transport = transport
        self.check, self.cancel = transport.check, transport.cancel
        self._names = names
        self._peers = peers
        self._on_failure = on_failure
        self._ring = transport.ring
        self._is_local = isinstance(transport, LocalTransport)
        self._lock = threading.Lock()
        self.calls = 0
        """The number of collectives that this rank has called."""
        self.failed: BackendError | None = None
        """The error that all later calls raise."""
        self.first_failure: BackendError | None = None
        """The first failure of any call, including a timeout."""
        self._has_left = False
        self._queues: dict[Hashable, deque[Any]] = {}
        self._open: set[PCCLWork] = set()
        """Works that are not over."""
        self._uses: Uses[Any] = Uses()
        self._due: deque[PCCLWork] = deque()
        """Works that are about to start."""
        self.dropped: deque[PCCLWork] = deque(maxlen=64)
        """The last works on single elements that Python dropped. DDP's reducer asks such a work in the backward pass of
        `join`, but keeps only its C++ part alive."""
        self._starting = threading.local()
        self._progress = Progress(f"pccl {names.group}")
        self.later = self._progress.later
        self._deadlines = Deadlines(f"pccl deadlines of {names.group}", self._watched, self._expire)

    # Calls.

    def next_queue(self) -> int:
        """Count a collective and return its queue. Rule 1."""
        with self._lock:
            if self.failed is not None:
                raise self.failed
            queue = self.calls % QUEUES
            self.calls += 1
            return queue

    def enter(self, work: PCCLWork, after: Sequence[PCCLWork] = ()) -> None:
        """Append a work to its queue. The work also waits for the works in `after`."""
        with self._lock:
            self._open.add(work)
            if work.use is not UNUSED:
                self._uses.add(work, work.use)
            work.blockers = len(after)
            queue = self._queues.get(work.queue)
            if queue is None:
                self._queues[work.queue] = deque((work,))
            else:
                queue.append(work)
                work.blockers += 1
            work.is_first = not work.blockers

    def takes(self, turn: Turn) -> bool:
        """Let a call occupy its queue until `finished`. Return False if the queue is not empty."""
        with self._lock:
            return self._queues.setdefault(turn.queue, turn.places) is turn.places

    def go(self, work: PCCLWork, waits: bool, after: Sequence[PCCLWork] = ()) -> None:
        """Start an entered work if it has no blockers. `waits`: its caller only waits for it."""
        if work.is_first and (waits or self._is_local):
            work.advance(True)
            return
        self.watch(work)
        if work.is_first:
            work.advance(False)
        for each in after:
            each.when_over(lambda: self._unblock(work))

    def watch(self, work: PCCLWork) -> None:
        """Enforce the deadline of a work, whether or not a thread waits for it."""
        work.is_watched = True
        self._deadlines.watch(work)

    def finished(self, work: PCCLWork | Turn) -> None:
        """Remove a work that is over, and start the next one in its queue."""
        following = None
        with self._lock:
            self._open.discard(work)
            if work.use is not UNUSED:
                self._uses.remove(work)
            queue = self._queues.get(work.queue)
            if queue is None or work not in queue:
                return
            was_first = queue[0] is work
            queue.remove(work)
            if not queue:
                del self._queues[work.queue]
            elif was_first:
                following = queue[0]
        if following is not None:
            self._unblock(following)

    def open_collectives(self) -> list[PCCLWork]:
        with self._lock:
            return [work for work in self._open if isinstance(work.queue, int)]

    def is_idle(self) -> bool:
        """Return whether all calls are over."""
        return not self._open

    def users(self, use: Use) -> list[PCCLWork]:
        """Return the open collectives that conflict with a use of memory."""
        with self._lock:
            return self._uses.disturbed_by(use)

    def stop(self) -> None:
        """End the group's threads after their current work."""
        self._deadlines.stop()
        self._progress.stop()

    def _watched(self) -> list[PCCLWork]:
        with self._lock:
            return [work for work in self._open if work.is_watched]

    def _expire(self, works: Sequence[PCCLWork]) -> None:
        def one_by_one() -> None:  # when one ends, the next in its queue starts and can then be aborted on all ranks
            for work in works:
                work.expire()

        self.later(one_by_one)

    def _unblock(self, work: PCCLWork) -> None:
        """Remove one blocker, and start the work if it was the last. Works start in a loop, to avoid recursion."""
        with self._lock:
            work.blockers -= 1
            if work.blockers:
                return
        self._due.append(work)
        if getattr(self._starting, "is_here", False):
            return  # a frame further up in this thread's stack starts it
        self._starting.is_here = True
        try:
            while self._due:
                try:
                    due = self._due.popleft()
                except IndexError:
                    break
                due.advance(False)
        finally:
            self._starting.is_here = False

    # Ops.

    def run(self, spec: OpSpec, title: str, timeout_s: float) -> Op:
        """Execute an op and wait for it. Raises PCCLError."""
        if self.transport.present_ring() is not self._ring:
            self._require_membership(title, spec)
        return self.transport.run(spec, title, timeout_s)

    def launch(self, spec: OpSpec, title: str, started: Callable[[Op], None], over: Callable[[], None]) -> None:
        """Launch an op; see `Transport.launch`."""
        self._require_membership(title, spec)
        self.transport.launch(spec, title, started, over)

    # Failures.

    def fail(self, error: BackendError) -> None:
        """Make all later calls raise `error`."""
        with self._lock:
            self.failed = self.failed or error

    def leave(self, error: BackendError) -> None:
        """Make all later calls and those in flight raise `error`, because this rank leaves the group."""
        with self._lock:
            self.failed = self.first_failure = error
            self._has_left = True

    def current_failure(self) -> BackendError | None:
        """Return the first failure, including a loss that no call has seen yet."""
        if self.first_failure is None:
            try:
                self.transport.require_alive()
                self._require_membership("membership")
            except PCCLError as error:
                self.failure("membership", error)
        return self.first_failure

    def failure(self, title: str, error: PCCLError, spec: OpSpec | None = None) -> BackendError:
        """Return the exception for a call whose op failed with `error`, and record the consequences for the group."""
        if self._has_left and self.failed is not None:
            return self.failed
        ring = self.transport.present_ring()
        lost = [] if ring is None else self._lost(ring, spec)
        if lost and FEWER_RANKS in error.message:
            error = PCCLError(Result.RANK_CONNECTION_LOST, title, self._why_lost(lost))
        is_fatal = error.result in FATAL
        made = self._names.failure(title, error, lost if is_fatal else ())
        if is_fatal:
            self.fail(made)
        if is_fatal or error.result is Result.TIMEOUT:
            with self._lock:
                is_first, self.first_failure = self.first_failure is None, self.first_failure or made
            if is_first:
                self.later(self._on_failure)
        return made

    def may_repeat(self, spec: OpSpec, error: PCCLError) -> bool:
        """Return whether to launch an aborted op again. Rule 5."""
        if error.result is not Result.RANK_CONNECTION_LOST or f"({LEFT}" not in error.message or self._has_left:
            return False
        return self._is_undisturbed(spec)

    def require_pair(self, other: int | None) -> None:
        """Raise the group's failure unless ops with this rank, or with any rank, are still possible."""
        if self.failed is None:
            return
        is_lost = self.failed.result is Result.RANK_CONNECTION_LOST
        may_go_on = self._ring_unless_lost() is not None if other is None else self.is_there(other)
        if self._has_left or not is_lost or not may_go_on:
            raise self.failed

    def is_there(self, rank: int) -> bool:
        """Return whether a rank is in the run and all missing ranks left on purpose."""
        return self._peers[rank] in (self._ring_unless_lost() or ())

    def has_left(self, rank: int) -> bool:
        """Return whether a rank, and every other missing rank, left on purpose."""
        ring = self._ring_unless_lost()
        return ring is not None and self._peers[rank] not in ring

    def _ring_unless_lost(self) -> Ring | None:
        """Return the peers in the run, or None if a peer is missing that did not leave on purpose."""
        is_lost = not all(reason.startswith(LEFT) for reason in self.transport.losses().values())
        return None if is_lost else self.transport.present_ring()

    def _is_undisturbed(self, spec: OpSpec) -> bool:
        return spec.pair is not None and spec.pair.peer in (self._ring_unless_lost() or ())

    def _require_membership(self, title: str, spec: OpSpec | None = None) -> None:
        ring = self.transport.present_ring()
        if ring is self._ring or ring is None or ring == self._ring:
            return
        if spec is None or not self._is_undisturbed(spec):
            raise PCCLError(Result.RANK_CONNECTION_LOST, title, self._why_lost(self._lost(ring, spec)))

    def _lost(self, ring: Ring, spec: OpSpec | None) -> list[int]:
        """Return the ranks that an op has lost; `ring` holds the remaining peers. Rule 6."""
        epochs = {peer: self.transport.left_in(peer) for peer in self._peers if peer not in ring}
        first = min(epochs.values(), default=0)
        partner = None if spec is None or spec.pair is None else spec.pair.peer
        losses = self.transport.losses()

        def counts(peer: int) -> bool:
            return epochs[peer] == first or peer == partner or not losses.get(peer, "").startswith(LEFT)

        return [rank for rank in self._names.lost(ring) if counts(self._peers[rank])]

    def departures(self, title: str) -> PCCLError:
        """Return the error of a call for which too few ranks are left."""
        missing = self._names.lost(self.transport.present_ring() or ())
        return PCCLError(Result.RANK_CONNECTION_LOST, title, self._why_lost(missing))

    def _why_lost(self, ranks: Sequence[int]) -> str:
        losses = self.transport.losses()
        return ", ".join(f"{self._names.of(rank)}: {losses.get(self._peers[rank], 'lost')}" for rank in ranks)
