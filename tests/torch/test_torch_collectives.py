"""Each collective of c10d on pccl, against what its definition says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed import ReduceOp  # noqa: E402

import pccl.torch  # noqa: E402
from pccl import Communicator  # noqa: E402
from pccl.torch import BackendError, bootstrap  # noqa: E402
from pccl.torch.scheduler import Scheduler  # noqa: E402
from tests.support.cluster import until  # noqa: E402
from tests.torch.ranks import run_ranks, worlds  # noqa: E402

# torch has other names for two of them, which its older versions lack.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]

SIZE = 3
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
MOVED = [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.fixture(autouse=True)
def _worlds() -> Iterator[None]:
    with worlds():
        yield


def given(rank: int, dtype: Any = torch.float32, count: int = 6) -> Any:
    values = (torch.arange(count) + 1 + 2 * rank).view(2, -1)
    return (values % 2).bool() if dtype is torch.bool else values.to(dtype)


def raw(tensor: Any) -> Any:
    """Return something that compares like the tensor's bytes."""
    return tensor.contiguous().view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def equal(a: Any, b: Any) -> bool:
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def on_all(script: Callable[[int], bool], size: int = SIZE) -> None:
    assert run_ranks(size, script) == [True] * size


@pytest.mark.parametrize("size", [1, SIZE])
def test_reductions_of_numbers(size: int) -> None:
    def script(rank: int) -> bool:
        inputs = {dtype: [given(each, dtype) for each in range(size)] for dtype in FLOATS + INTEGERS}
        for dtype, tensors in inputs.items():
            for op, fold in [
                (ReduceOp.SUM, torch.add),
                (ReduceOp.PRODUCT, torch.mul),
                (ReduceOp.MIN, torch.minimum),
                (ReduceOp.MAX, torch.maximum),
            ]:
                tensor = tensors[rank].clone()
                dist.all_reduce(tensor, op)
                assert equal(tensor, reduce(fold, tensors)), (dtype, op)
            if dtype in FLOATS:
                tensor = tensors[rank].clone()
                dist.all_reduce(tensor, ReduceOp.AVG)
                assert torch.allclose(tensor.double(), sum(each.double() for each in tensors) / size, rtol=1e-2)
            else:
                for op, fold in [
                    (ReduceOp.BAND, torch.bitwise_and),
                    (ReduceOp.BOR, torch.bitwise_or),
                    (ReduceOp.BXOR, torch.bitwise_xor),
                ]:
                    tensor = tensors[rank].clone()
                    dist.all_reduce(tensor, op)
                    assert equal(tensor, reduce(fold, tensors)), (dtype, op)
        return True

    on_all(script, size)


def test_reductions_of_bools_complex_and_products() -> None:
    def script(rank: int) -> bool:
        bools = [given(each, torch.bool) for each in range(SIZE)]
        for op, fold in [
            (ReduceOp.SUM, torch.logical_or),
            (ReduceOp.MAX, torch.logical_or),
            (ReduceOp.PRODUCT, torch.logical_and),
            (ReduceOp.MIN, torch.logical_and),
            (ReduceOp.BXOR, torch.logical_xor),
        ]:
            tensor = bools[rank].clone()
            dist.all_reduce(tensor, op)
            assert equal(tensor, reduce(fold, bools)), op
        pairs = [torch.complex(given(each), -given(each)) for each in range(SIZE)]
        tensor = pairs[rank].clone()
        dist.all_reduce(tensor)
        assert equal(tensor, sum(pairs))
        scaled = torch.ones(4)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(2.5))
        assert scaled.tolist() == [2.5 * SIZE] * 4
        return True

    on_all(script)


