"""The base class of the process group methods. It turns calls into works and coalesces them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import Work as TorchWork

from _pccl_torch import outside_graphs
from pccl.torch import profiling
from pccl.torch.collectives import Plan
from pccl.torch.errors import ArgumentError, Names
from pccl.torch.memory_use import UNUSED, use_of
from pccl.torch.op_specs import OpSpecs
from pccl.torch.scheduler import Scheduler
from pccl.torch.tensors import Tensor
from pccl.torch.work import PCCLWork, seconds


class Coalescing(threading.local):
    """Each thread's calls since `_start_coalescing`, or None if the thread is not coalescing calls."""

    batch: list[PCCLWork] | None = None


@outside_graphs
class Coalesced(TorchWork):  # type: ignore[misc]
    """Several works combined into one. Thread-safe."""

    def __init__(self, works: Sequence[PCCLWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Any]:
        return [tensor for work in self._works for tensor in work.result() or ()]

    def get_future(self) -> Any:
        every = torch.futures.collect_all([work.get_future() for work in self._works])
        return every.then(lambda done: [tensor for each in done.value() for tensor in each.value() or ()])


OVER = Coalesced([])
"""A completed work."""


class GroupCalls:
    """The state that a process group's methods share."""

    _rank: int
    _size: int
    _timeout_s: float
    _names: Names
    _specs: OpSpecs
    _scheduler: Scheduler
    _work_type: type[PCCLWork] = PCCLWork
    """The class of the works. torchft needs its own class."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        outside_graphs(cls)

    def __init__(self) -> None:
        self._order = threading.Lock()
        """Held while a call enters its queue, to order the calls of several threads."""
        self._coalescing = Coalescing()

    def _call(
        self,
        title: str,
        options: Any,
        plan: Callable[..., Plan],
        arguments: Sequence[Any],
        tensors: Sequence[Tensor] = (),
        inputs: Sequence[Tensor] | None = None,
        outputs: Sequence[Tensor] | None = None,
        is_barrier: bool = False,
    ) -> PCCLWork | Coalesced:
        """Call a collective. Return its work, or a completed work if a synchronous call is being coalesced.

        Args:
            options: c10d's options: the timeout, and (`asyncOp`) whether the caller continues without waiting.
            plan: Returns the call's plan, given the group's specs, a tag and `arguments`.
            tensors: The result of the work.
            inputs, outputs: The tensors that the call reads and writes; `tensors` by default.
            is_barrier: Whether all earlier collectives must end first.
        """
        scheduler, work = self._scheduler, None
        waits = not getattr(options, "asyncOp", True)  # torch 2.7 lacks asyncOp and itself waits for the work
        use, after = UNUSED, ()  # type: tuple[Any, Sequence[PCCLWork]]
        if not waits or not scheduler.is_idle():
            use = use_of(inputs or (), tensors if outputs is None else outputs)
            for other in scheduler.users(use):
                with suppress(Exception):
                    other.wait()
        try:
            with self._order:
                queue = scheduler.next_queue()
                made = plan(self._specs, queue, *arguments)
                if profiling.is_on():
                    made = profiling.recorded(title, made, tensors if inputs is None else inputs)
                limit_s = seconds(getattr(options, "timeout", None), self._timeout_s)
                work = self._work_type(scheduler, title, made.steps, queue, limit_s, made.is_light, tensors)
                work.use, work.number = use, scheduler.calls
                if is_barrier:
                    after = scheduler.open_collectives()
                scheduler.enter(work, after)
            if not waits and c10d._allow_inflight_collective_as_graph_input():
                work.register(tensors if outputs is None else outputs)
            batch = self._coalescing.batch
            scheduler.go(work, waits and batch is None, after)
        except BaseException as error:
            if work is not None:
                work.interrupted(error)
            raise
        if batch is None:
            return work
        batch.append(work)
        return OVER if waits else work

    def _start_coalescing(self, device: Any = None) -> None:
        if self._coalescing.batch is not None:
            raise ArgumentError("ProcessGroupPCCL::_start_coalescing: this thread is already coalescing calls")
        self._coalescing.batch = []

    def _end_coalescing(self, device: Any = None) -> Coalesced:
        """Return a work that ends when all calls since `_start_coalescing` have ended."""
        batch, self._coalescing.batch = self._coalescing.batch, None
        if batch is None:
            raise ArgumentError("ProcessGroupPCCL::_end_coalescing: _start_coalescing was not called in this thread")
        return Coalesced(batch)
