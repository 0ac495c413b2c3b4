"""The calls of a process group as events of torch's profiler: "pccl:all_reduce" and so on, with the inputs' shapes.

An event lasts from the call to its end. The profiler takes an event for asynchronous if it begins and ends in different
threads, so each event ends in a thread of its own. Calls in threads without a profiler make no events.
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
"""Events whose names differ from the titles of their calls; empty: no event."""

ANY_SOURCE = "recvAnySource"

is_on: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether a profiler runs in this thread."""


def begin(name: str, tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Begin an event. Return a function that ends it, to be called once, in any thread."""
    handle = torch.autograd._record_function_with_args_enter(f"pccl:{name}", *tensors)

    def end() -> None:
        thread = threading.Thread(target=torch.autograd._record_function_with_args_exit, args=(handle,))
        thread.start()
        thread.join()

    return end


def recorded(title: str, plan: Plan, inputs: Sequence[Tensor]) -> Plan:
    """Return a plan with an event that begins now and ends with the plan."""
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