@pytest.mark.parametrize("size", [1, SIZE])
def test_moves_of_any_dtype(size: int) -> None:
    def script(rank: int) -> bool:
        for dtype in MOVED:
            tensors = [given(each, dtype) for each in range(size)]
            mine = tensors[rank]
            shared = mine.clone()
            dist.broadcast(shared, size - 1)
            assert equal(shared, tensors[-1]), dtype
            listed = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(listed, mine)
            assert all(map(equal, listed, tensors)), dtype
            whole = torch.empty((2 * size, 3), dtype=dtype)
            dist.all_gather_into_tensor(whole, mine)
            assert equal(whole, torch.cat([raw(each) for each in tensors]).view(dtype)), dtype
            gathered = [torch.empty_like(mine) for _ in range(size)] if rank == 0 else None
            dist.gather(mine, gathered, dst=0)
            assert gathered is None or all(map(equal, gathered, tensors)), dtype
            part = torch.empty_like(mine)
            dist.scatter(part, tensors if rank == 0 else None, src=0)
            assert equal(part, tensors[rank]), dtype
            received = [torch.empty_like(mine) for _ in range(size)]
            dist.all_to_all(received, [mine.clone() for _ in range(size)])
            assert all(map(equal, received, tensors)), dtype
        return True

    on_all(script, size)


@pytest.mark.parametrize("count", [3, 300_000])
def test_scatter_of_tensors_in_place(count: int) -> None:
    def script(rank: int) -> bool:
        spread = torch.arange(2.0 * count)[::2]
        own = torch.full((count,), 7.0)
        memory = torch.arange(2.0 * count)
        given_by_root = [own, spread, *(torch.full((count,), float(each)) for each in range(2, SIZE))]
        output = own if rank == 0 else torch.empty(count)
        dist.scatter(output, given_by_root if rank == 0 else None, src=0)
        expected = [torch.full((count,), 7.0), spread, *given_by_root[2:]]
        assert equal(output, expected[rank])
        output = memory[1 : count + 1] if rank == 0 else torch.empty(count)
        parts = [memory[:count] for _ in range(SIZE)] if rank == 0 else None
        dist.scatter(output, parts, src=0)
        assert equal(output, torch.arange(1.0 * count))
        return True

    on_all(script)


@pytest.mark.parametrize("size", [1, SIZE])
def test_reduce_scatter(size: int) -> None:
    def script(rank: int) -> bool:
        lists = [[given(each) * (part + 1) for part in range(size)] for each in range(size)]
        expected = sum(each[rank] for each in lists)
        output = torch.empty(2, 3)
        dist.reduce_scatter(output, lists[rank])
        assert equal(output, expected)
        output.zero_()
        dist.reduce_scatter_tensor(output, torch.cat(lists[rank]))
        assert equal(output, expected)
        mine = given(rank)
        dist.reduce(mine, dst=size - 1, op=ReduceOp.MAX)
        assert equal(mine, given(size - 1) if rank == size - 1 else given(rank))
        uneven = [torch.full((part,), float(rank + 1)) for part in range(size)]
        output = torch.empty(rank)
        dist.reduce_scatter(output, uneven)
        assert output.tolist() == [size * (size + 1) / 2] * rank
        whole = torch.stack([given(each, torch.int32) for each in range(size)])
        output = torch.empty(2, 3, dtype=torch.int32)
        dist.reduce_scatter_tensor(output, whole, op=ReduceOp.BOR)
        return equal(output, given(rank, torch.int32))

    on_all(script, size)


def test_all_to_all() -> None:
    def script(rank: int) -> bool:
        tensor = torch.arange(SIZE * 2).view(SIZE, 2) + 100 * rank
        output = torch.empty_like(tensor)
        dist.all_to_all_single(output, tensor)
        expected = torch.stack([torch.arange(2) + 2 * rank + 100 * each for each in range(SIZE)])
        assert equal(output, expected)
        splits = list(range(SIZE))  # rank r gets r rows of everybody
        tensor = torch.full((sum(splits), 2), float(rank))
        output = torch.empty(rank * SIZE, 2)
        dist.all_to_all_single(output, tensor, [rank] * SIZE, splits)
        return output[:, 0].tolist() == [float(each) for each in range(SIZE) for _ in range(rank)]

    on_all(script)


