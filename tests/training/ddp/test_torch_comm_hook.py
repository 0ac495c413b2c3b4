"""torch's own DistributedDataParallel, each peer's over a process group of its own, averaging over pccl's peers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from pccl import Communicator, MasterNode, PCCLError, QuantizationOptions, Result, SharedState
from pccl.training import torch_comm_hook
from tests.support.cluster import Background, Cluster, together
from tests.training.test_ddp_torch import loss, new_module, new_optimizer, parameters

torch = pytest.importorskip("torch")

SMALL = 40
"""Bytes of a bucket, torch's and ours."""


@pytest.fixture(scope="module", autouse=True)
def _process_group() -> Iterator[None]:
    """Make a process group of this process alone; all peers in it share it, and never use it together."""
    if torch.distributed.is_initialized():
        yield
        return
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class HookPeer:
    def __init__(self, communicator: Communicator, number: int, **options: Any) -> None:
        self.number = number
        self.module = new_module()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.communicator = communicator
        self.state = SharedState.from_torch(self.module)
        self.model = torch.nn.parallel.DistributedDataParallel(self.module, bucket_cap_mb=SMALL / 2**20)
        options = {"bucket_bytes": SMALL, "revision": lambda: self.state.revision, **options}
        self.model.register_comm_hook(None, torch_comm_hook(communicator, self.model, **options))

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss(self.model, self.number, self.state.revision).backward()
        self.optimizer.step()
        self.state.revision += 1

    def run(self, until: int) -> None:
        while self.state.revision < until:
            self.step()


def cluster_of(master: MasterNode, count: int, **options: Any) -> tuple[Cluster, list[HookPeer]]:
    cluster = Cluster(master.address)
    cluster.join(count)
    return cluster, [HookPeer(communicator, number, **options) for number, communicator in enumerate(cluster.peers)]


def assert_equal(peers: list[HookPeer]) -> None:
    assert all(torch.equal(parameters(peer.module), parameters(peers[0].module)) for peer in peers)


def test_peers_equal_one_process_with_all_data(master: MasterNode) -> None:
    cluster, peers = cluster_of(master, 3)
    together([partial(peer.run, 4) for peer in peers])
    assert_equal(peers)
    module = new_module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        (sum(loss(module, number, step) for number in range(3)) / 3).backward()
        optimizer.step()
    torch.testing.assert_close(parameters(peers[0].module), parameters(module), rtol=1e-4, atol=1e-5)
    cluster.close_all()


def test_join_and_loss(master: MasterNode) -> None:
    cluster, peers = cluster_of(master, 3, quantization=QuantizationOptions())
    together([partial(peer.run, 2) for peer in peers])
    leaver = peers.pop()
    with leaver.model.no_sync():
        loss(leaver.model, 2, 2).backward()
    threads = [Background(partial(peer.run, 4)) for peer in peers]
    leaver.communicator.close()
    for thread in threads:
        thread.result()
    assert_equal(peers)
    # Whose first backward pass has other buckets than those of the others by now.
    cluster.peers.remove(leaver.communicator)
    (communicator,) = cluster.join()
    peers.append(HookPeer(communicator, 3, quantization=QuantizationOptions()))
    together([partial(peer.communicator.sync_shared_state, peer.state) for peer in peers])
    assert peers[-1].state.revision == 4
    together([partial(peer.run, 7) for peer in peers])
    assert_equal(peers)
    cluster.close_all()


def test_unsupported_models_are_refused(master: MasterNode) -> None:
    communicator = Communicator(master.address)
    module = new_module()
    wrap = torch.nn.parallel.DistributedDataParallel

    def hook(model: Any) -> Any:
        return torch_comm_hook(communicator, model, revision=lambda: 0)

    with pytest.raises(TypeError, match=r"must be a torch\.nn\.parallel\.DistributedDataParallel, not Sequential"):
        hook(module)
    for option in ("find_unused_parameters", "static_graph"):
        with pytest.raises(ValueError, match=rf"{option}=True: use pccl\.training\.DDP, which counts unused"):
            hook(wrap(module, **{option: True}))
    model = wrap(module)
    model.register_comm_hook(None, hook(model))
    with pytest.raises(PCCLError) as caught:
        loss(model, 0, 0).backward()
    assert caught.value.result is Result.NOT_INITIALIZED
    assert new_optimizer(module).state == {}
