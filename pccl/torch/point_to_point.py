"""Point-to-point calls of a process group: send, recv, recv from any rank, and the monitored barrier built from them.

Calls with the same pair, direction and tag match in order. Their queues are separate, so they are independent of
collectives.

A recv from any rank is posted to every rank, because the sender is unknown, and takes the first tensor that arrives.
The other recvs stay posted, and their tensors are kept for the next recv from that rank with that tag (`_Posted`).
A recv posted to a rank that leaves is dropped; only recvs that no other rank can meet then fail.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

import torch

from pccl.errors import PCCLError
from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.torch import collectives, profiling
from pccl.torch.calls import OVER, Coalesced, GroupCalls
from pccl.torch.collectives import Plan
from pccl.torch.errors import BackendError
from pccl.torch.op_specs import INNER_PAIR_TAG
from pccl.torch.scheduler import Scheduler, Turn
from pccl.torch.tensors import (
    REDUCIBLE,
    Memory,
    Tensor,
    fail,
    has_memory,
    put_back,
    require_apart,
    require_dense,
    require_one,
)
from pccl.torch.work import PCCLWork, seconds
from pccl.types import Result

MONITOR_TAG = INNER_PAIR_TAG + 2**10
ACKNOWLEDGE_TAG = MONITOR_TAG + 1
GONE = frozenset({Result.RANK_CONNECTION_LOST, Result.RANK_CONNECTION_FAILED, Result.TOO_FEW_PEERS})
"""Results of a recv whose sender has left."""


class _WantedWork(PCCLWork):
    """The work of a recv that has no op of its own: it ends when it takes the tensor of a posted recv."""

    def __init__(
        self, scheduler: Scheduler, title: str, what: str, timeout_s: float, withdraw: Callable[[_WantedWork], bool]
    ) -> None:
        """`withdraw(work)` returns False if the work already has a tensor, and otherwise ensures that it gets none."""
        super().__init__(scheduler, title, None, object(), timeout_s, False)
        self._what = what
        self._withdraw = withdraw

    def expire(self) -> None:
        if self.is_completed() or self._left_s() > 0 or not self._withdraw(self):
            return
        text = (
            f"{self._what} within {self._timeout_s:g} s. Only this recv has ended, and its tensor is unchanged: a "
            "tensor that arrives later is kept for the next recv with this tag"
        )
        self.end(None, self._scheduler.failure(self.title, PCCLError(Result.TIMEOUT, self.title, text)))


class _PostedWork(PCCLWork):
    """The work of a posted recv. Its failure does not count as the group's if the sender has left on purpose."""

    has_sender_left: Callable[[], bool]
    departed: OpSpec | None = None
    """The op, if it failed because the sender has left."""

    def _failure(self, error: PCCLError) -> BaseException:
        if error.result not in GONE or not self.has_sender_left():
            return super()._failure(error)
        self.departed = self._spec
        return error


class _Posted(NamedTuple):
    """A recv posted to one rank on behalf of a recv from any rank."""

    work: _PostedWork
    array: Tensor


class _Wanted(NamedTuple):
    """A recv that takes the tensor of a posted recv from `src`, or from any rank if `src` is None."""

    work: PCCLWork
    tensor: Tensor
    src: int | None
    end_event: Callable[[], None] | None
    """Ends the profiler's event, if there is one."""


