"""Peers that train a small NumPy model by SPSA, each towards a target of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from pccl import Communicator, MasterNode
from pccl.training import SPSA, SPSAOptions, SPSAStep
from tests.support.cluster import together
from tests.training.peers import Model, new_model

OPTIONS = SPSAOptions(learning_rate=0.3, unit=2.0**-8, seed=5)


def distance(model: Any, target: float) -> float:
    """A loss; `model` may hold torch parameters."""
    arrays = (np.asarray(array.detach().cpu() if hasattr(array, "detach") else array) for array in model.values())
    return float(sum(np.sum((array.astype(np.float64) - target) ** 2) for array in arrays)) / 40


class SPSAPeer:
    """A peer and all that it has seen."""

    def __init__(
        self,
        address: str,
        number: int,
        options: SPSAOptions = OPTIONS,
        *,
        model: Any = None,
        target: float | None = None,
        admit_every: int = 1,
        **arguments: Any,
    ) -> None:
        self.number = number
        self.target = number if target is None else target
        self.communicator = Communicator(address)
        self.model: Any = new_model() if model is None else model
        self.spsa = SPSA(self.communicator, self.model, options, admit_every=admit_every, **arguments)
        self.digests: dict[int, str] = {}
        """The weights' digest at each revision."""
        self.steps: list[SPSAStep] = []

    @property
    def worlds(self) -> list[int]:
        return [step.world_size for step in self.steps]

    @property
    def values(self) -> Model:
        return dict(self.model.named_parameters()) if hasattr(self.model, "named_parameters") else self.model

    def loss(self, direction: int = 0) -> float:
        return distance(self.values, self.target)

    def enter(self, peers_min: int = 1) -> SPSAPeer:
        self.communicator.connect()
        self.admission = self.spsa.join(peers_min)
        self.digests[self.spsa.revision] = self.spsa.digest()
        return self

    def step(self) -> SPSAStep:
        step = self.spsa.step(self.loss)
        self.steps.append(step)
        assert step.revision == self.spsa.revision
        self.digests[step.revision] = self.spsa.digest()
        return step

    def run(self, until: int | Callable[[SPSAPeer], bool]) -> SPSAPeer:
        while not until(self) if callable(until) else self.spsa.revision < until:
            self.step()
        return self

    def digest(self) -> str:
        return self.spsa.digest()

    def close(self) -> None:
        self.communicator.close()
        self.spsa.close_log()


def spsa_cluster(master: MasterNode, count: int, options: SPSAOptions = OPTIONS, **arguments: Any) -> list[SPSAPeer]:
    """Return `count` peers that have joined, numbered from 0."""
    peers = [SPSAPeer(master.address, number, options, **arguments) for number in range(count)]
    together([partial(peer.enter, count) for peer in peers])
    return peers


def each_runs(peers: Sequence[SPSAPeer], until: int | Callable[[SPSAPeer], bool]) -> None:
    together([partial(peer.run, until) for peer in peers])


def close(peers: Sequence[SPSAPeer]) -> None:
    together([peer.close for peer in peers])
