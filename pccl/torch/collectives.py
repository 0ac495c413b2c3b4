"""c10d's collectives as sequences of ops (steps).

Each function takes checked tensors, makes the copies needed before the call, and returns a `Plan`. The engine writes
results directly into tensors that it can use; otherwise it writes into a host copy, which the steps copy back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.torch.op_specs import OpSpecs
from pccl.torch.reductions import Reduction, arithmetic, folded, name_of, premultiplied
from pccl.torch.tensors import (
    Tensor,
    as_bytes,
    as_pairs,
    fail,
    is_one_array,
    memory,
    note_written,
    put_back,
    put_into,
    room_for,
    stand_in,
)
from pccl.torch.work import Steps
from pccl.types import ReduceOp

FOLD_BYTES_MAX = 16 << 20
"""The maximum number of bytes, over all ranks' parts, in one gather of a fold."""


class Plan(NamedTuple):
    """The steps of a call. Light steps only inspect results, so the engine's thread may execute them."""

    steps: Steps
    is_light: bool = False


def all_reduce(specs: OpSpecs, tag: int, tensors: Sequence[Tensor], reduction: Reduction) -> Plan:
    """Reduce one tensor from each rank into all of `tensors`. Several tensors are first reduced locally."""
    tensor = tensors[0]
    host = room_for(tensor)
    given = host if host is tensor else stand_in(tensor)
    if len(tensors) > 1:
        given = _reduced_here([stand_in(each) for each in tensors], reduction)
    given = premultiplied(given, reduction.factor)

    def steps() -> Steps:
        yield from _reduce(specs, tag, given, host, reduction)
        for each in tensors:
            if each is not host:
                put_back(each, host)
        return list(tensors)

    return Plan(steps(), host is tensor and reduction.fold is None and len(tensors) == 1)


def _reduce(specs: OpSpecs, tag: int, given: Tensor, host: Tensor, reduction: Reduction) -> Steps:
    if given.numel() == 0:
        yield specs.barrier(tag)
        return
    if reduction.fold is None:
        recv = memory(arithmetic(host))
        send = recv if given is host else memory(arithmetic(given))
        yield specs.all_reduce(tag, send, recv, reduction.op)
        return
    flat, result = given.reshape(-1), host.view(-1)
    piece = max(1, FOLD_BYTES_MAX // (specs.size * given.element_size()))
    outcome = []
    for first in range(0, flat.numel(), piece):
        part = flat[first : first + piece]
        parts = torch.empty((specs.size, part.numel()), dtype=part.dtype, device="cpu")
        yield from all_gathered(specs, tag, part, parts)
        outcome.append(folded(reduction.fold, parts))
    torch.cat(outcome, out=result)


_HERE = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PROD: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}


def _reduced_here(tensors: Sequence[Tensor], reduction: Reduction) -> Tensor:
    fold = reduction.fold or _HERE[reduction.op]
    result = tensors[0].clone()
    for each in tensors[1:]:
        result = fold(result, each)
    return result


def all_reduce_together(specs: OpSpecs, tag: int, tensors: Sequence[Tensor], reduction: Reduction) -> Plan:
    """Reduce each tensor over all ranks, using one op for all tensors."""
    if len(tensors) == 1:
        return all_reduce(specs, tag, tensors, reduction)
    given = joined(tensors)
    given = premultiplied(given, reduction.factor)

    def steps() -> Steps:
        yield from _reduce(specs, tag, given, given, reduction)
        spread(given, tensors)
        return list(tensors)

    return Plan(steps())


def reduce(specs: OpSpecs, tag: int, tensor: Tensor, reduction: Reduction, root: int) -> Plan:
    """Reduce a tensor from each rank into the root's. Other ranks' tensors are unchanged."""
    is_root = specs.rank == root
    if is_root and (reduction.fold is not None or not tensor.numel()):
        return all_reduce(specs, tag, [tensor], reduction)
    given = stand_in(tensor)
    host = room_for(tensor) if is_root else given
    given = premultiplied(given, reduction.factor)

    def steps() -> Steps:
        if reduction.fold is None and given.numel():
            send, recv = memory(arithmetic(given)), memory(arithmetic(host))
            yield specs.reduce(tag, send, recv, reduction.op, root)
        else:
            yield from _reduce(specs, tag, given, torch.empty_like(given), reduction)
        if is_root:
            put_back(tensor, host)
        return [tensor]

    return Plan(steps(), reduction.fold is None and (host is tensor or not is_root))


def broadcast(specs: OpSpecs, tag: int, tensors: Sequence[Tensor], root: int, root_tensor: int) -> Plan:
    """Copy the root's tensor into all of `tensors` on all ranks."""
    source = tensors[root_tensor]
    host = stand_in(source) if specs.rank == root else room_for(source)

    def steps() -> Steps:
        yield specs.broadcast(tag, memory(host), root) if host.numel() else specs.barrier(tag)
        for each in tensors:
            if each is not source or specs.rank != root:
                put_back(each, host)
        return list(tensors)

    return Plan(steps(), host is source and len(tensors) == 1)


