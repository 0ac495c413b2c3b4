"""The order of a group's calls, and the way from a call to the communicator.

c10d matches the collectives of a group by the order in which each rank calls them; pccl matches ops by tags. So the
calls are dealt out to a fixed number of *lanes* in turn, on every rank alike, and each lane is a tag:

    1  The n-th call of a group takes lane n mod LANES. A call is validated before it counts, so that one that raises
       ArgumentError has not been made.
    2  A work runs when all earlier ones of its lane are over; until then it waits in a queue. So a tag is never in
       flight twice, calls of one lane meet in order, and calls of different lanes overlap.
    3  A point-to-point call has a lane of its own for each pair, direction and tag, and counts no number.
    4  The membership of a process group is fixed. An op that starts in a smaller ring fails on all ranks
       (`membership.Fixed`), and so do all calls from the first loss on (`failed`).
    5  A rank that leaves on purpose, because it has nothing left to do, must not disturb a send and its recv of two
       others. The change of view aborts them for both, and both repeat them (`may_repeat`). Where a rank was lost
       otherwise, they fail: whoever is waited for may have met that loss, and come no more.
    6  All ranks must hear of the same loss, for they make the next group without those who are lost; and whoever has
       heard of it leaves this one, perhaps before others have looked. So of those who left on purpose only the first
       count, besides all who were lost otherwise (`_lost`).
    7  A work that is never launched leaves the others of its lane waiting for this rank, so a group in which one
       expires in the queue has failed.

A small number of lanes is right: the first op of a tag is dearer than later ones, which may take the fast path.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence

from pccl._session_holder import SessionErrors
from pccl.communicator import Communicator
from pccl.errors import PCCLError
from pccl.handle import CANCEL_GRACE_S, delivered, gave_up, require_outcome
from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.runtime.data_plane.pending import PendingOp
from pccl.torch.deadlines import Deadlines
from pccl.torch.errors import FATAL, BackendError, Names
from pccl.torch.memory_use import UNUSED, Use, Uses
from pccl.torch.progress import Progress
from pccl.torch.work import PCCLWork, Script
from pccl.types import Result

LANES = 8
LEAVING = "left"
"""How the reason begins why a peer that has left on purpose is no more in the run."""
LEFT = f"({LEAVING}"


class DirectCall:
    """A call that its thread makes by itself, without a work."""

    __slots__ = ("_callbacks", "is_over", "lane")
    is_watched = False

    def __init__(self, lane: Hashable) -> None:
        """Make one for `Scheduler.claim`."""
        self.lane = lane
        self.is_over = False
        self._callbacks: list[Callable[[], None]] = []

    def when_over(self, callback: Callable[[], None]) -> None:
        """Have `callback` called once when the call is over, or now."""
        self._callbacks.append(callback)
        if self.is_over:
            self.end()

    def end(self) -> None:
        """Note that the call is over."""
        self.is_over = True
        while self._callbacks:
            try:
                callback = self._callbacks.pop()
            except IndexError:
                return  # another thread was faster
            callback()


class Scheduler:
    """The calls of one process group. Thread-safe."""

    def __init__(
        self,
        communicator: Communicator,
        peers: Sequence[int],
        ring: tuple[int, ...],
        names: Names,
        in_trouble: Callable[[], None] = lambda: None,
    ) -> None:
        """`peers` has the peer number of each rank, and `ring` their order in the run when they met. `in_trouble` is
        called in the progress thread when a rank was lost or a call has timed out for the first time."""
        self._in_trouble = in_trouble
        self._trouble: BackendError | None = None
        self._has_left = False
        self._communicator = communicator
        self._names = names
        self._ring = ring
        self._peers = peers
        self._lock = threading.Lock()
        self._calls = 0
        self._lanes: dict[Hashable, deque[PCCLWork | DirectCall]] = {}
        self._open: set[PCCLWork | DirectCall] = set()
        """The works that are not over, and the threads that make collectives by themselves."""
        self._uses: Uses[PCCLWork] = Uses()
        self._due: deque[PCCLWork] = deque()
        """The works whose turn has come, and which somebody is about to start."""
        self._starting = threading.local()
        self._failure: BackendError | None = None
        self._progress = Progress(f"pccl {names.group}")
        self._deadlines = Deadlines(f"pccl deadlines of {names.group}", self._watched, self._expire)

    # Calls.

    def next_lane(self) -> int:
        """Return the lane of the next call. Rule 1."""
        with self._lock:
            self._require_alive()
            lane = self._calls % LANES
            self._calls += 1
            return lane

    @property
    def calls(self) -> int:
        """The number of collectives that this rank has called."""
        return self._calls

    def enter(self, work: PCCLWork, after: Sequence[PCCLWork | DirectCall] = ()) -> None:
        """Put a work into its lane, where it waits for the earlier ones and for those of `after`."""
        with self._lock:
            lane = self._lanes.get(work.lane)
            self._open.add(work)
            if work.use is not UNUSED:
                self._uses.add(work, work.use)
            work.blockers = len(after) + 1
            if lane is None:
                self._lanes[work.lane] = deque((work,))
            else:
                lane.append(work)
                work.blockers += 1

    def go(self, work: PCCLWork, waits: bool, after: Sequence[PCCLWork | DirectCall] = ()) -> None:
        """Run a work that has entered, or start it if its caller does not wait. Others start in their turn."""
        for each in after:
            each.when_over(lambda: self._unblock(work))
        is_free = self._is_free(work)
        if is_free and waits:
            work.run()
            return
        self.watch(work)
        if is_free:
            work.start()

    # Calls that a thread makes by itself. A work, which others could ask for, would take longer than a small op.

    def claim(self, call: DirectCall, is_collective: bool = False) -> bool:
        """Let a call be the first in its lane, until `leave_lane`. False if there are calls before it.

        A signal handler may raise at any moment, so whoever calls this leaves the lane in a `finally` around it.
        """
        with self._lock:
            if call.lane in self._lanes:
                return False
            self._lanes[call.lane] = deque((call,))
            if is_collective:
                self._open.add(call)
        return True

    def leave_lane(self, who: PCCLWork | DirectCall) -> None:
        """Let the next call of a lane begin, if this one is in it."""
        with self._lock:
            self._open.discard(who)
            lane = self._lanes.get(who.lane)
            if lane is None or who not in lane:
                return
            was_first = lane[0] is who
            lane.remove(who)
            if not lane:
                del self._lanes[who.lane]
            following = lane[0] if was_first and lane else None
        if isinstance(who, DirectCall):
            who.end()
        if isinstance(following, PCCLWork):
            self._unblock(following)

    def run_op(self, spec: OpSpec, title: str, timeout_s: float) -> None:
        """Run the only op of a call in this thread, which has claimed its lane. BackendError as the call failed."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                self.outcome(self.run(spec, title, timeout_s), title)
                return
            except PCCLError as error:
                if not self.may_repeat((spec,), error):
                    raise self.failure(title, error, (spec,)) from None
                timeout_s = max(0.0, end_s - time.monotonic())

    def run_script(self, script: Script, title: str, timeout_s: float) -> None:
        """Go through the script of a collective in this thread, which has claimed its lane. BackendError as the call
        failed."""
        end_s = time.monotonic() + timeout_s
        try:
            batch = next(script)
            while True:
                if len(batch) == 1:
                    ops = [self.run(batch[0], title, max(0.0, end_s - time.monotonic()))]
                else:
                    ops = PCCLWork(self, title, None, None, end_s - time.monotonic(), True).run_together(batch)
                for op in ops:
                    self.outcome(op, title)
                batch = script.send(ops)
        except StopIteration:
            return
        except PCCLError as error:
            raise self.failure(title, error) from None
        finally:
            script.close()

    def watch(self, work: PCCLWork) -> None:
        """Have a work given up when its time has passed, whether or not somebody waits for it."""
        work.is_watched = True
        self._deadlines.watch(work)

    def _watched(self) -> list[PCCLWork]:
        with self._lock:
            return [work for work in self._open if isinstance(work, PCCLWork) and work.is_watched]

    def _expire(self, works: Sequence[PCCLWork]) -> None:
        def one_by_one() -> None:  # the end of one starts the next of its lane, which can then be aborted everywhere
            for work in works:
                work.expire()

        self.later(one_by_one)

    def _is_free(self, work: PCCLWork) -> bool:
        """Take one blocker from a work. Return whether that was the last one."""
        with self._lock:
            work.blockers -= 1
            return work.blockers == 0

    def _unblock(self, work: PCCLWork) -> None:
        if self._is_free(work):
            self._due.append(work)
            self._start_due()

    def open_collectives(self) -> list[PCCLWork | DirectCall]:
        """Return the collectives that are not over."""
        with self._lock:
            return [work for work in self._open if isinstance(work.lane, int)]

    def is_idle(self) -> bool:
        """Return whether all calls are over."""
        return not self._open

    def users(self, use: Use) -> list[PCCLWork]:
        """Return the collectives that are not over and must be, before memory is used in this way."""
        with self._lock:
            return self._uses.disturbed_by(use)

    def fail(self, error: BackendError) -> None:
        """Let all later calls raise `error`."""
        with self._lock:
            self._failure = self._failure or error

    def leave(self, error: BackendError) -> None:
        """Let all later calls, and what is in flight, raise `error`: this rank leaves the group."""
        with self._lock:
            self._failure = self._trouble = error
            self._has_left = True

    def trouble(self) -> BackendError | None:
        """Return the first failure of the group, be it a timeout; None: there is none. A loss is known as soon as the
        others go on without the rank, also while nothing is in flight."""
        if self._trouble is None:
            try:
                self._communicator._inner.view("membership")
                self._require_membership("membership")
            except PCCLError as error:
                self.failure("membership", error)
        return self._trouble

    @property
    def heard(self) -> BackendError | None:
        """The first failure that a call has met."""
        return self._trouble

    @property
    def failed(self) -> BackendError | None:
        """The reason why the group can do nothing more, if it is so."""
        return self._failure

    def stop(self) -> None:
        """End the group's threads, once nothing is left for them to do."""
        self._deadlines.stop()
        self._progress.stop()

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise self._failure

    # What works need: `work.Driver`.

    def run(self, spec: OpSpec, title: str, timeout_s: float) -> PendingOp:
        self._require_membership(title, spec)
        return self._communicator._run(spec, timeout_s, title)

    def may_repeat(self, batch: Sequence[OpSpec], error: PCCLError) -> bool:
        """Return whether ops that were aborted are to be launched again. Rule 5."""
        if error.result is not Result.RANK_CONNECTION_LOST or LEFT not in error.message or self._has_left:
            return False
        return all(self._is_undisturbed(spec) for spec in batch)

    def launch(self, spec: OpSpec, title: str, over: Callable[[], None], ops: list[PendingOp]) -> None:
        self._require_membership(title, spec)
        session = self._communicator._inner.session(title)
        op = session.ops.new(spec)
        ops.append(op)
        with SessionErrors(title):
            if spec.pair is not None:
                session.ops.start(op)
            else:
                session.ops.launch(op)
        op.when_over(over)

    def outcome(self, op: PendingOp, title: str) -> None:
        delivered(op, title)
        if op.ring != self._ring and op.name[1] is None:
            text = f"only the peers {list(op.ring)} took part: the others are lost"
            raise PCCLError(Result.RANK_CONNECTION_LOST, title, text)

    def give_up(self, ops: Sequence[PendingOp], title: str, timeout_s: float) -> None:
        session = self._communicator._inner.session(title)
        given_up = [op for op in ops if not op.is_over]
        for op in given_up:
            session.ops.cancel(op, Result.TIMEOUT, gave_up(session, timeout_s, op))
        for op in given_up:
            op.wait(CANCEL_GRACE_S)
            op.reclaim()
        require_outcome(session, given_up, title)

    def failure(self, title: str, error: PCCLError, specs: Sequence[OpSpec] = ()) -> BackendError:
        if self._has_left and self._failure is not None:
            return self._failure
        ring = self._present_ring()
        lost = [] if ring is None else self._lost(ring, specs)
        if lost and error.result is Result.INVALID_ARGUMENT:  # `Fixed` has refused to go on with those who are left
            error = PCCLError(Result.RANK_CONNECTION_LOST, title, self._why_lost(lost))
        is_fatal = error.result in FATAL
        made = self._names.failure(title, error, lost if is_fatal else ())
        if is_fatal:
            self.fail(made)
        if error.result in FATAL or error.result is Result.TIMEOUT:
            with self._lock:
                is_first, self._trouble = self._trouble is None, self._trouble or made
            if is_first:
                self._progress.later(self._in_trouble)
        return made

    def later(self, call: Callable[[], None]) -> None:
        self._progress.later(call)

    def finished(self, work: PCCLWork) -> None:
        with self._lock:
            self._uses.remove(work)
        self.leave_lane(work)

    def _start_due(self) -> None:
        """Start the works whose turn has come: one after the other, though each may be over at once."""
        if getattr(self._starting, "is_here", False):
            return  # further up in this thread, which goes on with them
        self._starting.is_here = True
        try:
            while self._due:
                try:
                    work = self._due.popleft()
                except IndexError:
                    break
                work.start()
        finally:
            self._starting.is_here = False

    # Membership.

    def _present_ring(self) -> tuple[int, ...] | None:
        session = self._communicator._inner._session
        return session.view.ring if session is not None and session.view is not None else None

    def require_pair(self, other: int) -> None:
        """Raise the group's failure unless ops with this rank are possible all the same."""
        if self._failure is None:
            return
        peer = self._peers[other]
        if self._has_left or self._failure.result is not Result.RANK_CONNECTION_LOST or not self._is_there(peer):
            raise self._failure

    def _is_there(self, peer: int) -> bool:
        """Whether a peer is in the run, and all who are not have left on purpose."""
        ring = self._present_ring()
        reasons = self._communicator.losses.values()
        return ring is not None and peer in ring and all(reason.startswith(LEAVING) for reason in reasons)

    def _is_undisturbed(self, spec: OpSpec) -> bool:
        return spec.pair is not None and self._is_there(spec.pair.peer)

    def _require_membership(self, title: str, spec: OpSpec | None = None) -> None:
        ring = self._present_ring()
        if ring is not self._ring and ring is not None and ring != self._ring:
            if spec is not None and self._is_undisturbed(spec):
                return
            lost = self._lost(ring, () if spec is None else (spec,))
            raise PCCLError(Result.RANK_CONNECTION_LOST, title, self._why_lost(lost))

    def _lost(self, ring: Sequence[int], specs: Sequence[OpSpec]) -> list[int]:
        """Return the ranks that are lost, where `ring` is what is left, to ops of these specs. Rule 6."""
        session = self._communicator._inner._session
        if session is None:
            return self._names.lost(ring)
        views = {peer: session.left_out_by.get(peer, 0) for peer in self._peers if peer not in ring}
        first = min(views.values(), default=0)
        partners = {spec.pair.peer for spec in specs if spec.pair is not None}

        def counts(peer: int) -> bool:
            is_leaving = session.losses.get(peer, "").startswith(LEAVING)
            return views[peer] == first or peer in partners or not is_leaving

        return [rank for rank in self._names.lost(ring) if counts(self._peers[rank])]

    def _why_lost(self, ranks: Sequence[int]) -> str:
        losses = self._communicator.losses
        return ", ".join(f"{self._names.of(rank)}: {losses.get(self._peers[rank], 'lost')}" for rank in ranks)
