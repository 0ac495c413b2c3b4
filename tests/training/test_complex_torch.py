"""Complex parameters: trained as pairs of real numbers, with the same result as one process with all data."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pccl import Communicator, MasterNode
from pccl.training import DDP, SPSA, AsyncDiLoCo, DiLoCo, SPSAOptions
from tests.support.cluster import together

torch = pytest.importorskip("torch")

STEPS = 3
SEEDING = threading.Lock()
"""Threads share torch's generator."""


class Net(torch.nn.Module):  # type: ignore[misc,name-defined]
    def __init__(self) -> None:
        super().__init__()
        with SEEDING:
            torch.manual_seed(0)
            self.first = torch.nn.Linear(6, 4, dtype=torch.complex64)
            self.last = torch.nn.Linear(4, 2, dtype=torch.complex128)
            self.scale = torch.nn.Parameter(torch.tensor(1 + 1j))
            self.real = torch.nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        made = self.last((self.first(x.to(torch.complex64)) * self.scale).to(torch.complex128))
        return self.real(made.abs())


def loss(net: Any, peer: int, step: int) -> Any:
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(1000 * peer + step))
    return (net(inputs) - inputs[:, :2]).pow(2).mean()


def values(net: Any) -> Any:
    return torch.cat([torch.view_as_real(p.detach().to(torch.complex128)).reshape(-1) for p in net.parameters()])


def each(master: MasterNode, script: Any) -> list[Any]:
    def run(number: int) -> Any:
        communicator = Communicator(master.address)
        try:
            return script(communicator, number)
        finally:
            communicator.close()

    return together([partial(run, number) for number in range(2)])


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("weights", [False, True])
def test_ddp_equals_one_process(master: MasterNode, tmp_path: Path, kind: str, weights: bool) -> None:
    def optimizer_of(net: Any) -> Any:
        return getattr(torch.optim, kind)(net.parameters(), lr=1e-2)

    def script(communicator: Communicator, number: int) -> Any:
        net = Net()
        ddp = DDP(communicator, net, optimizer_of(net), bucket_bytes=100)
        communicator.connect()
        ddp.join(2)
        while ddp.revision < STEPS:
            loss(net, number, ddp.revision).backward()
            assert ddp.step(weight=2.0 if weights else None).world_size == 2
        ddp.save(tmp_path / str(number))
        return ddp.digest(), values(net), [p.dtype for p in net.parameters()]

    found = each(master, script)
    net = Net()
    optimizer = optimizer_of(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        (sum(loss(net, number, step) for number in range(2)) / 2).backward()
        optimizer.step()
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], values(net), rtol=1e-4, atol=1e-5)
    assert found[0][2] == [p.dtype for p in Net().parameters()]
    loaded = Net()
    ddp = DDP(Communicator(master.address), loaded, optimizer_of(loaded), bucket_bytes=100)
    assert ddp.load(tmp_path / "0")
    assert torch.equal(values(loaded), found[0][1])


@pytest.mark.parametrize("kind", [DiLoCo, AsyncDiLoCo])
def test_diloco_averages_complex_parameters(master: MasterNode, tmp_path: Path, kind: Any) -> None:
    def script(communicator: Communicator, number: int) -> Any:
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        diloco = kind(communicator, net, optimizer)
        communicator.connect()
        diloco.join(2)
        while diloco.revision < STEPS:
            optimizer.zero_grad()
            loss(net, number, diloco.revision).backward()
            optimizer.step()
            diloco.outer_step()
        diloco.finish()
        diloco.save(tmp_path / str(number))
        return diloco.digest(), values(net)

    found = each(master, script)
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.allclose(found[0][1], values(Net()))
    loaded = Net()
    diloco = kind(Communicator(master.address), loaded, torch.optim.AdamW(loaded.parameters()))
    assert diloco.load(tmp_path / "0")
    assert np.array_equal(values(loaded), found[0][1])


def test_spsa_refuses_complex_parameters(master: MasterNode) -> None:
    with pytest.raises(ValueError, match=r"'scale' is torch\.complex64"):
        SPSA(Communicator(master.address), Net(), SPSAOptions(learning_rate=0.1))