def barrier(specs: OpSpecs, tag: int) -> Plan:
    def steps() -> Steps:
        yield specs.barrier(tag)
        return []

    return Plan(steps(), True)


def all_gather(specs: OpSpecs, tag: int, output: Tensor, given: Tensor) -> Plan:
    """Gather a tensor from each rank, concatenated, into `output`."""
    send, host = stand_in(given), room_for(output)

    def steps() -> Steps:
        yield from all_gathered(specs, tag, send, host)
        put_back(output, host)
        return [output]

    return Plan(steps(), host is output and not specs.positions)


def all_gather_lists(specs: OpSpecs, tag: int, outputs: Sequence[Sequence[Tensor]], given: Sequence[Tensor]) -> Plan:
    """Gather n tensors from each rank into lists, where element r * n + i is tensor i of rank r."""
    send = stand_in(given[0]) if len(given) == 1 else joined(given)
    first, count = outputs[0], send.numel() // len(given)
    is_one = len(outputs) == 1 and is_one_array(first)
    rows = len(first), count

    def steps() -> Steps:
        if is_one:
            yield from all_gathered(specs, tag, send, first[0].detach().as_strided(rows, (count, 1)))
            note_written(first[1:])  # each may have its own version counter
        else:
            with specs.scratch.rows(rows, send.dtype) as host:
                yield from all_gathered(specs, tag, send, host)
                for tensors in outputs:
                    for part, output in zip(host, tensors, strict=True):
                        put_into(output, part)
        return list(first) if len(outputs) == 1 else [list(tensors) for tensors in outputs]

    return Plan(steps(), is_one and not specs.positions)


def all_gathered(specs: OpSpecs, tag: int, send: Tensor, rows: Tensor) -> Steps:
    """Gather an array from each rank into the rows of another, in rank order."""
    if send.numel() == 0:
        yield specs.barrier(tag)
        return
    yield specs.all_gather(tag, memory(send), memory(rows))
    if specs.positions:
        flat = rows.view(specs.size, -1)
        flat.copy_(flat[specs.positions])


def all_gather_together(
    specs: OpSpecs, tag: int, outputs: Sequence[Sequence[Tensor]], given: Sequence[Tensor], result: list[Tensor]
) -> Plan:
    """Gather several tensors from each rank in one op, so that `outputs[r][i]` becomes tensor i of rank r."""
    send = joined(given)
    host = torch.empty((specs.size, send.numel()), dtype=send.dtype, device="cpu")

    def steps() -> Steps:
        yield from all_gathered(specs, tag, send, host)
        for part, tensors in zip(host, outputs, strict=True):
            spread(part, tensors)
        return result

    return Plan(steps())


