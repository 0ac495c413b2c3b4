"""Works: number, duration, result, registration in c10d."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch._C import _distributed_c10d as c10d  # noqa: E402

import pccl.torch.work  # noqa: E402
from tests.support.cluster import until  # noqa: E402
from tests.torch.ranks import run_ranks, worlds  # noqa: E402


def test_inflight_work_registered() -> None:
    tensor = torch.ones(2)

    def script(rank: int) -> bool:
        if rank == 1:
            dist.all_reduce(torch.ones(2))
            return True
        c10d._set_allow_inflight_collective_as_graph_input(True)
        try:
            before = c10d._get_work_registry_size()
            work = dist.all_reduce(tensor, async_op=True)
            assert c10d._get_work_registry_size() == before + 1
            work.wait()
            assert c10d._get_work_registry_size() == before
            return bool((tensor == 2).all())
        finally:
            c10d._set_allow_inflight_collective_as_graph_input(False)

    held = len(pccl.torch.work._in_registry)
    with worlds():
        assert run_ranks(2, script) == [True, True]
    assert len(pccl.torch.work._in_registry) == held


def test_wait_tensor_waits_for_work() -> None:
    def script(rank: int) -> list[float]:
        tensor = torch.ones(2)
        if rank == 1:
            dist.all_reduce(tensor)
            return [float(each) for each in tensor]
        c10d._set_allow_inflight_collective_as_graph_input(True)
        try:
            dist.all_reduce(tensor, async_op=True)  # no reference to the work
        finally:
            c10d._set_allow_inflight_collective_as_graph_input(False)
        torch.ops._c10d_functional.wait_tensor(tensor)
        return [float(each) for each in tensor]

    with worlds():
        assert run_ranks(2, script) == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("divides", [True, False])
def test_dropped_work_answers_ddp_join(divides: bool) -> None:
    """Without the division, DDP's reducer alone holds the work of each forward pass."""

    def script(rank: int) -> float:
        net = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(net.weight)
        ddp = torch.nn.parallel.DistributedDataParallel(net)
        with ddp.join(divide_by_initial_world_size=divides):
            for _ in range(1 + 2 * rank):
                net.zero_grad()
                ddp(torch.full((1, 2), 4.0)).sum().backward()
        return float(net.weight.grad[0, 0])

    with worlds():
        assert run_ranks(2, script) == [4.0, 2.0 if divides else 4.0]


def test_works_do_not_outlive_their_group() -> None:
    def works() -> int:
        gc.collect()
        return sum(issubclass(type(each), pccl.torch.work.PCCLWork) for each in gc.get_objects())

    before = works()
    with worlds():
        run_ranks(2, lambda _: dist.all_reduce(torch.ones(1)))
    until(lambda: works() <= before, "all works are freed")


@pytest.mark.parametrize("kind", ["ALLREDUCE", "FP16_COMPRESS"])
def test_built_in_hook_of_ddp(kind: str) -> None:
    def script(rank: int) -> list[list[float]]:
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))
        for _ in range(2):
            model.zero_grad()
            model(torch.full((2, 3), float(rank + 1))).sum().backward()
        gradient: list[list[float]] = model.module.weight.grad.tolist()
        return gradient

    with worlds():
        assert run_ranks(2, script) == [[[3.0] * 3] * 2] * 2


def test_threads_get_the_same_compiled_code() -> None:
    """Code that is freed before its futures end aborts the process."""
    pccl.torch.work._units.clear()
    arrived = threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        units = list(pool.map(lambda _: (arrived.wait(10), pccl.torch.work._typed())[1], range(8)))
    assert len({id(unit) for unit in units}) == 1


def test_future_of_half_tensors_is_the_tensor_list() -> None:
    def script(rank: int) -> bool:
        tensor = torch.ones(2, dtype=torch.half)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        (found,) = future.wait()
        return found.data_ptr() == tensor.data_ptr() and tensor.tolist() == [2, 2]

    with worlds():
        assert run_ranks(2, script) == [True, True]
