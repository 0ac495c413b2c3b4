"""Records a process group's calls as torch profiler events ("pccl:all_reduce" and so on) with the inputs' shapes.

An event lasts from the call until its work ends. The profiler treats an event as asynchronous if it begins and ends in
different threads, so each event ends in its own thread. Calls in threads without a profiler record no events.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from pccl.torch.collectives import Plan
from pccl.torch.tensors import Tensor
from pccl.torch.work import Steps

NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "all_gather_single": "_all_gather_base",
    "all_gather_single_coalesced": "_all_gather_base",
    "all_to_all_single": "all_to_all",
    "alltoall": "all_to_all",
    "monitored_barrier": "",
}
"""Event names that differ from the titles of their calls; "" means no event."""

ANY_SOURCE = "recvAnySource"

is_on: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether a profiler runs in this thread."""


def begin(name: str, tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Begin an event, and return a function that ends it. Call that function once, in any thread."""
    handle = torch.autograd._record_function_with_args_enter(f"pccl:{name}", *tensors)

    def end() -> None:
        thread = threading.Thread(target=torch.autograd._record_function_with_args_exit, args=(handle,))
        thread.start()
        thread.join()

    return end


def recorded(title: str, plan: Plan, inputs: Sequence[Tensor]) -> Plan:
    """Begin an event, and return the plan extended by the event's end."""
    name = NAMES.get(title, title)
    if not name:
        return plan
    end = begin(name, inputs)

    def steps() -> Steps:
        try:
            return (yield from plan.steps)
        finally:
            end()

    return Plan(steps())
