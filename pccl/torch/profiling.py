"""The calls of a process group as events of torch's profiler: "pccl:all_reduce" and so on, with the inputs' shapes.

They have the names that torch's own backends give theirs. An event lasts from the call to its end, and is marked as
asynchronous, which the profiler concludes from its having begun in one thread and ended in another. So each is ended
in a thread that does nothing else. Nothing of this happens while no profiler runs in the thread that makes a call.
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
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "all_gather_single": "_all_gather_base",
    "all_gather_single_coalesced": "_all_gather_base",
    "gather": "gather",
    "scatter": "scatter",
    "all_to_all_single": "all_to_all",
    "alltoall": "all_to_all",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}
"""The name of the event of a call, by its title. Calls that are not here make none."""

ANY_SOURCE = "recvAnySource"

is_on: Callable[[], bool] = torch.autograd._profiler_enabled
"""Whether a profiler runs in this thread."""


def begin(name: str, tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Begin an event, and return what ends it: to be called once, by any thread."""
    handle = torch.autograd._record_function_with_args_enter(f"pccl:{name}", *tensors)

    def end() -> None:
        thread = threading.Thread(target=torch.autograd._record_function_with_args_exit, args=(handle,))
        thread.start()
        thread.join()

    return end


def recorded(title: str, plan: Plan, inputs: Sequence[Tensor]) -> Plan:
    """Return a plan that ends an event when it is over, which is begun here."""
    name = NAMES.get(title)
    if name is None:
        return plan
    end = begin(name, inputs)

    def steps() -> Steps:
        try:
            return (yield from plan.steps)
        finally:
            end()

    return Plan(steps())
