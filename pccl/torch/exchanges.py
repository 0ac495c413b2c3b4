"""Collectives in which ranks get different parts: gather, scatter and all-to-all, as scripts of ops.

They are composed of other ops: a gather of an all_gather, a scatter of a broadcast, an all-to-all of sends between all
pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.torch.collectives import Plan, all_gathered, joined
from pccl.torch.specs import INNER_PAIR_TAG, Specs
from pccl.torch.tensors import Memory, Tensor, fail, memory, put_back, room_for, stand_in
from pccl.torch.work import Script


def parts(what: str, tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return how many elements of a tensor belong to each rank. Without splits they all have as many."""
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


def gather(specs: Specs, lane: int, outputs: Sequence[Tensor], given: Tensor, root: int) -> Plan:
    """Give the root a tensor of each rank."""
    host = stand_in(given)

    def script() -> Script:
        whole = torch.empty((specs.size, host.numel()), dtype=host.dtype)
        yield from all_gathered(specs, lane, host, whole)
        if specs.rank == root:
            for part, output in zip(whole, outputs, strict=True):
                put_back(output, part.view(output.shape))
        return list(outputs)

    return Plan(script())


def scatter(specs: Specs, lane: int, output: Tensor, given: Sequence[Tensor], root: int) -> Plan:
    """Give each rank one of the root's tensors."""
    count = output.numel()
    whole = joined(given) if specs.rank == root else torch.empty(specs.size * count, dtype=output.dtype)

    def script() -> Script:
        yield [specs.broadcast(lane, memory(whole), root) if count else specs.barrier(lane)]
        put_back(output, whole[specs.rank * count : (specs.rank + 1) * count].view(output.shape))
        return [output]

    return Plan(script())


def all_to_all(specs: Specs, lane: int, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> Plan:
    """Send each rank one of the given tensors, and receive one from each."""
    outgoing = [stand_in(each) for each in given]
    hosts = [room_for(each) for each in outputs]

    def script() -> Script:
        yield _exchange(specs, lane, [memory(each) for each in hosts], [memory(each) for each in outgoing])
        put_back(hosts[specs.rank], outgoing[specs.rank].view(hosts[specs.rank].shape))
        for output, host in zip(outputs, hosts, strict=True):
            put_back(output, host)
        return list(outputs)

    return Plan(script())


def all_to_all_single(
    specs: Specs, lane: int, output: Tensor, given: Tensor, incoming: Sequence[int], outgoing: Sequence[int]
) -> Plan:
    """Send each rank so many elements of a tensor, and receive so many from each."""
    source, host = stand_in(given), room_for(output)
    own_in, own_out = sum(incoming[: specs.rank]), sum(outgoing[: specs.rank])

    def script() -> Script:
        yield _exchange(specs, lane, _divided(host, incoming), _divided(source, outgoing))
        own = source.view(-1)[own_out : own_out + outgoing[specs.rank]]
        host.view(-1)[own_in : own_in + incoming[specs.rank]].copy_(own)
        put_back(output, host)
        return [output]

    return Plan(script())


def _divided(tensor: Tensor, counts: Sequence[int]) -> list[Memory]:
    flat = tensor.view(-1)
    ends = list(accumulate(counts))
    return [memory(flat[end - count : end]) for end, count in zip(ends, counts, strict=True)]


def _exchange(specs: Specs, lane: int, incoming: Sequence[Memory], outgoing: Sequence[Memory]) -> list[OpSpec]:
    """Return the ops of this rank: a send and a recv with each other one. Empty parts are not sent."""
    tag = INNER_PAIR_TAG + lane
    batch = []
    for step in range(1, specs.size):
        to, from_ = (specs.rank + step) % specs.size, (specs.rank - step) % specs.size
        if incoming[from_].count:
            batch.append(specs.recv(tag, incoming[from_], from_))
        if outgoing[to].count:
            batch.append(specs.send(tag, outgoing[to], to))
    return batch
