"""A rank that makes calls of torch.distributed within compiled functions, and says whether they do what they do
uncompiled: a program, run for each rank by `test_torch_compile.py`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

LIMIT = timedelta(seconds=120)
SIZE = 2
Call = Callable[[Any, int], Any]


def send_or_recv(tensor: Any, rank: int) -> None:
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)


def batch(tensor: Any, rank: int) -> Any:
    got = torch.zeros_like(tensor)
    ops = [dist.P2POp(dist.isend, tensor, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got


def gathered(tensor: Any, _: int) -> Any:
    parts = [torch.zeros_like(tensor) for _ in range(SIZE)]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def gathered_later(tensor: Any, _: int) -> Any:
    parts = [torch.zeros_like(tensor) for _ in range(SIZE)]
    dist.all_gather(parts, tensor, async_op=True).wait()
    return torch.cat(parts)


def gathered_in_one(tensor: Any, _: int) -> Any:
    whole = torch.zeros(SIZE * tensor.numel())
    dist.all_gather_into_tensor(whole, tensor)
    return whole


def scattered(tensor: Any, rank: int) -> Any:
    part = torch.zeros(tensor.numel() // SIZE)
    dist.scatter(part, list(tensor.split(part.numel())) if rank == 0 else None)
    return part


def reduced_at_root(tensor: Any, rank: int) -> Any:
    dist.reduce(tensor, 0)
    return tensor if rank == 0 else None


CALLS: dict[str, Call] = {
    "send_recv": send_or_recv,
    "isend_irecv": lambda t, rank: (dist.isend(t, 1) if rank == 0 else dist.irecv(t, 0)).wait() and None,
    "batch_isend_irecv": batch,
    "all_reduce": lambda t, _: dist.all_reduce(t),
    "all_reduce_async": lambda t, _: dist.all_reduce(t, async_op=True).wait() and None,
    "broadcast": lambda t, _: dist.broadcast(t, 0),
    "broadcast_async": lambda t, _: dist.broadcast(t, 1, async_op=True).wait() and None,
    "reduce": reduced_at_root,
    "all_gather": gathered,
    "all_gather_async": gathered_later,
    "all_gather_into_tensor": gathered_in_one,
    "scatter": scattered,
    "barrier": lambda t, _: dist.barrier(),
}
"""What changes a tensor, or returns another one."""


def values(call: Call, rank: int) -> Any:
    tensor = torch.arange(4.0) * (rank + 2)
    tensor = tensor * 2
    got = call(tensor, rank)
    return (tensor if got is None else got) + 1


def compare(call: Call, rank: int, backend: str) -> str:
    if call is reduced_at_root and rank != 0:  # what its tensor has is anything
        values(call, rank)
        torch.compile(values, backend=backend)(call, rank)
        return "equal"
    expected = values(call, rank)
    found = torch.compile(values, backend=backend)(call, rank)
    return "equal" if torch.equal(expected, found) else f"{found} instead of {expected}"


def trained(rank: int, how: str, backend: str, hook: Any) -> Any:
    """Return the parameters after steps of DDP: not compiled at all, or the model, or whole steps."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    forward = torch.compile(model, backend=backend) if how == "model" else model

    def step(inputs: Any) -> None:
        optimizer.zero_grad()
        forward(inputs).square().mean().backward()
        optimizer.step()

    whole = torch.compile(step, backend=backend) if how == "step" else step
    inputs = torch.Generator().manual_seed(rank)
    for _ in range(3):
        whole(torch.randn(5, 6, generator=inputs))
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def compare_training(rank: int, how: str, backend: str, hook: Any = None) -> str:
    expected, found = trained(rank, "", "", hook), trained(rank, how, backend, hook)
    return "equal" if torch.allclose(expected, found, atol=1e-6) else f"{found} instead of {expected}"


CASES: dict[str, Callable[[int], str]] = {
    **{name: lambda rank, call=call: compare(call, rank, "eager") for name, call in CALLS.items()},
    "all_reduce_aot": lambda rank: compare(CALLS["all_reduce"], rank, "aot_eager"),
    "ddp": lambda rank: compare_training(rank, "model", "eager"),
    "ddp_aot": lambda rank: compare_training(rank, "model", "aot_eager"),
    "ddp_hook": lambda rank: compare_training(rank, "model", "eager", default_hooks.fp16_compress_hook),
    "ddp_step": lambda rank: compare_training(rank, "step", "eager"),
}
if shutil.which("g++"):  # what torch's own compiler takes
    CASES["all_reduce_inductor"] = lambda rank: compare(CALLS["all_reduce"], rank, "inductor")


def main(backend: str, rank: int, store: str) -> None:
    dist.init_process_group(backend, store=dist.FileStore(store, SIZE), rank=rank, world_size=SIZE, timeout=LIMIT)
    found = {}
    for name, case in CASES.items():
        torch._dynamo.reset()
        try:
            found[name] = case(rank)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