def all_gather_wholes(specs: OpSpecs, tag: int, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> Plan:
    """Gather several tensors from each rank in one op, so that `outputs[i]` becomes tensor i of all ranks.

    Tensors of different dtypes are sent as bytes.
    """
    is_one_dtype = all(each.dtype is given[0].dtype for each in given)
    parts = list(given) if is_one_dtype else [as_bytes(each) for each in given]
    send = joined(parts)
    host = torch.empty((specs.size, send.numel()), dtype=send.dtype, device="cpu")

    def steps() -> Steps:
        yield from all_gathered(specs, tag, send, host)
        first = 0
        for output, part in zip(outputs, parts, strict=True):
            gathered = host[:, first : first + part.numel()].clone(memory_format=torch.contiguous_format)
            put_back(output, gathered.view(-1).view(output.dtype).view(output.shape))
            first += part.numel()
        return list(outputs)

    return Plan(steps())


def reduce_scatter(specs: OpSpecs, tag: int, output: Tensor, given: Tensor, reduction: Reduction) -> Plan:
    """Reduce `given`, which consists of one part per rank, and write this rank's part of the result to `output`."""
    send, host = stand_in(given), room_for(output)
    send = premultiplied(send, reduction.factor)

    def steps() -> Steps:
        yield from _reduce_scatter(specs, tag, send, host, reduction)
        put_back(output, host)
        return [output]

    return Plan(steps(), host is output and reduction.fold is None)


def _reduce_scatter(specs: OpSpecs, tag: int, send: Tensor, host: Tensor, reduction: Reduction) -> Steps:
    if send.numel() == 0:
        yield specs.barrier(tag)
    elif reduction.fold is None and not overlap(send, host):
        if specs.order:
            send = send.view(specs.size, -1)[specs.order]
        parts, part = memory(arithmetic(send)), memory(arithmetic(host))
        yield specs.reduce_scatter(tag, parts, part, reduction.op)
    else:
        whole = torch.empty_like(send)
        yield from _reduce(specs, tag, send, whole, reduction)
        host.view(-1).copy_(whole.view(specs.size, -1)[specs.rank])


def overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two contiguous tensors overlap in memory."""
    first, second = sorted((a, b), key=lambda tensor: int(tensor.data_ptr()))
    end: int = first.data_ptr() + first.numel() * first.element_size()
    start: int = second.data_ptr()
    return end > start


def reduce_scatter_lists(
    specs: OpSpecs, tag: int, output: Tensor, given: Sequence[Tensor], reduction: Reduction
) -> Plan:
    """Reduce a list of tensors, one for each rank and possibly of different sizes."""
    if all(each.numel() == output.numel() for each in given):
        return reduce_scatter(specs, tag, output, joined(given), reduction)
    send, host = joined(given), room_for(output)
    send = premultiplied(send, reduction.factor)
    first = sum(each.numel() for each in given[: specs.rank])

    def steps() -> Steps:
        whole = torch.empty_like(send)
        yield from _reduce(specs, tag, send, whole, reduction)
        host.view(-1).copy_(whole[first : first + host.numel()])
        put_back(output, host)
        return [output]

    return Plan(steps())


def reduce_scatter_together(
    specs: OpSpecs, tag: int, outputs: Sequence[Tensor], given: Sequence[Tensor], reduction: Reduction
) -> Plan:
    """Perform several reduce_scatters in one op."""
    rows = [stand_in(each).reshape(specs.size, -1) for each in given]
    send = torch.cat(rows, dim=1)
    send = premultiplied(send, reduction.factor)
    host = torch.empty(send.shape[1], dtype=send.dtype, device="cpu")

    def steps() -> Steps:
        yield from _reduce_scatter(specs, tag, send, host, reduction)
        spread(host, outputs)
        return list(outputs)

    return Plan(steps())


def plain(spec: OpSpec, tensor: Tensor) -> Plan:
    """Execute a send or recv of a tensor that needs no copy."""

    def steps() -> Steps:
        yield spec
        return [tensor]

    return Plan(steps(), True)


def send(specs: OpSpecs, tag: int, tensor: Tensor, to: int) -> Plan:
    host = stand_in(tensor)

    def steps() -> Steps:
        yield specs.pair(tag, memory(as_pairs(host)), to, True)
        return [tensor]

    return Plan(steps(), True)


def recv(specs: OpSpecs, tag: int, tensor: Tensor, from_: int) -> Plan:
    host = room_for(tensor)

    def steps() -> Steps:
        yield specs.pair(tag, memory(as_pairs(host)), from_, False)
        put_back(tensor, host)
        return [tensor]

    return Plan(steps(), host is tensor)


# Several tensors in one array.


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return a new flat host tensor with the elements of all tensors."""
    return torch.cat([stand_in(each).detach().reshape(-1) for each in tensors])


def spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy consecutive elements of a flat tensor into tensors."""
    first = 0
    for tensor in tensors:
        put_back(tensor, flat[first : first + tensor.numel()].view(tensor.shape))
        first += tensor.numel()


# Sparse tensors: ranks have different indices, so every rank gathers all ranks' entries and sums them.


def require_summable(what: str, tensors: Sequence[Tensor], op: Any) -> None:
    """Raise ArgumentError unless these are sparse tensors of equal size and dtype, and the op is SUM."""
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
        raise fail(what, f"unsupported reduction operation {name_of(op)} for sparse tensors, which can only be summed")


def all_reduce_sparse(specs: OpSpecs, tag: int, tensors: Sequence[Tensor]) -> Plan:
    """Sum sparse tensors in place."""
    own = tensors[0]
    for each in tensors[1:]:
        own = own + each
    own = own.detach().coalesce().cpu()
    indices, values = own.indices().contiguous(), own.values().contiguous()
    shape = torch.tensor([own.sparse_dim(), *own.shape], device="cpu")

    def steps() -> Steps:
        head = torch.cat([torch.tensor([values.shape[0]], device="cpu"), shape])
        heads = torch.empty((specs.size, head.numel()), dtype=head.dtype, device="cpu")
        yield from all_gathered(specs, tag, head, heads)
        counts = heads[:, 0].tolist()
        if not torch.equal(heads[:, 1:], shape.expand(specs.size, -1)):
            raise fail(
                "allreduce", f"invalid tensor size: the ranks' sparse tensors have shapes {heads[:, 1:].tolist()}"
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
                yield from all_gathered(specs, tag, padded, whole)
                every.append(torch.cat([whole[rank, :count] for rank, count in enumerate(counts)]))
            total = torch.sparse_coo_tensor(
                every[0].t(), every[1], own.shape, check_invariants=False, device="cpu"
            ).coalesce()
        with torch.no_grad():
            for each in tensors:
                each.copy_(total.to(each.device))
        return list(tensors)

    return Plan(steps())


# Collectives with different parts for each rank: gather, scatter and all-to-all.


def parts(what: str, tensor: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Return the number of elements for each rank: equal numbers if `splits` is empty."""
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
    """Gather a tensor from each rank on the root."""
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
    """Send one of the root's tensors to each rank."""
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
    """Send one of the given tensors to each rank, and receive one from each."""
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
    """Exchange parts with all ranks; `outgoing` and `incoming` hold the number of elements for each rank."""
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
