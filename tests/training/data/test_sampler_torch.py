"""Data parallelism on the samples of an `ElasticSampler`, through a DataLoader."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pccl import Communicator, MasterNode
from pccl.training import DDP, ElasticSampler
from tests.support.cluster import together
from tests.training.data.sampler_peers import SIZE, audited

torch = pytest.importorskip("torch")


class TorchPeer:
    def __init__(self, address: str, number: int, logs: Path, batch_size: int | None = 4, **options: Any) -> None:
        torch.manual_seed(0)
        self.module = torch.nn.Linear(1, 1)
        self.communicator = Communicator(address)
        self.sampler = ElasticSampler(SIZE, batch_size=batch_size, log=logs / f"{number}.jsonl", **options)
        self.loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.arange(SIZE).float()), batch_sampler=self.sampler
        )
        self.ddp = DDP(
            self.communicator,
            self.module,
            torch.optim.SGD(self.module.parameters(), lr=1e-5),
            shared={"sampler": self.sampler},
            bucket_bytes=1,
            admit_every=1,
            check_every=1,
        )

    def enter(self, peers_min: int = 1) -> TorchPeer:
        self.communicator.connect()
        self.ddp.join(peers_min)
        return self

    def backward(self, batch: Any) -> None:
        self.module(batch[:, None]).square().mean().backward()

    def run(self, *, epochs: int = 99, steps: int = 10**9) -> TorchPeer:
        while self.sampler.epoch < epochs and self.ddp.revision < steps:
            for (batch,) in self.sampler.track(self.loader):
                self.backward(batch)
                self.ddp.step()
                if self.ddp.revision >= steps:
                    break
        return self

    def close(self) -> None:
        self.communicator.close()
        self.sampler.close_log()


def cluster_of(master: MasterNode, count: int, logs: Path, **options: Any) -> list[TorchPeer]:
    peers = [TorchPeer(master.address, number, logs, **options) for number in range(count)]
    together([partial(peer.enter, count) for peer in peers])
    return peers


def test_accumulated_batches_are_one_step(master: MasterNode, tmp_path: Path) -> None:
    (peer,) = cluster_of(master, 1, tmp_path, samples_per_step=8)
    for number, (batch,) in enumerate(peer.loader):
        if number % 2 == 0:
            with peer.ddp.no_sync():
                peer.backward(batch)
        else:
            peer.backward(batch)
            peer.ddp.step()
    assert peer.ddp.revision == -(-SIZE // 8)
    peer.close()
    assert audited(tmp_path).epochs == 1


def test_abandoned_average_uses_its_samples(master: MasterNode, tmp_path: Path) -> None:
    peers = cluster_of(master, 2, tmp_path)

    def run(peer: TorchPeer) -> int:
        for number, (batch,) in enumerate(peer.loader):
            peer.backward(batch)
            peer.ddp.synchronize()
            if number == 2:  # a gradient that is out of bounds, say
                peer.ddp.zero_grad()
            else:
                peer.ddp.step()
        return peer.ddp.revision

    assert together([partial(run, peer) for peer in peers]) == [10, 10]
    together([peer.close for peer in peers])
    assert audited(tmp_path).steps == 11


def test_ddp_needs_samples_per_step(master: MasterNode) -> None:
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters())
    with pytest.raises(ValueError, match="create the ElasticSampler with samples_per_step, or with batch_size"):
        DDP(Communicator(master.address), module, optimizer, shared={"sampler": ElasticSampler(5)})
