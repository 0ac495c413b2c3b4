"""How a method of a process group becomes a work: the part that all methods share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

from torch._C import _distributed_c10d as c10d

from _pccl_torch import outside_graphs
from pccl.torch import profiling
from pccl.torch.alone import Alone
from pccl.torch.coalescing import Coalesced, Coalescing
from pccl.torch.collectives import Plan
from pccl.torch.memory_use import UNUSED, use_of
from pccl.torch.options import is_async, seconds
from pccl.torch.scheduler import DirectCall, Scheduler
from pccl.torch.specs import Specs
from pccl.torch.tensors import Tensor
from pccl.torch.work import PCCLWork


def _wait_for(works: Sequence[PCCLWork]) -> None:
    """Return when all are over, in whatever way."""
    for work in works:
        with suppress(Exception):
            work.wait()


OVER = Coalesced([])
"""What a call returns that was waited for: a work that is over."""


class Caller:
    """The state of a process group that its methods work with."""

    _rank: int
    _size: int
    _timeout_s: float
    _specs: Specs
    _scheduler: Scheduler | Alone
    _work_type: type[PCCLWork] = PCCLWork
    """The class of works, which torchft wants to be another one."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        outside_graphs(cls)

    def __init__(self) -> None:
        self._order = threading.Lock()
        """Held while a call takes its place, so that those of several threads have one order."""
        self._coalescing = Coalescing()
        self._times = False

    def _enable_collectives_timing(self) -> None:
        """Measure how long later collectives take, for `Work._get_duration`."""
        self._times = True

    def _call(
        self,
        title: str,
        options: Any,
        plan: Callable[[int], Plan],
        tensors: Sequence[Tensor] = (),
        timeout: Any = None,
        is_barrier: bool = False,
        inputs: Sequence[Tensor] | None = None,
        outputs: Sequence[Tensor] | None = None,
    ) -> PCCLWork | Coalesced:
        """Make a collective, whose plan depends on its lane.

        It reads `inputs` and writes `outputs`; both are `tensors` if they are left out. Returns a work of nothing if it
        has been waited for, or was one of several that are waited for together and its caller would wait for it alone.
        """
        scheduler = self._scheduler
        waits = not is_async(options)
        use, call, work, is_direct = UNUSED, None, None, False
        is_first = waits and scheduler.is_idle()
        if not is_first:
            use = use_of(inputs or (), tensors if outputs is None else outputs)
            _wait_for(scheduler.users(use))
        limit = getattr(options, "timeout", timeout)
        try:
            with self._order:
                lane = scheduler.next_lane()
                made = plan(lane)
                if is_first and self._needs_no_work() and scheduler.is_idle():
                    call = DirectCall(lane)
                    is_direct = scheduler.claim(call, is_collective=True)
                if not is_direct:
                    if profiling.is_on():
                        made = profiling.recorded(title, made, tensors if inputs is None else inputs)
                    work = self._work(title, lane, made, tensors, limit)
                    work.use, work.number = use, scheduler.calls
                    if self._times:
                        work.be_timed()
                    after = scheduler.open_collectives() if is_barrier else ()
                    scheduler.enter(work, after)
            if is_direct:
                scheduler.run_script(made.script, title, seconds(limit, self._timeout_s))
                return OVER
            assert work is not None
            return self._go_on(work, waits, after, tensors if outputs is None else outputs)
        except BaseException as error:
            if work is not None:
                work.interrupted(error)
            raise
        finally:
            if call is not None:
                scheduler.leave_lane(call)

    def _go_on(
        self, work: PCCLWork, waits: bool, after: Sequence[Any], outputs: Sequence[Tensor]
    ) -> PCCLWork | Coalesced:
        """Run a work that has entered its lane, or start it, as its caller waits or not."""
        scheduler = self._scheduler
        if not waits and c10d._allow_inflight_collective_as_graph_input():
            work.register(outputs)
        batch = self._coalescing.batch
        if batch is not None:
            scheduler.go(work, False, after)
            batch.append(work)
            return OVER if waits else work  # torch 2.6 waits for what each call returns
        scheduler.go(work, waits, after)
        return work

    def _needs_no_work(self) -> bool:
        """Return whether nobody wants to see more of a call than its end."""
        is_usual = self._work_type is PCCLWork and not self._times
        return is_usual and self._coalescing.batch is None and not profiling.is_on()

    def _work(self, title: str, lane: Hashable, plan: Plan, tensors: Sequence[Tensor], timeout: Any = None) -> PCCLWork:
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        limit_s = seconds(timeout, self._timeout_s)
        return self._work_type(self._scheduler, title, plan.script, lane, limit_s, plan.is_light, list(devices))

    # Several calls that are waited for together.

    def _start_coalescing(self, device: Any = None) -> None:
        """Let the calls of this thread go on by themselves until `_end_coalescing`."""
        self._coalescing.start()

    def _end_coalescing(self, device: Any = None) -> Coalesced:
        """Return a work that is over when all calls since `_start_coalescing` are."""
        return Coalesced(self._coalescing.end())
