"""The collectives of c10d as scripts of ops.

Each function here checks nothing: it takes tensors that fit, prepares what has to be copied beforehand, and returns a
`Plan`. Its script then runs when it is the call's turn, perhaps in another thread.

Where tensors lie as the engine needs them, results go straight into them. Where not, they go into stand-ins, from which
the script copies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pccl.torch.reductions import Reduction, arithmetic, folded, premultiplied
from pccl.torch.specs import Specs
from pccl.torch.tensors import (
    Tensor,
    as_bytes,
    as_pairs,
    is_one_array,
    memory,
    note_written,
    put_back,
    put_into,
    room_for,
    stand_in,
)
from pccl.torch.work import Script
from pccl.types import ReduceOp

FOLD_BYTES_MAX = 16 << 20
"""Bytes of all ranks' parts that are gathered at once for a fold."""


class Plan(NamedTuple):
    """A script, and whether it does nothing between its ops that takes time."""

    script: Script
    is_light: bool = False


def all_reduce(specs: Specs, tag: int, tensors: Sequence[Tensor], reduction: Reduction) -> Plan:
    """Reduce one tensor of each rank, into all of `tensors`. Of several, this rank gives their reduction."""
    tensor = tensors[0]
    host = room_for(tensor)
    given = stand_in(tensor)
    if len(tensors) > 1:
        given = _reduced_here([stand_in(each) for each in tensors], reduction)
    if reduction.factor is not None:
        given = premultiplied(given, reduction.factor)

    def script() -> Script:
        yield from _reduce(specs, tag, given, host, reduction)
        for each in tensors:
            put_back(each, host)
        return list(tensors)

    return Plan(script(), host is tensor and reduction.fold is None and len(tensors) == 1)


def _reduce(specs: Specs, tag: int, given: Tensor, host: Tensor, reduction: Reduction) -> Script:
    """Reduce `given` over all ranks into `host`; both are contiguous and on the host."""
    if given.numel() == 0:
        yield [specs.barrier(tag)]
        return
    if reduction.fold is None:
        send, recv = memory(arithmetic(given)), memory(arithmetic(host))
        yield [specs.all_reduce(tag, send, recv, reduction.op)]
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


def all_reduce_together(specs: Specs, tag: int, tensors: Sequence[Tensor], reduction: Reduction) -> Plan:
    """Reduce each tensor over all ranks: all of them in one op."""
    if len(tensors) == 1:
        return all_reduce(specs, tag, tensors, reduction)
    given = joined(tensors)
    if reduction.factor is not None:
        given = premultiplied(given, reduction.factor)

    def script() -> Script:
        yield from _reduce(specs, tag, given, given, reduction)
        spread(given, tensors)
        return list(tensors)

    return Plan(script())


def reduce(specs: Specs, tag: int, tensor: Tensor, reduction: Reduction, root: int) -> Plan:
    """Reduce a tensor of each rank into that of the root. Those of others stay as they are."""
    if specs.rank == root and (reduction.fold is not None or not tensor.numel()):
        return all_reduce(specs, tag, [tensor], reduction)
    if specs.rank == root:
        return _reduce_here(specs, tag, tensor, reduction)
    given = stand_in(tensor)
    if reduction.factor is not None:
        given = premultiplied(given, reduction.factor)

    def script() -> Script:
        if reduction.fold is None and given.numel():
            array = memory(arithmetic(given))
            yield [specs.reduce(tag, array, array, reduction.op, root)]
        else:
            yield from _reduce(specs, tag, given, torch.empty_like(given), reduction)
        return [tensor]

    return Plan(script(), reduction.fold is None)


def _reduce_here(specs: Specs, tag: int, tensor: Tensor, reduction: Reduction) -> Plan:
    """Reduce a tensor of each rank into that of this rank, the root."""
    given, host = stand_in(tensor), room_for(tensor)
    if reduction.factor is not None:
        given = premultiplied(given, reduction.factor)

    def script() -> Script:
        send, recv = memory(arithmetic(given)), memory(arithmetic(host))
        yield [specs.reduce(tag, send, recv, reduction.op, specs.rank)]
        put_back(tensor, host)
        return [tensor]

    return Plan(script(), host is tensor)


