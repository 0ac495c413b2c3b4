"""Checkpoints of torch models: runs that were stopped go on as if they had not been."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pccl import Communicator, MasterNode
from pccl.training import DDP, CheckpointError, DiLoCo, local_shard
from pccl.training.state import tensor_file
from tests.support.cluster import together

torch = pytest.importorskip("torch")

NOWHERE = "127.0.0.1:1"


def adamw(module: Any) -> Any:
    return torch.optim.AdamW(
        [{"params": module[0].parameters(), "lr": 1e-2}, {"params": module[1:].parameters()}], amsgrad=True
    )


def sgd(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, nesterov=True)


class DDPPeer:
    """A peer with running statistics, whose learning rate falls, which is in its optimizer's groups alone."""

    def __init__(self, address: str, number: int, optimizer: Callable[[Any], Any], dtype: Any = None) -> None:
        torch.manual_seed(0)
        self.module = with_statistics().to(dtype)
        self.optimizer = optimizer(self.module)
        self.communicator = Communicator(address)
        self.ddp = DDP(self.communicator, self.module, self.optimizer, bucket_bytes=40, check_every=1)
        self.number = number
        self.dtype = dtype
        self.digests: dict[int, str] = {}

    def enter(self) -> None:
        self.communicator.connect()
        self.ddp.join(2)

    def run(self, until: int, save: Path | None = None) -> None:
        while self.ddp.revision < until:
            generator = torch.Generator().manual_seed(1000 * self.number + self.ddp.revision)
            self.module(torch.randn(16, 4, generator=generator).to(self.dtype)).pow(2).mean().backward()
            self.ddp.step()
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.9
            self.digests[self.ddp.revision] = self.ddp.digest()
            if save is not None:
                self.ddp.save(save / str(self.number), keep=2, background=True)
        self.ddp.wait_for_save()


def cluster_of(
    master: MasterNode, optimizer: Callable[[Any], Any], dtype: Any = None, load: Path | None = None
) -> list[DDPPeer]:
    peers = [DDPPeer(master.address, number, optimizer, dtype) for number in range(2)]
    for peer in peers:
        if load is not None:
            peer.ddp.load(load / str(peer.number))
    together([peer.enter for peer in peers])
    return peers


def close(peers: list[DDPPeer]) -> None:
    together([peer.communicator.close for peer in peers])


@pytest.mark.parametrize(("optimizer", "dtype"), [(adamw, None), (sgd, None), (adamw, torch.bfloat16)])
def test_resumed_ddp_is_bit_identical(tmp_path: Path, optimizer: Any, dtype: Any) -> None:
    with MasterNode("127.0.0.1:0") as master:
        whole = cluster_of(master, optimizer, dtype)
        together([partial(peer.run, 7) for peer in whole])
        close(whole)
    with MasterNode("127.0.0.1:0") as master:
        first = cluster_of(master, optimizer, dtype)
        together([partial(peer.run, 4, tmp_path) for peer in first])
        close(first)
    assert sorted(path.name for path in (tmp_path / "1").iterdir()) == [
        f"step-{revision:09d}.safetensors" for revision in (3, 4)
    ]
    with MasterNode("127.0.0.1:0") as master:
        second = cluster_of(master, optimizer, dtype, tmp_path)
        assert [peer.ddp.revision for peer in second] == [4, 4]
        together([partial(peer.run, 7) for peer in second])
        close(second)
    for peer in second:
        assert peer.digests == {revision: whole[0].digests[revision] for revision in (5, 6, 7)}
        assert [group["lr"] for group in peer.optimizer.param_groups] == [
            group["lr"] for group in whole[0].optimizer.param_groups
        ]


@pytest.mark.parametrize("step", [3, None])
def test_ddp_peers_get_newest_checkpoint(tmp_path: Path, step: int | None) -> None:
    with MasterNode("127.0.0.1:0") as master:
        whole = cluster_of(master, adamw)
        together([partial(peer.run, 6) for peer in whole])
        close(whole)
    with MasterNode("127.0.0.1:0") as master:
        first = cluster_of(master, adamw)
        together([partial(peer.run, 4, tmp_path) for peer in first])
        close(first)
    with MasterNode("127.0.0.1:0") as master:
        second = [DDPPeer(master.address, number, adamw) for number in range(2)]
        second[0].ddp.load(tmp_path / "0")
        if step is not None:
            second[1].ddp.load(tmp_path / "1" / f"step-{step:09d}.safetensors")
        together([peer.enter for peer in second])
        together([partial(peer.run, 6) for peer in second])
        close(second)
    for peer in second:
        assert peer.digests == {revision: whole[0].digests[revision] for revision in (5, 6)}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_gpu_module_is_saved(tmp_path: Path) -> None:
    module = with_statistics().cuda()
    ddp = ddp_of(module)
    for _ in range(2):  # the second time into the same pinned memory
        digest = ddp.digest()
        ddp.save(tmp_path, background=True)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(1)
        ddp.wait_for_save()
        again = ddp_of(with_statistics().cuda())
        again.load(tmp_path)
        assert again.digest() == digest


