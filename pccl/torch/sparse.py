"""The sum of sparse tensors: ranks have different indices, so all get the entries of all and add them up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pccl.torch.collectives import Plan, all_gathered
from pccl.torch.reductions import name_of
from pccl.torch.specs import Specs
from pccl.torch.tensors import Tensor, fail
from pccl.torch.work import Script


def require_summable(what: str, tensors: Sequence[Tensor], op: Any) -> None:
    """Raise ArgumentError unless these are sparse tensors of one size and dtype, and are to be summed up."""
    first = next(tensor for tensor in tensors if tensor.layout is torch.sparse_coo)
    for index, tensor in enumerate(tensors):
        if tensor.layout is not first.layout:
            raise fail(what, f"invalid tensor layout at index {index} (expected {first.layout}, got {tensor.layout})")
        if tensor.dtype is not first.dtype:
            raise fail(what, f"invalid tensor type at index {index} (expected {first.dtype}, got {tensor.dtype})")
        if tensor.shape != first.shape:
            sizes = f"expected {tuple(first.shape)}, got {tuple(tensor.shape)}"
            raise fail(what, f"invalid tensor size at index {index} ({sizes})")
    if name_of(op) != "SUM":
        raise fail(
            what, f"unsupported reduction operation {name_of(op)} for sparse tensors, which can be summed up only"
        )


def all_reduce(specs: Specs, lane: int, tensors: Sequence[Tensor]) -> Plan:
    """Sum sparse tensors up, in place."""
    own = tensors[0]
    for each in tensors[1:]:
        own = own + each
    own = own.detach().coalesce().cpu()
    indices, values = own.indices().contiguous(), own.values().contiguous()
    shape = torch.tensor([own.sparse_dim(), *own.shape], device="cpu")

    def script() -> Script:
        head = torch.cat([torch.tensor([values.shape[0]], device="cpu"), shape])
        heads = torch.empty((specs.size, head.numel()), dtype=head.dtype, device="cpu")
        yield from all_gathered(specs, lane, head, heads)
        counts = heads[:, 0].tolist()
        if not torch.equal(heads[:, 1:], shape.expand(specs.size, -1)):
            raise fail(
                "allreduce", f"invalid tensor size: ranks have sparse tensors of the shapes {heads[:, 1:].tolist()}"
            )
        most = max(counts)
        total = torch.sparse_coo_tensor(
            own.indices()[:, :0], own.values()[:0], own.shape, check_invariants=False, device="cpu"
        )
        if most:
            every = []
            for part in (indices.t().contiguous(), values):
                padded = torch.zeros((most, *part.shape[1:]), dtype=part.dtype, device="cpu")
                padded[: part.shape[0]] = part
                whole = torch.empty((specs.size, *padded.shape), dtype=part.dtype, device="cpu")
                yield from all_gathered(specs, lane, padded, whole)
                every.append(torch.cat([whole[rank, :count] for rank, count in enumerate(counts)]))
            total = torch.sparse_coo_tensor(
                every[0].t(), every[1], own.shape, check_invariants=False, device="cpu"
            ).coalesce()
        with torch.no_grad():
            for each in tensors:
                each.copy_(total.to(each.device))
        return list(tensors)

    return Plan(script())
