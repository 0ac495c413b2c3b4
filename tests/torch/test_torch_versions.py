"""Results are changes in place to autograd: a backward pass that has saved what a call overwrites raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from tests.torch.ranks import run_ranks, worlds  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of names that torch changes

SIZE = 3
WIDTH = 4


@pytest.fixture(scope="module", autouse=True)
def _each_thread_its_world() -> Any:
    with worlds():
        yield


class Tensors(NamedTuple):
    """What a call is given on one rank."""

    written: list[Any]
    read: list[Any]


def new(count: int = 1, width: int = WIDTH, dtype: Any = torch.float32) -> list[Any]:
    return [torch.ones(width, dtype=dtype) for _ in range(count)]


def only_at(root: int, rank: int, tensors: list[Any]) -> list[Any]:
    return tensors if rank == root else []


def at(root: int, rank: int, tensor: Any) -> Tensors:
    return Tensors([tensor], []) if rank == root else Tensors([], [tensor])


def everywhere_but_at(root: int, rank: int, tensor: Any) -> Tensors:
    return Tensors([], [tensor]) if rank == root else Tensors([tensor], [])


def call_on(call: Callable[[Any], Any], tensors: list[Any]) -> Tensors:
    call(tensors[0] if len(tensors) == 1 else tensors)
    return Tensors(tensors, [])


def all_reduce(_: int) -> Tensors:
    return call_on(dist.all_reduce, new())


def all_reduce_later(_: int) -> Tensors:
    return call_on(lambda tensor: dist.all_reduce(tensor, async_op=True).wait(), new())


def all_reduce_folded(_: int) -> Tensors:
    return call_on(lambda tensor: dist.all_reduce(tensor, dist.ReduceOp.BOR), new(dtype=torch.int64))


def all_reduce_coalesced(_: int) -> Tensors:
    return call_on(dist.all_reduce_coalesced, new(2))


def broadcast(rank: int) -> Tensors:
    (tensor,) = new()
    dist.broadcast(tensor, 1)
    return everywhere_but_at(1, rank, tensor)


def reduce(rank: int) -> Tensors:
    (tensor,) = new()
    dist.reduce(tensor, 1)
    return at(1, rank, tensor)


def all_gather(_: int) -> Tensors:
    given, outputs = new(), new(SIZE)
    dist.all_gather(outputs, given[0])
    return Tensors(outputs, given)


def all_gather_detached_views(_: int) -> Tensors:
    given, outputs = new(), [each.data for each in new(width=SIZE * WIDTH)[0].split(WIDTH)]
    dist.all_gather(outputs, given[0])
    return Tensors(outputs, given)


def all_gather_large(_: int) -> Tensors:
    given, outputs = new(width=1 << 17), new(SIZE, width=1 << 17)
    dist.all_gather(outputs, given[0])
    return Tensors(outputs, given)


def all_gather_into_tensor(_: int) -> Tensors:
    given, outputs = new(), new(width=SIZE * WIDTH)
    dist.all_gather_into_tensor(outputs[0], given[0])
    return Tensors(outputs, given)


def all_gather_coalesced(_: int) -> Tensors:
    given, outputs = new(2), [new(2) for _ in range(SIZE)]
    dist.all_gather_coalesced(outputs, given)
    return Tensors([each for one in outputs for each in one], given)


def reduce_scatter(_: int) -> Tensors:
    given, outputs = new(SIZE), new()
    dist.reduce_scatter(outputs[0], given)
    return Tensors(outputs, given)


def reduce_scatter_tensor(_: int) -> Tensors:
    given, outputs = new(width=SIZE * WIDTH), new()
    dist.reduce_scatter_tensor(outputs[0], given[0])
    return Tensors(outputs, given)


def gather(rank: int) -> Tensors:
    given, outputs = new(), only_at(1, rank, new(SIZE))
    dist.gather(given[0], outputs or None, 1)
    return Tensors(outputs, given)


def scatter(rank: int) -> Tensors:
    given, outputs = only_at(1, rank, new(SIZE)), new()
    dist.scatter(outputs[0], given or None, 1)
    return Tensors(outputs, given)


def all_to_all(_: int) -> Tensors:
    given, outputs = new(SIZE), new(SIZE)
    dist.all_to_all(outputs, given)
    return Tensors(outputs, given)


def all_to_all_single(_: int) -> Tensors:
    given, outputs = new(width=SIZE * WIDTH), new(width=SIZE * WIDTH)
    dist.all_to_all_single(outputs[0], given[0])
    return Tensors(outputs, given)


def between_two(send: Callable[[Any], Any], recv: Callable[[Any], Any], rank: int, **options: Any) -> Tensors:
    (tensor,) = new(**options)
    if rank == 0:
        send(tensor)
        return Tensors([], [tensor])
    if rank == 1:
        recv(tensor)
        return Tensors([tensor], [])
    return Tensors([], [])


def send_recv(rank: int) -> Tensors:
    return between_two(lambda tensor: dist.send(tensor, 1), lambda tensor: dist.recv(tensor, 0), rank)


def send_recv_later(rank: int) -> Tensors:
    return between_two(lambda each: dist.isend(each, 1).wait(), lambda each: dist.irecv(each, 0).wait(), rank)


def recv_from_any(rank: int) -> Tensors:
    found = between_two(lambda tensor: dist.send(tensor, 1), lambda tensor: dist.recv(tensor), rank)
    dist.barrier()  # a rank that leaves would fail the recv
    return found


CALLS = [
    *(all_reduce, all_reduce_later, all_reduce_folded, all_reduce_coalesced, broadcast, reduce, all_gather),
    *(all_gather_detached_views, all_gather_large, all_gather_into_tensor, all_gather_coalesced, reduce_scatter),
    *(reduce_scatter_tensor, gather, scatter, all_to_all, all_to_all_single, send_recv, send_recv_later, recv_from_any),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_versions_of_written_tensors(call: Callable[[int], Tensors]) -> None:
    def script(rank: int) -> tuple[list[int], list[int]]:
        found = call(rank)
        return [each._version for each in found.written], [each._version for each in found.read]

    for written, read in run_ranks(SIZE, script):
        assert 0 not in written
        assert not any(read)


def test_versions_in_group_of_one() -> None:
    def script(_: int) -> tuple[int, int, int]:
        (given,), (output,), (part,) = new(), new(), new()
        dist.all_gather_into_tensor(output, given)
        dist.reduce_scatter_tensor(part, given)
        return given._version, output._version, part._version

    ((given, output, part),) = run_ranks(1, script)
    assert (given, min(output, part)) == (0, 1)


def test_backward_of_overwritten_tensor_raises() -> None:
    def script(rank: int) -> None:
        for overwrite in (
            lambda saved: dist.all_reduce(saved),
            lambda saved: dist.all_gather_into_tensor(saved, torch.ones(1)),
            lambda saved: dist.all_to_all_single(saved, torch.ones(SIZE)),
        ):
            weights = torch.ones(SIZE, requires_grad=True)
            saved = torch.full((SIZE,), float(rank))
            product = (weights * saved).sum()
            overwrite(saved)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()

    run_ranks(SIZE, script)


def test_inference_tensors() -> None:
    def script(_: int) -> Any:
        with torch.inference_mode():
            (tensor,) = new()
            outputs = new(SIZE)
        dist.all_reduce(tensor)
        dist.all_gather(outputs, tensor)
        return outputs

    for outputs in run_ranks(SIZE, script):
        assert all(bool((each == SIZE).all()) for each in outputs)