def with_statistics() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


def diloco_of(module: Any) -> Any:
    return DiLoCo(Communicator(NOWHERE), module, torch.optim.AdamW(module.parameters()), buffers="local")


def ddp_of(module: Any) -> Any:
    return DDP(Communicator(NOWHERE), module, torch.optim.AdamW(module.parameters()))


def test_mismatched_checkpoint_changes_no_state(tmp_path: Path) -> None:
    first = diloco_of(with_statistics())
    first._state.revision = 3
    first._parameters += 1
    first.save(tmp_path)
    module = with_statistics()
    groups = [{"params": [parameter]} for parameter in module.parameters()]
    other = DiLoCo(Communicator(NOWHERE), module, torch.optim.AdamW(groups))
    before = other.digest()
    with pytest.raises(CheckpointError, match=r"the inner optimizer rejects its saved state: .*groups"):
        other.load(tmp_path)
    module = with_statistics()
    module.register_buffer("odd", torch.zeros(2))
    more = diloco_of(module)
    with pytest.raises(CheckpointError, match="tensor 'odd' is only here"):
        more.load(tmp_path)
    assert other.digest() == before


def test_every_dtype_round_trips(tmp_path: Path) -> None:
    names = ["float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool", "uint8", "int8", "int64"]
    names += ["uint16", "float8_e4m3fn", "float8_e5m2"]
    state = {name: torch.ones(3, 2).to(getattr(torch, name)) for name in names if hasattr(torch, name)}
    state |= {
        "transposed": torch.arange(6).view(2, 3).T,
        "scalar": torch.tensor(2.5),
        "conj": torch.ones(2, dtype=torch.complex64).conj() * 1j,
    }
    state |= {"conjugated": (torch.ones(2, dtype=torch.complex64) * 1j).conj(), "empty": torch.zeros(0, 3)}

    class Inner:
        loaded: Any = None

        def state_dict(self) -> Any:
            return state

        def load_state_dict(self, state: Any) -> None:
            self.loaded = state

    inner = Inner()
    diloco = DiLoCo(Communicator(NOWHERE), torch.nn.Linear(2, 2), inner)
    for background in (False, True):
        diloco.save(tmp_path, background=background)
        diloco.wait_for_save()
        diloco.load(tmp_path)
        for name, tensor in state.items():
            assert inner.loaded[name].dtype == tensor.dtype
            assert torch.equal(inner.loaded[name].to(torch.complex128), tensor.to(torch.complex128)), name


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_optimizer_round_trips(mesh: Any, tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    def trained(steps: int) -> tuple[DiLoCo, Any]:
        torch.manual_seed(0)
        module = torch.nn.Linear(4, 2)
        fully_shard(module, mesh=mesh)
        optimizer = torch.optim.AdamW(module.parameters())
        for _ in range(steps):
            module(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        return DiLoCo(Communicator(NOWHERE), module, optimizer), optimizer

    first, optimizer = trained(2)
    first.save(tmp_path, background=True)
    first.wait_for_save()
    second, other = trained(0)
    second.load(tmp_path)
    moments = [each.state[each.param_groups[0]["params"][0]]["exp_avg"] for each in (optimizer, other)]
    assert type(moments[0]) is type(moments[1])
    assert moments[0].placements == moments[1].placements
    assert moments[0].shape == moments[1].shape
    assert torch.equal(local_shard(moments[0]), local_shard(moments[1]))
    plain = torch.nn.Linear(4, 2)
    path = next(tmp_path.iterdir())
    contents = tensor_file.read(path)
    manifest = json.loads(contents.metadata["pccl"])
    assert manifest["shards"]["inner/state/0/exp_avg"][0] == "shard (0,) of (1,) (Shard(dim=0),)"
    with pytest.raises(CheckpointError, match=r"sharded tensor|another model"):
        diloco_of(plain).load(tmp_path)
