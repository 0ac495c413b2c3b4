"""Peers that train a small torch module with BatchNorm, clipping and a scheduler, in any of the training classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pccl import Communicator
from pccl.training import DDP, SPSA, AsyncDiLoCo, DiLoCo, SPSAOptions

KINDS = ["ddp", "sync", "async", "fragments", "spsa"]
INNER_STEPS = 2


def new_module(torch: Any) -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


class ReplicatedPeer:
    """A peer and the digests it has seen. `step` does what a user's loop does for each step of the training class."""

    def __init__(self, torch: Any, address: str, number: int, kind: str, **options: Any) -> None:
        self.torch = torch
        self.number = number
        self.kind = kind
        self.module = new_module(torch)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.communicator = Communicator(address)
        shared = {"scheduler": self.scheduler} | ({"optimizer": self.optimizer} if kind == "spsa" else {})
        options = {"shared": shared, "check_every": 1, **options}
        self.training = self._new_training(options)
        self.digests: dict[tuple[int, int], str] = {}
        """The digests by revision and the scheduler's epoch: not every outer step has an update, but each has an
        epoch."""
        self.worlds: list[int] = []

    def _new_training(self, options: dict[str, Any]) -> Any:
        if self.kind == "ddp":
            options = {"bucket_bytes": 100, "admit_every": 1, **options}
            return DDP(self.communicator, self.module, self.optimizer, **options)
        if self.kind == "spsa":
            spsa = SPSAOptions(learning_rate=0.1, unit=2.0**-8, seed=5)
            return SPSA(self.communicator, self.module, spsa, **{"admit_every": 2, **options})
        if self.kind == "sync":
            return DiLoCo(self.communicator, self.module, self.optimizer, **options)
        fragments = 2 if self.kind == "fragments" else 1
        return AsyncDiLoCo(self.communicator, self.module, self.optimizer, **{"fragments": fragments, **options})

    def enter(self, peers_min: int = 1) -> ReplicatedPeer:
        self.communicator.connect()
        self.training.join(peers_min)
        self._note()
        return self

    def _note(self) -> None:
        self.digests[self.training.revision, self.scheduler.last_epoch] = self.training.digest()

    def inputs(self, direction: int = 0) -> Any:
        seed = 1000 * self.number + 10 * self.training.revision + direction
        return self.torch.randn(16, 6, generator=self.torch.Generator().manual_seed(seed)) + self.number

    def loss(self, direction: int = 0) -> Any:
        inputs = self.inputs(direction)
        return (self.module(inputs) - inputs[:, :2]).pow(2).mean()

    def step(self) -> Any:
        clip = self.torch.nn.utils.clip_grad_norm_
        if self.kind == "spsa":
            with self.torch.no_grad():
                step = self.training.step(lambda direction: float(self.loss(direction)))
            self.optimizer.step()  # for the scheduler; without gradients parameters stay
        elif self.kind == "ddp":
            self.loss().backward()
            self.training.synchronize()
            clip(self.module.parameters(), 1.0)
            step = self.training.step()
        else:
            for _ in range(INNER_STEPS):
                self.optimizer.zero_grad()
                self.loss().backward()
                clip(self.module.parameters(), 1.0)
                self.optimizer.step()
            step = self.training.outer_step()
        self._note()
        self.worlds.append(step.world_size)
        self.scheduler.step()
        return step

    def run(self, until: int | Callable[[ReplicatedPeer], bool]) -> ReplicatedPeer:
        while not until(self) if callable(until) else self.training.revision < until:
            self.step()
        return self

    def close(self) -> None:
        self.communicator.close()

    @property
    def running_mean(self) -> Any:
        return self.module[1].running_mean
