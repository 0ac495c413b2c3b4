"""Training of torch modules."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from pccl import Communicator, MasterNode
from pccl.training import DiLoCo
from pccl.training.state.replica import Replica, replica_of
from tests.support.cluster import together

torch = pytest.importorskip("torch")

INNER_STEPS = 4


def new_module(dtype: Any = None) -> Any:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    return module.to(dtype or torch.float32)


def inner_steps(module: Any, optimizer: Any, peer: int, step: int) -> None:
    random = torch.Generator().manual_seed(1000 * peer + step)
    for _ in range(INNER_STEPS):
        inputs = torch.randn(16, 6, generator=random)
        optimizer.zero_grad()
        parameter = next(module.parameters())
        (module(inputs.to(parameter.dtype)).float() - inputs[:, :2] * (1 + peer)).pow(2).mean().backward()
        optimizer.step()


def new_optimizer(module: Any) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


class TorchPeer:
    def __init__(self, address: str, number: int, dtype: Any = None) -> None:
        self.number = number
        self.module = new_module(dtype)
        self.optimizer = new_optimizer(self.module)
        self.communicator = Communicator(address)
        self.diloco = DiLoCo(self.communicator, self.module, self.optimizer)

    def enter(self, peers: int) -> None:
        self.communicator.connect()
        self.diloco.join(peers)

    def run(self, until: int) -> None:
        while self.diloco.revision < until:
            inner_steps(self.module, self.optimizer, self.number, self.diloco.revision)
            self.diloco.outer_step()


def run_of(master: MasterNode, steps: int, dtype: Any = None) -> list[TorchPeer]:
    peers = [TorchPeer(master.address, number, dtype) for number in range(2)]
    together([partial(peer.enter, 2) for peer in peers])
    together([partial(peer.run, steps) for peer in peers])
    return peers


def close(peers: list[TorchPeer]) -> None:
    together([peer.communicator.close for peer in peers])


def parameters(module: Any) -> Any:
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach()


def test_matches_torch_optimizers(master: MasterNode) -> None:
    peers = run_of(master, 3)
    outer = new_module()
    outer_optimizer = torch.optim.SGD(outer.parameters(), lr=1.0, momentum=0.8, nesterov=True)
    modules = [new_module() for _ in range(2)]
    optimizers = [new_optimizer(module) for module in modules]
    for step in range(3):
        for number, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
            module.load_state_dict(outer.state_dict())
            inner_steps(module, optimizer, number, step)
        for ours, *theirs in zip(outer.parameters(), *(module.parameters() for module in modules), strict=True):
            ours.grad = ours.detach() - sum(p.detach() for p in theirs) / 2
        outer_optimizer.step()
    for peer in peers:
        torch.testing.assert_close(parameters(peer.module), parameters(outer), rtol=1e-4, atol=1e-5)
    assert torch.equal(parameters(peers[0].module), parameters(peers[1].module))
    close(peers)


def test_frozen_parameters_are_not_sent(master: MasterNode) -> None:
    module = new_module()
    module[0].requires_grad_(False)
    diloco = DiLoCo(Communicator(master.address), module)
    assert diloco._parameters.size == 8 * 2 + 2
    with pytest.raises(ValueError, match="Sequential has no parameters that require gradients"):
        DiLoCo(Communicator(master.address), module.requires_grad_(False))


def test_tied_and_transposed_parameters(master: MasterNode) -> None:
    module = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    module[1].weight = module[0].weight
    with torch.no_grad():
        module[0].weight.data = torch.arange(9.0).view(3, 3).T
    communicator = Communicator(master.address)
    communicator.connect()
    diloco = DiLoCo(communicator, module)
    assert diloco._parameters.size == 9 + 3 + 3
    np.testing.assert_array_equal(diloco._parameters[:9], np.arange(9).reshape(3, 3).T.ravel())
    diloco.join()
    diloco.outer_step()
    assert module[0].weight[0].tolist() == [0, 3, 6]
    communicator.close()


def odd_module() -> Any:
    """Parameters of any memory layout: transposed, strided, a scalar, an empty one."""
    module = torch.nn.Module()
    module.transposed = torch.nn.Parameter(torch.zeros(5, 4).t())
    module.scalar = torch.nn.Parameter(torch.zeros(()))
    module.empty = torch.nn.Parameter(torch.zeros(0, 3))
    module.strided = torch.nn.Parameter(torch.zeros(6, 4)[:, ::2])
    return module


def odd_arrays() -> dict[str, Any]:
    return {name: parameter.detach().numpy() for name, parameter in odd_module().named_parameters()}


@pytest.mark.parametrize("count", [1, 2, 3, 40])
@pytest.mark.parametrize("make", [odd_module, odd_arrays])
def test_parts_cover_the_model(make: Any, count: int) -> None:
    replica: Replica = replica_of(make())
    parts = replica.split(count)
    assert len(parts) == count
    values = np.arange(replica.count, dtype=np.float32)
    ends = np.cumsum([part.count for part in parts])
    assert ends[-1] == replica.count == 33
    for part, end in zip(parts, ends, strict=True):
        part.write(values[end - part.count : end])
    found = np.empty_like(values)
    replica.read(found)
    np.testing.assert_array_equal(found, values)
    for part, end in zip(parts, ends, strict=True):
        out = np.full(part.count, 50, np.float32)
        part.difference(out, out)
        np.testing.assert_array_equal(out, 50 - values[end - part.count : end])
        part.read(out)
        np.testing.assert_array_equal(out, values[end - part.count : end])
    if count < 4:
        assert max(part.count for part in parts) <= replica.count / count + 5  # a row at most