def broadcast(specs: Specs, tag: int, tensors: Sequence[Tensor], root: int, root_tensor: int) -> Plan:
    """Give all ranks the contents of the root's tensor, in all of `tensors`."""
    source = tensors[root_tensor]
    host = stand_in(source) if specs.rank == root else room_for(source)

    def script() -> Script:
        yield [specs.broadcast(tag, memory(host), root) if host.numel() else specs.barrier(tag)]
        for each in tensors:
            if each is not source or specs.rank != root:
                put_back(each, host)
        return list(tensors)

    return Plan(script(), host is source and len(tensors) == 1)


def barrier(specs: Specs, tag: int) -> Plan:
    def script() -> Script:
        yield [specs.barrier(tag)]
        return []

    return Plan(script(), True)


def all_gather(specs: Specs, tag: int, output: Tensor, given: Tensor) -> Plan:
    """Gather a tensor of each rank, one behind the other, into `output`."""
    send, host = stand_in(given), room_for(output)

    def script() -> Script:
        yield from all_gathered(specs, tag, send, host)
        put_back(output, host)
        return [output]

    return Plan(script(), host is output and not specs.positions)


def all_gather_lists(specs: Specs, tag: int, outputs: Sequence[Sequence[Tensor]], given: Sequence[Tensor]) -> Plan:
    """Gather tensors of each rank into lists: with n tensors of each, element r * n + i is tensor i of rank r."""
    send = stand_in(given[0]) if len(given) == 1 else joined(given)
    first, count = outputs[0], send.numel() // len(given)
    is_one = len(outputs) == 1 and is_one_array(first)
    rows = len(first), count

    def script() -> Script:
        if is_one:
            yield from all_gathered(specs, tag, send, as_one_array(first, rows))
            note_written(first[1:])  # each may have a version of its own
        else:
            with specs.scratch.rows(rows, send.dtype) as host:
                yield from all_gathered(specs, tag, send, host)
                for tensors in outputs:
                    for part, output in zip(host, tensors, strict=True):
                        put_into(output, part)
        return list(first) if len(outputs) == 1 else [list(tensors) for tensors in outputs]

    return Plan(script(), is_one and not specs.positions)


def all_gathered(specs: Specs, tag: int, send: Tensor, rows: Tensor) -> Script:
    """Gather an array of each rank into the rows of another, in the order of ranks."""
    if send.numel() == 0:
        yield [specs.barrier(tag)]
        return
    yield [specs.all_gather(tag, memory(send), memory(rows))]
    if specs.positions:
        flat = rows.view(specs.size, -1)
        flat.copy_(flat[specs.positions])


def all_gather_together(
    specs: Specs, tag: int, outputs: Sequence[Sequence[Tensor]], given: Sequence[Tensor], result: list[Tensor]
) -> Plan:
    """Gather several tensors of each rank in one op: `outputs[r][i]` becomes tensor i of rank r."""
    send = joined(given)
    host = torch.empty((specs.size, send.numel()), dtype=send.dtype, device="cpu")

    def script() -> Script:
        yield from all_gathered(specs, tag, send, host)
        for part, tensors in zip(host, outputs, strict=True):
            spread(part, tensors)
        return result

    return Plan(script())


