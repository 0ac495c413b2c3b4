"""torch tensors in place of arrays: every dtype, shared states of modules, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pccl import (
    Communicator,
    DataType,
    PCCLError,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    Result,
    SharedState,
    TensorInfo,
)
from pccl._arrays import resolve
from pccl.training import DiLoCo, local_shard
from tests.support.cluster import Cluster, results, run_of

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with run_of(2) as cluster:
        yield cluster


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("dtype", DataType)
def test_all_reduce_of_each_dtype(pair: Cluster, dtype: DataType) -> None:
    assert DataType.from_torch_dtype(dtype.to_torch_dtype()) is dtype
    tensors = [torch.tensor([i, 2, 3]).to(dtype.to_torch_dtype()) for i in range(2)]
    pair.each(lambda peer, i: peer.all_reduce(tensors[i], op=ReduceOp.SUM))
    assert [tensor.to(torch.int64).tolist() for tensor in tensors] == [[1, 4, 6]] * 2


def test_tensor_and_array_in_one_op(pair: Cluster) -> None:
    arrays = [torch.ones(2, 4), np.ones((2, 4), np.float32)]
    pair.each(lambda peer, i: peer.all_reduce(arrays[i], op=ReduceOp.SUM))
    arrays[0] = arrays[0].view(4, 2)
    assert (
        results(pair.outcomes(lambda peer, i: peer.all_reduce(arrays[i], op=ReduceOp.SUM)))
        == [Result.INVALID_ARGUMENT] * 2
    )
    assert arrays[0].tolist() == [[2, 2]] * 4


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.qint8])
def test_other_torch_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=f"{dtype} cannot be reduced; use one of"):
        DataType.from_torch_dtype(dtype)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float8_e4m3fn, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2), (2, 0, 4)])
def test_tensors_of_any_dtype_and_shape(pair: Cluster, dtype: Any, shape: tuple[int, ...]) -> None:
    def tensor(rank: int) -> Any:
        return torch.full(shape, rank, dtype=torch.float32).to(dtype)

    def bits(array: Any) -> bytes:
        data: bytes = array.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return data

    def move(peer: Communicator, _: int) -> None:
        rank = peer.membership.rank
        gathered = peer.all_gather(tensor(rank)).array
        assert gathered.shape == (2, *shape)
        assert gathered.dtype is dtype
        assert bits(gathered) == bits(torch.stack([tensor(0), tensor(1)]))
        mine = tensor(rank)
        peer.broadcast(mine, root=1)
        assert bits(mine) == bits(tensor(1))
        mine = tensor(rank)
        if rank == 0:
            peer.send(mine, dst=1)
        else:
            peer.recv(mine, src=0)
        assert bits(mine) == bits(tensor(0))

    pair.each(move)


def test_lazy_views_are_refused(pair: Cluster) -> None:
    for tensor, says in (
        (torch.ones(3, dtype=torch.complex64).conj(), r"pass send.resolve_conj\(\).resolve_neg\(\)"),
        (torch._neg_view(torch.ones(3)), r"pass send.resolve_conj\(\).resolve_neg\(\)"),
    ):
        with pytest.raises(PCCLError, match=says) as caught:
            pair[0].all_gather(tensor)
        assert caught.value.result is Result.INVALID_ARGUMENT


@pytest.mark.usefixtures("place")
def test_parameters_and_gradients_are_reduced_in_place(pair: Cluster) -> None:
    parameters = [torch.nn.Parameter(torch.full((4,), float(i))) for i in range(2)]
    for parameter in parameters:
        (parameter * 3).sum().backward()
    pair.each(lambda peer, i: peer.all_reduce(parameters[i].grad, op=ReduceOp.AVG))
    pair.each(lambda peer, i: peer.all_reduce(parameters[i], op=ReduceOp.AVG))
    assert [parameter.grad.tolist() for parameter in parameters] == [[3.0] * 4] * 2
    assert [parameter.tolist() for parameter in parameters] == [[0.5] * 4] * 2


@pytest.mark.usefixtures("place")
def test_descriptors_of_tensors(pair: Cluster) -> None:
    tensors = [[torch.full((5,), float(tag)) for tag in range(3)] for _ in range(2)]
    pair.each(
        lambda peer, i: peer.all_reduce_multiple_with_retry(
            [
                ReduceOpDescriptor.from_torch(x, x, ReduceDescriptor(5, ReduceOp.SUM, tag))
                for tag, x in enumerate(tensors[i])
            ]
        )
    )
    assert [x[0].item() for x in tensors[0]] == [0, 2, 4]


@pytest.mark.usefixtures("place")
def test_shared_state_of_a_module(pair: Cluster) -> None:
    modules = [torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20)) for _ in range(2)]
    states = [SharedState.from_torch(module) for module in modules]
    states[0].revision = 4
    infos = pair.each(lambda peer, i: peer.sync_shared_state(states[i]))
    assert infos[1].rx_bytes > 0
    assert states[1].revision == 4
    for one, other in zip(modules[0].state_dict().values(), modules[1].state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_shared_state_of_tensors() -> None:
    tensor = torch.zeros(3, dtype=torch.bfloat16)
    assert repr(SharedState.from_torch({"x": tensor}).tensors) == "[TensorInfo('x', BFLOAT16, shape=[3])]"
    assert TensorInfo.from_torch(tensor, "x", allow_content_inequality=True).allow_content_inequality


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.zeros(4, 4).T[1:], "send is not contiguous; pass send.contiguous()"),
        (torch.zeros(8)[::2], "send is not contiguous"),
        (torch.zeros(8).to_sparse(), "has layout torch.sparse_coo"),
        (torch.zeros(8, device="meta"), "is on meta"),
        (torch.zeros(8, dtype=torch.complex64), "complex64"),
        (torch.zeros(8, dtype=torch.bool), "torch.bool"),
        (torch.zeros(3).expand(2, 3), "not contiguous"),
    ],
)
def test_tensors_that_cannot_be_reduced(pair: Cluster, tensor: Any, says: str) -> None:
    with pytest.raises(PCCLError) as caught:
        pair[0].all_reduce(tensor, op=ReduceOp.SUM)
    assert caught.value.result is Result.INVALID_ARGUMENT
    assert says in str(caught.value)


# Distributed tensors, in a process group of this process alone.


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.usefixtures("place")
def test_dtensor_is_refused_and_its_shard_is_not(pair: Cluster, mesh: Any) -> None:
    from torch.distributed import tensor as tensor_api

    tensor = tensor_api.distribute_tensor(torch.ones(4, 2), mesh, [tensor_api.Shard(0)])
    with pytest.raises(PCCLError, match="distributed tensor; pass its to_local"):
        pair[0].all_reduce(tensor, op=ReduceOp.SUM)
    tensors = [tensor, torch.full((4, 2), 2.0)]
    pair.each(lambda peer, i: peer.all_reduce(local_shard(tensors[i]), op=ReduceOp.SUM))
    assert torch.equal(tensor.full_tensor(), torch.full((4, 2), 3.0))
    partial = tensor_api.DTensor.from_local(torch.ones(2), mesh, [tensor_api.Partial()])
    with pytest.raises(ValueError, match="partial sums"):
        local_shard(partial)


def test_checkpoint_has_the_optimizer_of_a_sharded_module(mesh: Any, tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    def trained(steps: int) -> tuple[DiLoCo, Any]:
        torch.manual_seed(0)
        module = torch.nn.Linear(4, 2)
        fully_shard(module, mesh=mesh)
        optimizer = torch.optim.AdamW(module.parameters())
        for _ in range(steps):
            module(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        return DiLoCo(Communicator("127.0.0.1:1"), module, optimizer), optimizer

    first, optimizer = trained(2)
    first.save(tmp_path / "rank.safetensors")
    second, other = trained(0)
    second.load(tmp_path / "rank.safetensors")
    moments = [each.state[each.param_groups[0]["params"][0]]["exp_avg"] for each in (optimizer, other)]
    assert torch.equal(local_shard(moments[0]), local_shard(moments[1]))
    assert second.digest() == first.digest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_tensors_are_not_copied(dtype: Any) -> None:
    tensor = torch.arange(12, dtype=dtype).view(3, 4)
    for array in (tensor, tensor[1:], torch.nn.Parameter(tensor), tensor.detach()):
        operand = resolve(array, "send", "test")
        assert operand.address == array.data_ptr()
        assert operand.memory().tobytes() == array.detach().view(torch.uint8).numpy().tobytes()
        assert operand.device is None
