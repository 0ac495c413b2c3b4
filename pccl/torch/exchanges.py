"""Collectives with different parts for each rank: gather, scatter and all-to-all.

The engine orders the parts of an array by the ring. It takes the tensors of a gather's or scatter's root one by one,
in place; those of an all-to-all are joined into one array.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pccl.torch.collectives import Plan, joined, overlap
from pccl.torch.op_specs import OpSpecs
from pccl.torch.tensors import Tensor, fail, memory, put_back, room_for, stand_in
from pccl.torch.work import Steps


def parts(what: str, tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the number of elements of each rank; without splits, equal parts."""
    rows = tensor.shape[0] if tensor.dim() else tensor.numel()
    if not splits:
        if rows % size:
            raise fail(what, f"Tensor's dim 0 does not divide equally across group size: {rows} by {size}")
        return [tensor.numel() // size] * size
    if len(splits) != size:
        raise fail(what, f"Number of tensor splits not equal to group size: {len(splits)} for {size} ranks")
    if sum(splits) != rows or min(splits) < 0:
        raise fail(what, f"Split sizes doesn't match total dim 0 size: {list(splits)} of {rows}")
    row = tensor.numel() // rows if rows else 0
    return [count * row for count in splits]


def gather(specs: OpSpecs, tag: int, outputs: Sequence[Tensor], given: Tensor, root: int) -> Plan:
    """Give the root a tensor of each rank."""
    host = stand_in(given)
    hosts = [room_for(each) for each in outputs] if specs.rank == root else []
    if any(
        overlap(each, host) and (rank != root or each.data_ptr() != host.data_ptr()) for rank, each in enumerate(hosts)
    ):
        host = host.clone()

    def steps() -> Steps:
        into = [memory(each) for each in hosts]
        yield specs.gather(tag, memory(host), into, root) if host.numel() else specs.barrier(tag)
        for output, each in zip(outputs, hosts, strict=True):
            put_back(output, each)
        return list(outputs)

    return Plan(steps(), all(each is output for each, output in zip(hosts, outputs, strict=True)))


def scatter(specs: OpSpecs, tag: int, output: Tensor, given: Sequence[Tensor], root: int) -> Plan:
    """Give each rank one of the root's tensors."""
    host = room_for(output)
    parts = [stand_in(each) for each in given] if specs.rank == root else []
    for rank, part in enumerate(parts):
        if overlap(part, host) and (rank != root or part.data_ptr() != host.data_ptr()):
            parts[rank] = part.clone()

    def steps() -> Steps:
        count = host.numel()
        sent = [memory(each) for each in parts]
        yield specs.scatter(tag, sent, memory(host), root) if count else specs.barrier(tag)
        put_back(output, host)
        return [output]

    return Plan(steps(), host is output)


def all_to_all(specs: OpSpecs, tag: int, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> Plan:
    """Send each rank one of the given tensors, and receive one from each."""
    source = joined(given)
    host = torch.empty(sum(each.numel() for each in outputs), dtype=source.dtype, device="cpu")
    incoming, outgoing = [each.numel() for each in outputs], [each.numel() for each in given]

    def steps() -> Steps:
        yield from _exchange(specs, tag, host, source, incoming, outgoing)
        for part, output in zip(host.split(incoming), outputs, strict=True):
            put_back(output, part.view(output.shape))
        return list(outputs)

    return Plan(steps())


def all_to_all_single(
    specs: OpSpecs, tag: int, output: Tensor, given: Tensor, incoming: Sequence[int], outgoing: Sequence[int]
) -> Plan:
    """Send and receive the numbers of elements of `outgoing` and `incoming`, one per rank."""
    source, host = stand_in(given), room_for(output)
    if overlap(source, host):
        source = source.clone()

    def steps() -> Steps:
        yield from _exchange(specs, tag, host, source, incoming, outgoing)
        put_back(output, host)
        return [output]

    return Plan(steps(), host is output and not specs.positions)


def _exchange(
    specs: OpSpecs, tag: int, host: Tensor, source: Tensor, incoming: Sequence[int], outgoing: Sequence[int]
) -> Steps:
    if not specs.order:
        yield specs.all_to_all(tag, memory(source), memory(host), outgoing, incoming)
        return
    parts = source.view(-1).split(list(outgoing))
    sent = torch.cat([parts[rank] for rank in specs.order])
    got = torch.empty_like(host.view(-1))
    takes = [incoming[rank] for rank in specs.order]
    yield specs.all_to_all(tag, memory(sent), memory(got), [outgoing[rank] for rank in specs.order], takes)
    found = got.split(takes)
    host.view(-1).copy_(torch.cat([found[place] for place in specs.positions]))
