"""Peers that train a small NumPy model in threads, and DiLoCo without a network to hold them against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from pccl import Communicator, MasterNode, PCCLError
from pccl.training import AsyncDiLoCo, DiLoCo, OuterNesterov, OuterStep
from tests.support.cluster import Background, refusal, together

Model: TypeAlias = dict[str, np.ndarray[Any, Any]]
Kind: TypeAlias = type[DiLoCo] | type[AsyncDiLoCo]

SHAPES = {"weights": (7, 5), "bias": (5,)}
INNER_STEPS = 3


def new_model() -> Model:
    random = np.random.default_rng(1)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def train(model: Model, number: int) -> None:
    """Inner steps towards a target of the peer's own."""
    for _ in range(INNER_STEPS):
        for array in model.values():
            array -= np.float32(0.1) * (array - np.float32(number))


class Peer:
    """A peer and all that it has seen."""

    def __init__(self, address: str, number: int, kind: Kind = DiLoCo, **options: Any) -> None:
        self.number = number
        self.communicator = Communicator(address)
        self.model = new_model()
        self.diloco = kind(self.communicator, self.model, **options)
        self.digests: dict[int, str] = {}
        """The outer state's digest at each revision."""
        self.steps: list[OuterStep] = []

    @property
    def worlds(self) -> list[int]:
        return [step.world_size for step in self.steps]

    def enter(self, peers_min: int = 1) -> Peer:
        self.communicator.connect()
        self.diloco.join(peers_min)
        self.digests[self.diloco.revision] = self.diloco.digest()
        return self

    def step(self) -> OuterStep:
        train(self.model, self.number)
        step = self.diloco.outer_step()
        self.steps.append(step)
        assert step.revision == self.diloco.revision
        self.digests[step.revision] = self.diloco.digest()
        return step

    def run(self, until: int | Callable[[Peer], bool], *, after: Callable[[Peer], object] = lambda peer: None) -> Peer:
        """Outer steps up to a revision, or to a condition on what all peers have seen alike; `after` after each."""
        while not until(self) if callable(until) else self.diloco.revision < until:
            self.step()
            after(self)
        return self

    def close(self) -> None:
        self.communicator.close()


def cluster_of(master: MasterNode, count: int, kind: Kind = DiLoCo, **options: Any) -> list[Peer]:
    """Return `count` peers that have joined, numbered from 0."""
    peers = [Peer(master.address, number, kind, **options) for number in range(count)]
    together([partial(peer.enter, count) for peer in peers])
    return peers


def each_runs(peers: Sequence[Peer], until: int | Callable[[Peer], bool]) -> None:
    together([partial(peer.run, until) for peer in peers])


class HasDigests(Protocol):
    digests: Any
    """The digests by revision, or by whatever tells states apart."""


def assert_parity(peers: Sequence[HasDigests]) -> None:
    """Every shared state that several peers have seen was the same."""
    for revision in set().union(*(peer.digests for peer in peers)):
        assert len({peer.digests[revision] for peer in peers if revision in peer.digests}) == 1, revision


def refused_while_others_train(
    master: MasterNode, peers: Sequence[Any], make: Callable[[Communicator], Any]
) -> PCCLError:
    """Return the error of a peer that comes to `peers` with something else to train; they let it in and go on alone."""

    def has_admitted(peer: Any) -> bool:
        return any(step.admitted for step in peer.steps[:-2])

    threads = [Background(partial(peer.run, has_admitted)) for peer in peers]
    stranger = Communicator(master.address)
    stranger.connect()
    error = refusal(make(stranger).join)
    for thread in threads:
        thread.result()
    assert_parity(peers)
    assert peers[0].worlds[-1] == 2
    together([peer.close for peer in peers])
    return error


def assert_close(model: Model, expected: Model) -> None:
    for name in SHAPES:
        np.testing.assert_allclose(model[name], expected[name], rtol=1e-5, atol=1e-5)


class Reference:
    """The outer optimizer in float64, written down from the paper."""

    def __init__(self, outer: OuterNesterov | None = None) -> None:
        self.outer = outer or OuterNesterov(1.0, 0.8)
        self.parameters = {name: array.astype(np.float64) for name, array in new_model().items()}
        self.momentum = {name: np.zeros(shape) for name, shape in SHAPES.items()}

    def pseudo_gradients(self, number: int) -> Model:
        local = {name: array.copy() for name, array in self.parameters.items()}
        train(local, number)
        return {name: self.parameters[name] - local[name] for name in SHAPES}

    def update(self, gradients: Sequence[Model]) -> None:
        """Update with the mean of all peers' pseudo-gradients."""
        for name in SHAPES:
            gradient = np.mean([each[name] for each in gradients], axis=0)
            self.momentum[name] = self.outer.momentum * self.momentum[name] + gradient
            self.parameters[name] = self.parameters[name] - self.outer.learning_rate * (
                gradient + self.outer.momentum * self.momentum[name]
            )

    def run(self, numbers: Sequence[int], steps: int) -> Model:
        """Synchronous DiLoCo of these peers."""
        for _ in range(steps):
            self.update([self.pseudo_gradients(number) for number in numbers])
        return self.parameters