def all_gather_wholes(specs: Specs, tag: int, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> Plan:
    """Gather several tensors of each rank in one op: `outputs[i]` becomes tensor i of all ranks.

    Those of different dtypes travel as bytes.
    """
    is_one_dtype = all(each.dtype is given[0].dtype for each in given)
    parts = list(given) if is_one_dtype else [as_bytes(each) for each in given]
    send = joined(parts)
    host = torch.empty((specs.size, send.numel()), dtype=send.dtype, device="cpu")

    def script() -> Script:
        yield from all_gathered(specs, tag, send, host)
        first = 0
        for output, part in zip(outputs, parts, strict=True):
            gathered = host[:, first : first + part.numel()].clone(memory_format=torch.contiguous_format)
            put_back(output, gathered.view(-1).view(output.dtype).view(output.shape))
            first += part.numel()
        return list(outputs)

    return Plan(script())


def reduce_scatter(specs: Specs, tag: int, output: Tensor, given: Tensor, reduction: Reduction) -> Plan:
    """Reduce `given`, which has a part for each rank, and put this rank's part of the result into `output`."""
    send, host = stand_in(given), room_for(output)
    if reduction.factor is not None:
        send = premultiplied(send, reduction.factor)

    def script() -> Script:
        yield from _reduce_scatter(specs, tag, send, host, reduction)
        put_back(output, host)
        return [output]

    return Plan(script(), host is output and reduction.fold is None)


def _reduce_scatter(specs: Specs, tag: int, send: Tensor, host: Tensor, reduction: Reduction) -> Script:
    if send.numel() == 0:
        yield [specs.barrier(tag)]
    elif reduction.fold is None and not overlap(send, host):
        if specs.order:
            send = send.view(specs.size, -1)[specs.order]
        parts, part = memory(arithmetic(send)), memory(arithmetic(host))
        yield [specs.reduce_scatter(tag, parts, part, reduction.op)]
    else:
        whole = torch.empty_like(send)
        yield from _reduce(specs, tag, send, whole, reduction)
        host.view(-1).copy_(whole.view(specs.size, -1)[specs.rank])


def overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two contiguous tensors have memory in common."""
    first, second = sorted((a, b), key=lambda tensor: int(tensor.data_ptr()))
    end: int = first.data_ptr() + first.numel() * first.element_size()
    start: int = second.data_ptr()
    return end > start


def reduce_scatter_lists(specs: Specs, tag: int, output: Tensor, given: Sequence[Tensor], reduction: Reduction) -> Plan:
    """Reduce a list of tensors, one for each rank, perhaps of different sizes."""
    if all(each.numel() == output.numel() for each in given):
        return reduce_scatter(specs, tag, output, joined(given), reduction)
    send, host = joined(given), room_for(output)
    if reduction.factor is not None:
        send = premultiplied(send, reduction.factor)
    first = sum(each.numel() for each in given[: specs.rank])

    def script() -> Script:
        whole = torch.empty_like(send)
        yield from _reduce(specs, tag, send, whole, reduction)
        host.view(-1).copy_(whole[first : first + host.numel()])
        put_back(output, host)
        return [output]

    return Plan(script())


def reduce_scatter_together(
    specs: Specs, tag: int, outputs: Sequence[Tensor], given: Sequence[Tensor], reduction: Reduction
) -> Plan:
    """Do several reduce_scatters in one op."""
    rows = [stand_in(each).reshape(specs.size, -1) for each in given]
    send = torch.cat(rows, dim=1)
    if reduction.factor is not None:
        send = premultiplied(send, reduction.factor)
    host = torch.empty(send.shape[1], dtype=send.dtype, device="cpu")

    def script() -> Script:
        yield from _reduce_scatter(specs, tag, send, host, reduction)
        spread(host, outputs)
        return list(outputs)

    return Plan(script())


def send(specs: Specs, tag: int, tensor: Tensor, to: int) -> Plan:
    host = stand_in(tensor)

    def script() -> Script:
        yield [specs.send(tag, memory(as_pairs(host)), to)]
        return [tensor]

    return Plan(script(), True)


def recv(specs: Specs, tag: int, tensor: Tensor, from_: int) -> Plan:
    host = room_for(tensor)

    def script() -> Script:
        yield [specs.recv(tag, memory(as_pairs(host)), from_)]
        put_back(tensor, host)
        return [tensor]

    return Plan(script(), host is tensor)


# Several tensors in one array.


def as_one_array(tensors: Sequence[Tensor], rows: tuple[int, int]) -> Tensor:
    """Return tensors that lie one behind the other (`tensors.is_one_array`) as the rows of one."""
    return tensors[0].detach().as_strided(rows, (rows[1], 1))


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return a new flat tensor on the host with the elements of all."""
    return torch.cat([stand_in(each).detach().reshape(-1) for each in tensors])


def spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the elements of a flat tensor into tensors, one after the other."""
    first = 0
    for tensor in tensors:
        put_back(tensor, flat[first : first + tensor.numel()].view(tensor.shape))
        first += tensor.numel()