class PointToPointMethods(GroupCalls):
    """The methods for pairs of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._posting = threading.RLock()
        self._posted: dict[tuple[int, int], deque[_Posted]] = {}
        """Posted recvs whose tensors have not been taken yet, by rank and tag."""
        self._wanted: dict[int, deque[_Wanted]] = {}
        """Recvs that wait for posted ones, by tag."""

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0, *, waits: bool = False) -> PCCLWork | Coalesced:
        """Send a tensor to a rank. The work ends once that rank has received it. `waits`: its caller only waits."""
        queue, spec = (dst, "to", tag), self._plain_spec(tensors, dst, tag, True)
        if waits and spec is not None and self._has_run("send", queue, spec):
            return OVER
        if spec is None:
            plan = collectives.send(self._specs, tag, self._checked("send", tensors, dst, "destination", tag), dst)
        else:
            plan = collectives.plain(spec, tensors[0])
        return self._go("send", queue, plan, tensors[0], waits=waits)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0, *, waits: bool = False) -> PCCLWork | Coalesced:
        """Receive a tensor from a rank. `waits` as in `send`."""
        queue, spec = (src, "from", tag), self._plain_spec(tensors, src, tag, False)
        if spec is None:
            plan = collectives.recv(self._specs, tag, self._checked("recv", tensors, src, "source", tag), src)
        if self._posted:
            with self._posting:
                posted = self._posted.get((src, tag))
                if posted:
                    if not any(each.src == src for each in self._wanted.get(tag, ())):
                        self._require_like(posted[0].array, tensors[0], src, tag)
                    return self._want("recv", tensors[0], tag, src)
        if spec is not None:
            if waits and self._has_run("recv", queue, spec):
                return OVER
            plan = collectives.plain(spec, tensors[0])
        return self._go("recv", queue, plan, tensors[0], source=src, waits=waits)

    def _has_run(self, title: str, queue: tuple[int, str, int], spec: OpSpec) -> bool:
        """Run a call whose caller only waits, without a work, which costs half of the time in Python. Return False if
        it needs one."""
        scheduler = self._scheduler
        if scheduler.failed is not None:
            scheduler.require_pair(queue[0])
        if self._coalescing.batch is not None or profiling.is_on():
            return False
        turn, ends_s = Turn(queue), monotonic() + self._timeout_s
        try:
            while scheduler.takes(turn):
                try:
                    scheduler.check(scheduler.run(spec, title, max(0.0, ends_s - monotonic())), title)
                    return True
                except PCCLError as error:
                    if not scheduler.may_repeat(spec, error):
                        raise scheduler.failure(title, error, spec) from None
            return False
        finally:
            scheduler.finished(turn)

    def _plain_spec(self, tensors: Sequence[Tensor], other: int, tag: int, is_sender: bool) -> OpSpec | None:
        """Return the op of a call on one plain tensor, or None if the arguments need the full checks.

        This takes a tenth of the time of `_checked`.
        """
        tensor: Any = tensors[0] if len(tensors) == 1 else None
        if (
            type(tensor) is not torch.Tensor
            or not tensor.is_cpu
            or tensor.layout is not torch.strided
            or not tensor.is_contiguous()
            or tensor.is_neg()
            or not 0 <= other < self._size
            or other == self._rank
            or not 0 <= tag < INNER_PAIR_TAG
        ):
            return None
        dtype, address = REDUCIBLE.get(tensor.dtype), tensor.data_ptr()
        if dtype is None or not address or (tensor.storage_offset() and not has_memory(tensor)):
            return None
        return self._specs.pair(tag, Memory(address, tensor.numel(), dtype, "", tensor), other, is_sender)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> PCCLWork:
        """Receive the first tensor that any rank sends. `source_rank` of the work then returns the sender."""
        tensor = self._checked("recv_anysource", tensors, None, "source", tag)
        self._scheduler.require_pair(None)
        return self._want("recv_anysource", tensor, tag, None)

    def _checked(self, what: str, tensors: Sequence[Tensor], other: int | None, role: str, tag: int) -> Tensor:
        given = list(tensors)
        require_one(what, given)
        require_dense(what, given)
        if what != "send":
            require_apart(what, given)
        if other == self._rank or (other is not None and not 0 <= other < self._size):
            reason = "this rank itself" if other == self._rank else f"not a rank in a group of {self._size}"
            raise fail(what, f"invalid {role} rank: {other} is {reason}")
        if not 0 <= tag < INNER_PAIR_TAG:
            raise fail(what, f"invalid tag: {tag} is not within [0, {INNER_PAIR_TAG})")
        return given[0]

    def _go(
        self,
        title: str,
        queue: tuple[int, str, int],
        plan: Plan,
        tensor: Tensor,
        source: int = -1,
        timeout: Any = None,
        waits: bool = False,
    ) -> PCCLWork:
        scheduler = self._scheduler
        if scheduler.failed is not None:
            scheduler.require_pair(queue[0])
        if profiling.is_on():
            plan = profiling.recorded(title, plan, [tensor])
        limit_s = self._timeout_s if timeout is None else seconds(timeout, self._timeout_s)
        work = self._work_type(scheduler, title, plan.steps, queue, limit_s, plan.is_light, [tensor])
        work.source = source
        batch = self._coalescing.batch
        try:
            scheduler.enter(work)
            scheduler.go(work, waits and batch is None)
        except BaseException as error:
            work.interrupted(error)
            raise
        if batch is not None:
            batch.append(work)
        return work

    # Recvs from any rank, and recvs that take a tensor posted for one of those.

    def _want(self, title: str, tensor: Tensor, tag: int, src: int | None) -> PCCLWork:
        scheduler = self._scheduler
        sender = "no rank has" if src is None else f"{self._names.of(src)} has not"
        what = f"{sender} sent a tensor with tag {tag}"
        work = _WantedWork(scheduler, title, what, self._timeout_s, partial(self._withdraw, tag))
        end_event = profiling.begin(profiling.ANY_SOURCE, [tensor]) if src is None and profiling.is_on() else None
        scheduler.enter(work)
        scheduler.watch(work)
        sources = [rank for rank in range(self._size) if rank != self._rank] if src is None else [src]
        with self._posting:
            self._wanted.setdefault(tag, deque()).append(_Wanted(work, tensor, src, end_event))
            for each in sources:
                if not self._posted.get((each, tag)):
                    self._post(each, tag, tensor)
            ready = [each for each in sources if self._is_here(each, tag)]
        for each in ready:
            self._deliver(each, tag)
        return work

    def _post(self, src: int, tag: int, like: Tensor) -> None:
        array = torch.empty(like.shape, dtype=like.dtype, device="cpu")
        plan = collectives.recv(self._specs, tag, array, src)
        queue, scheduler = (src, "from", tag), self._scheduler
        work = _PostedWork(scheduler, "recv_anysource", plan.steps, queue, math.inf, plan.is_light)
        work.has_sender_left = partial(scheduler.has_left, src)
        scheduler.enter(work)
        self._posted.setdefault((src, tag), deque()).append(_Posted(work, array))
        scheduler.go(work, False)
        work.when_over(partial(scheduler.later, partial(self._deliver, src, tag)))

    def _withdraw(self, tag: int, work: PCCLWork) -> bool:
        with self._posting:
            wanted = self._wanted.get(tag, deque())
            found = next((each for each in wanted if each.work is work), None)
            if found is not None:
                wanted.remove(found)
        if found is not None and found.end_event is not None:
            found.end_event()
        return found is not None

    def _is_here(self, src: int, tag: int) -> bool:
        posted = self._posted.get((src, tag))
        return bool(posted) and posted is not None and posted[0].work.is_completed()

    def _deliver(self, src: int, tag: int) -> None:
        """Deliver a tensor that has arrived from a rank to the oldest recv that it fits."""
        with self._posting:
            if not self._is_here(src, tag):
                return
            posted = self._posted[src, tag][0]
            if posted.work.departed is not None:
                self._drop(src, tag, posted.work.departed)
                return
            error, count = posted.work.exception(), posted.array.numel()
            wanted = [each for each in self._wanted.get(tag, ()) if each.src in (None, src)]
            found = next((each for each in wanted if error is not None or each.tensor.numel() == count), None)
            if found is None:
                return
            self._posted[src, tag].popleft()
            self._wanted[tag].remove(found)
            wanted.remove(found)
            if wanted and not self._posted[src, tag]:
                self._post(src, tag, wanted[0].tensor)
        work, tensor, _, end_event = found
        if end_event is not None:
            end_event()
        if error is None:
            put_back(tensor, posted.array)
            work.source = src
            work.end([tensor], None)
        else:
            work.end(None, error)

    def _drop(self, src: int, tag: int, departed: OpSpec) -> None:
        """Drop a recv posted to a rank that has left, and end the recvs that no rank can meet now."""
        self._posted[src, tag].popleft()
        scheduler = self._scheduler
        posted = {rank: posted for (rank, its_tag), posted in self._posted.items() if its_tag == tag}
        for wanted in list(self._wanted.get(tag, ())):
            sources = posted if wanted.src is None else [wanted.src]
            kept = [each.array.numel() for rank in sources for each in posted[rank]]
            if any(map(scheduler.is_there, sources)) or wanted.tensor.numel() in kept:
                continue
            self._withdraw(tag, wanted.work)
            title, spec = wanted.work.title, None if wanted.src is None else departed
            wanted.work.end(None, scheduler.failure(title, scheduler.departures(title), spec))

    def _require_like(self, posted: Tensor, tensor: Tensor, src: int, tag: int) -> None:
        if posted.numel() != tensor.numel() or posted.dtype is not tensor.dtype:
            text = (
                f"an earlier recv from any rank expects {posted.numel()} elements of {posted.dtype} with tag {tag}, so "
                f"{self._names.of(src)} must not send {tensor.numel()} elements of {tensor.dtype} with that tag: use "
                "another tag"
            )
            raise fail("recv", text)

    # The monitored barrier.

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Return when all ranks have called it. Rank 0 receives a byte from each other rank and then answers all.

        Raises BackendError. On rank 0 it names the first late rank, or all late ranks with `wait_all_ranks`. On other
        ranks it means that rank 0 did not answer.
        """
        limit_s = seconds(timeout, self._timeout_s)
        if timeout is not None and self._rank == 0 and not timeout:
            others = ", ".join(str(rank) for rank in range(1, self._size))
            text = f"[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms, waiting for ranks {others}"
            raise BackendError(text, Result.TIMEOUT)
        limit = timedelta(seconds=limit_s)
        word = torch.zeros(1, dtype=torch.uint8, device="cpu")
        if self._rank != 0:
            try:
                self._monitor("to", MONITOR_TAG, word, 0, limit).wait()
                self._monitor("from", ACKNOWLEDGE_TAG, word, 0, limit).wait()
            except BackendError as error:
                text = (
                    f"[Rank {self._rank}]: Rank {self._rank} successfully reached monitoredBarrier, but received "
                    f"errors while waiting for send/recv from rank 0 for {limit_s * 1000:.0f} ms; rank 0's "
                    f"error names the missing rank ({error})"
                )
                raise BackendError(text, error.result, error.lost) from error
            return
        works = {
            rank: self._monitor("from", MONITOR_TAG, torch.zeros(1, dtype=torch.uint8, device="cpu"), rank, limit)
            for rank in range(1, self._size)
        }
        missing: dict[int, BackendError] = {}
        for rank, work in works.items():
            try:
                work.wait()
            except BackendError as error:
                if error.result is not Result.TIMEOUT:
                    raise  # the group has failed, perhaps because of another rank
                missing[rank] = error
                if not wait_all_ranks:
                    break
        if missing:
            named = ", ".join(str(rank) for rank in missing)
            ranks = f"Rank{'s' if len(missing) > 1 else ''} {named}"
            first = next(iter(missing.values()))
            text = f"[Rank 0]: {ranks} failed to pass monitoredBarrier in {limit_s * 1000:.0f} ms"
            raise BackendError(text, first.result, first.lost) from first
        for rank in works:
            self._monitor("to", ACKNOWLEDGE_TAG, word, rank, limit).wait()

    def _monitor(self, way: str, tag: int, word: Tensor, other: int, limit: timedelta) -> PCCLWork:
        make = collectives.send if way == "to" else collectives.recv
        plan = make(self._specs, tag, word, other)
        return self._go("monitored_barrier", (other, way, tag), plan, word, timeout=limit)