def test_empty_tensors() -> None:
    def script(rank: int) -> bool:
        empty = torch.empty(0)
        dist.all_reduce(empty)
        dist.all_reduce(torch.empty(0, dtype=torch.int32), ReduceOp.BOR)
        dist.broadcast(empty, 1)
        dist.all_gather([torch.empty(0) for _ in range(SIZE)], empty)
        dist.all_gather_into_tensor(torch.empty(0), empty)
        dist.reduce_scatter_tensor(torch.empty(0), empty)
        dist.reduce(empty, 0)
        dist.gather(empty, [torch.empty(0) for _ in range(SIZE)] if rank == 0 else None, dst=0)
        dist.scatter(empty, [torch.empty(0) for _ in range(SIZE)] if rank == 0 else None, src=0)
        dist.all_to_all_single(torch.empty(0), empty)
        if rank < 2:
            (dist.send if rank == 0 else dist.recv)(empty, 1 - rank)
        return True

    on_all(script)


def test_tensors_with_gaps() -> None:
    def script(rank: int) -> bool:
        def column() -> Any:
            return (torch.arange(12.0).view(4, 3) + rank)[:, 1]

        expected = sum((torch.arange(12.0).view(4, 3) + each)[:, 1] for each in range(SIZE))
        for make in (column, lambda: column().expand(2, 4).t().clone().t()):
            tensor = make()
            dist.all_reduce(tensor)
            assert torch.equal(tensor, expected.expand_as(tensor))
        tensor = column()
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert torch.equal(tensor, expected)
        matrix = torch.zeros(SIZE, 4).t()
        dist.all_gather(list(matrix.unbind(1)), column())
        assert torch.equal(matrix, torch.stack([column() - rank + each for each in range(SIZE)], 1))
        tensor = column()
        dist.broadcast(tensor, 2)
        assert torch.equal(tensor, column() - rank + 2)
        turned = torch.complex(torch.ones(3), torch.full((3,), float(rank))).conj()
        outputs = [torch.empty(3, dtype=torch.complex64) for _ in range(SIZE)]
        dist.distributed_c10d._get_default_group().allgather([outputs], [turned]).wait()
        return [each[0].imag.item() for each in outputs] == [0.0, -1.0, -2.0]

    on_all(script)


def test_coalesced_collectives() -> None:
    def script(rank: int) -> bool:
        group = dist.distributed_c10d._get_default_group()
        tensors = [given(rank), given(rank, count=4)]
        group.allreduce_coalesced(tensors).wait()
        assert all(map(equal, tensors, [sum(given(r, count=n) for r in range(SIZE)) for n in (6, 4)]))
        lists = [[torch.empty(2, 3), torch.empty(2, 2)] for _ in range(SIZE)]
        group.allgather_coalesced(lists, [given(rank), given(rank, count=4)]).wait()
        assert all(equal(each[1], given(r, count=4)) for r, each in enumerate(lists))
        wholes = [torch.empty(2 * SIZE, 3), torch.empty(2 * SIZE, 2)]
        group.allgather_into_tensor_coalesced(wholes, [given(rank), given(rank, count=4)]).wait()
        assert equal(wholes[1], torch.cat([given(r, count=4) for r in range(SIZE)]))
        outputs = [torch.empty(2, 3), torch.empty(2, 2)]
        group.reduce_scatter_tensor_coalesced(
            outputs, [torch.cat([each] * SIZE) for each in (given(1), given(2, count=4))]
        )
        group.barrier().wait()
        assert equal(outputs[1], given(2, count=4) * SIZE)
        tensors = [given(rank), given(rank) * 2]
        group.allreduce(tensors).wait()
        assert all(equal(tensor, 3 * sum(given(r) for r in range(SIZE))) for tensor in tensors)
        with dist._coalescing_manager(async_ops=True) as manager:
            together = [given(rank), given(rank, count=8)]
            for tensor in together:
                dist.all_reduce(tensor)
        manager.wait()
        assert equal(together[1], sum(given(r, count=8) for r in range(SIZE)))
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            works = [given(rank), given(rank)]
            dist.broadcast(works[0], 0)
            dist.broadcast(works[1], 1)
        manager.wait()
        return equal(works[0], given(0)) and equal(works[1], given(1))

    on_all(script)


