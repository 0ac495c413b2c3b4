"""Ordinary scripts, with plain arguments, that must not part the peers: schedules of newcomers, BatchNorm."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from pccl import Communicator, MasterNode
from pccl.training import DDP, DiLoCo
from tests.support.cluster import Background, together, until
from tests.training.consistency.contract_peers import new_module

torch = pytest.importorskip("torch")


class Script:
    """A peer's own loop, with a learning rate that it lowers after each step."""

    def __init__(self, address: str, number: int) -> None:
        self.number = number
        self.module = new_module(torch)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.communicator = Communicator(address)
        self.worlds: list[int] = []
        self.states: dict[int, Any] = {}

    def loss(self, step: int) -> Any:
        inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(100 * self.number + step)) + self.number
        return (self.module(inputs) - inputs[:, :2]).pow(2).mean()

    def values(self) -> list[bytes]:
        return [tensor.numpy().tobytes() for tensor in self.module.state_dict().values()]

    def ddp(self, peers_min: int, rounds: int) -> Script:
        ddp = DDP(self.communicator, self.module, self.optimizer, admit_every=1)
        self.communicator.connect()
        ddp.join(peers_min)
        while self.worlds.count(3) < rounds:
            self.loss(ddp.revision).backward()
            self.worlds.append(ddp.step().world_size)
            self.states[ddp.revision] = self.values(), ddp.digest()
            self.optimizer.param_groups[0]["lr"] *= 0.8
        return self

    def diloco(self, until: int) -> Script:
        diloco = DiLoCo(self.communicator, self.module, self.optimizer)
        self.communicator.connect()
        diloco.join(2)
        while diloco.revision < until:
            for step in range(2):
                self.optimizer.zero_grad()
                self.loss(step).backward()
                self.optimizer.step()
            diloco.outer_step()
            self.states[diloco.revision] = self.values(), diloco.digest()
        return self


def assert_alike(scripts: list[Script]) -> None:
    for revision in set().union(*(script.states for script in scripts)):
        states = [script.states[revision] for script in scripts if revision in script.states]
        assert all(state == states[0] for state in states), revision


def test_a_newcomer_has_the_learning_rate_of_the_others_with_ddp(master: MasterNode) -> None:
    scripts = [Script(master.address, number) for number in range(3)]
    threads = [Background(partial(script.ddp, 2, 6)) for script in scripts[:2]]
    until(lambda: all(len(script.worlds) > 4 for script in scripts[:2]), "five steps are made")
    scripts[2].ddp(1, 6)
    for thread in threads:
        thread.result()
    assert len({script.optimizer.param_groups[0]["lr"] for script in scripts}) == 1
    assert_alike(scripts)
    together([script.communicator.close for script in scripts])


def test_running_statistics_are_the_same_on_all_peers_with_diloco(master: MasterNode) -> None:
    scripts = [Script(master.address, number) for number in range(2)]
    together([partial(script.diloco, 3) for script in scripts])
    assert_alike(scripts)
    together([script.communicator.close for script in scripts])