@pytest.mark.parametrize("dtypes", [(torch.float8_e4m3fn, torch.float8_e5m2), (torch.bool, torch.uint8)])
def test_dtype_mismatch_fails_on_all_ranks(dtypes: tuple[Any, Any]) -> None:
    def script(rank: int) -> bool:
        with pytest.raises(BackendError, match=f"of {dtypes[0]}"):
            dist.broadcast(torch.ones(2).to(dtypes[rank]), 0)
        return True

    on_all(script, 2)


def test_ring_order_differs_from_rank_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come in any order where PCCL_MASTER names a run."""

    def turned(*args: Any, place: int, **options: Any) -> Communicator:
        return Communicator(*args, place=SIZE - 1 - place, **options)

    monkeypatch.setattr(bootstrap, "Communicator", turned)

    def script(rank: int) -> bool:
        tensors = [given(each) for each in range(SIZE)]
        for root in range(SIZE):
            lists = [torch.empty(2, 3) for _ in range(SIZE)] if rank == root else None
            dist.gather(tensors[rank], lists, dst=root)
            assert lists is None or all(map(equal, lists, tensors))
            output = torch.empty(2, 3)
            dist.scatter(output, tensors if rank == root else None, src=root)
            assert equal(output, tensors[rank])
            dist.broadcast(output, root)
            assert equal(output, tensors[root])
        gathered = [torch.empty(2, 3) for _ in range(SIZE)]
        dist.all_gather(gathered, tensors[rank])
        assert all(map(equal, gathered, tensors))
        output = torch.empty(2, 3)
        dist.reduce_scatter(output, tensors)
        assert equal(output, SIZE * tensors[rank])
        parts = [torch.full((rank + each,), rank) for each in range(SIZE)]
        exchanged = [torch.empty(rank + each, dtype=torch.int64) for each in range(SIZE)]
        dist.all_to_all(exchanged, parts)
        return all(map(equal, exchanged, [torch.full((rank + each,), each) for each in range(SIZE)]))

    on_all(script)


def test_sparse_sum() -> None:
    def script(rank: int) -> bool:
        tensor = torch.sparse_coo_tensor([[rank, 0]], torch.tensor([1.0, rank + 1.0]), (5,))
        dist.all_reduce(tensor)
        dense = [torch.zeros(5) for _ in range(SIZE)]
        for each, row in enumerate(dense):
            row[each] += 1
            row[0] += each + 1
        return torch.equal(tensor.to_dense(), sum(dense))

    on_all(script)


def test_objects() -> None:
    def script(rank: int) -> bool:
        found: list[Any] = [None] * SIZE
        dist.all_gather_object(found, {"rank": rank, "text": "x" * rank})
        assert [each["rank"] for each in found] == list(range(SIZE))
        said = [{"from": 1}] if rank == 1 else [None]
        dist.broadcast_object_list(said, src=1)
        assert said == [{"from": 1}]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [f"for {each}" for each in range(SIZE)] if rank == 0 else None, src=0)
        assert mine == [f"for {rank}"]
        every: list[Any] | None = [None] * SIZE if rank == 0 else None
        dist.gather_object(rank * "a", every, dst=0)
        return every is None or every == ["", "a", "aa"]

    on_all(script)


def test_wrong_arguments_raise() -> None:
    def script(rank: int) -> bool:
        group = dist.distributed_c10d._get_default_group()
        one, two, other = torch.zeros(1), torch.zeros(2), torch.zeros(1, dtype=torch.float64)

        def refused(text: str, call: Callable[[], Any]) -> None:
            with pytest.raises(pccl.torch.ArgumentError, match=text) as caught:
                call()
            assert isinstance(caught.value, RuntimeError)
            assert isinstance(caught.value, ValueError)

        refused("requires non-empty tensor list", lambda: group.allreduce([]))
        refused("invalid tensor type", lambda: group.allreduce([one, other]))
        refused("invalid tensor size", lambda: group.allreduce([one, two]))
        refused("invalid root rank", lambda: group.broadcast(one, root=SIZE))
        refused("invalid root rank", lambda: group.reduce(one, root=-1))
        refused("same type", lambda: group._allgather_base(torch.zeros(SIZE), other))
        refused("world_size times", lambda: group._allgather_base(torch.zeros(SIZE + 1), one))
        refused("world_size times", lambda: group._reduce_scatter_base(one, torch.zeros(SIZE + 1)))
        refused("invalid output tensor list", lambda: group.allgather([[one] * (SIZE + 1)], [one]))
        refused("group size", lambda: group.alltoall_base(two, two, [], []))
        refused("total dim 0 size", lambda: group.alltoall_base(two, two, [1] * SIZE, [1] * SIZE))
        refused("Incorrect output list size", lambda: group.gather([[one]], [one], root=rank))
        refused(
            "requires empty input on non-root", lambda: group.scatter([one], [[one] * SIZE], root=(rank + 1) % SIZE)
        )
        refused("float8", lambda: group.allreduce(torch.zeros(2).to(torch.float8_e5m2)))
        refused("bitwise", lambda: group.allreduce(one, op=ReduceOp.BAND))
        refused("bool", lambda: group.allreduce(torch.zeros(1, dtype=torch.bool), op=ReduceOp.AVG))
        refused("unsupported layout", lambda: group.broadcast(torch.zeros(2, 2).to_sparse(), root=0))
        refused("unsupported device", lambda: group.allreduce(torch.zeros(1, device="meta")))
        with pytest.raises(ValueError, match="complex"):
            dist.all_reduce(torch.zeros(1, dtype=torch.complex64), ReduceOp.MAX)
        dist.all_reduce(one)  # none of these has counted as a call
        return True

    on_all(script)


def test_mismatched_calls_fail_on_all_ranks() -> None:
    def script(rank: int) -> str:
        with pytest.raises(pccl.torch.BackendError) as caught:
            dist.all_reduce(torch.zeros(2 + (rank == 1)))
        dist.barrier()  # the group goes on
        return str(caught.value)

    for text in run_ranks(SIZE, script):
        assert "INVALID_ARGUMENT" in text
        assert "rank 1" in text


def test_mismatch_is_shown_although_the_other_rank_has_left_since(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = Scheduler.failure

    def failure(scheduler: Scheduler, *arguments: Any) -> BackendError:
        if scheduler._names.rank == 0:
            until(lambda: scheduler.transport.present_ring() != scheduler.transport.ring, "rank 1 has left")
        return convert(scheduler, *arguments)

    monkeypatch.setattr(Scheduler, "failure", failure)

    def script(rank: int) -> bool:
        with pytest.raises(BackendError, match=f"rank {1 - rank} .* of {3 - rank} x float32") as caught:
            dist.all_reduce(torch.ones(2 + rank))
        return caught.value.lost == ()

    on_all(script, 2)


def test_overlapping_result_refused() -> None:
    def script(rank: int) -> list[str]:
        one = torch.ones(1)
        spread = one.expand(4) if rank == 0 else torch.ones(4)
        texts = []
        for call in (
            lambda: dist.all_reduce(spread),
            lambda: dist.broadcast(spread, 1),
            lambda: dist.all_gather([spread, torch.ones(4)], torch.ones(4)),
            lambda: dist.reduce_scatter_tensor(spread, torch.ones(8)),
            lambda: dist.scatter(spread, [torch.ones(4)] * 2 if rank == 0 else None),
            lambda: dist.recv(spread, 1),
        ):
            if rank == 0:
                with pytest.raises(ValueError, match="more than one element") as caught:
                    call()
                texts.append(str(caught.value))
        dist.broadcast(spread, 0)  # which only reads it there
        dist.all_reduce(torch.ones(3))
        return [*texts, str(one.item())]

    assert run_ranks(2, script)[0][-1] == "1.0"
