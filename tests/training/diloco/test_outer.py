"""Outer optimizers: the papers' definitions, equal bits on all peers, and their state in checkpoints."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pccl import MasterNode
from pccl.training import AsyncDiLoCo, CheckpointError, DiLoCo, OuterAdam, OuterMomentum, OuterNesterov, OuterOptimizer
from tests.support.cluster import Background, together
from tests.training.peers import INNER_STEPS, Kind, Peer, assert_parity, cluster_of, each_runs

STEPS, COUNT = 6, 1001


class Schedule(OuterNesterov):
    def at(self, step: int) -> OuterOptimizer:
        return OuterNesterov(self.learning_rate / (1 + step), self.momentum)


OUTER = [OuterNesterov(0.5, 0.0), OuterMomentum(0.5, 0.8, 0.3), OuterAdam(0.02), Schedule(0.5, 0.0)]
each_outer = pytest.mark.parametrize("outer", OUTER, ids=lambda outer: type(outer).__name__)


def gradients() -> Any:
    return np.random.default_rng(3).standard_normal((STEPS, COUNT)) * np.logspace(-6, 1, COUNT)


def after(outer: OuterOptimizer, dtype: Any) -> Any:
    parameters = np.ones(COUNT, dtype)
    state = outer.state(parameters)
    for gradient in gradients().astype(dtype):
        outer.step(parameters, state, gradient)
    return parameters


def test_sgd_is_nesterov_without_momentum() -> None:
    expected = np.ones(COUNT)
    for gradient in gradients():
        expected -= 0.5 * gradient
    np.testing.assert_allclose(after(OUTER[0], np.float64), expected, rtol=1e-12)


def test_schedule_counts_outer_steps(master: MasterNode) -> None:
    peer = Peer(master.address, 1, outer=OUTER[-1]).enter()
    expected = peer.diloco.outer_parameters.astype(np.float64)
    for step in range(3):
        expected += 0.5 / (1 + step) * (1 - 0.9**INNER_STEPS) * (1 - expected)
        peer.run(step + 1)
        np.testing.assert_allclose(peer.diloco.outer_parameters, expected, rtol=1e-5)
    peer.close()


def test_momentum_is_that_of_slowmo_clipped_as_in_co2() -> None:
    """CO2's staleness penalty divides each gradient by 2; a constant one is a matter of rate and clip."""
    expected, momentum = np.ones(COUNT), np.zeros(COUNT)
    for gradient in gradients():
        momentum = np.minimum(np.maximum(0.8 * momentum + gradient / 2, -0.15), 0.15)
        expected -= momentum
    np.testing.assert_allclose(after(OUTER[1], np.float64), expected, rtol=1e-12)
    assert (np.abs(after(OuterMomentum(0.5, 0.8), np.float64) - expected) > 0.1).any()


def test_adam_is_fedadam() -> None:
    beta1, beta2, tau = 0.9, 0.99, 1e-3
    expected, mean, square = np.ones(COUNT), np.zeros(COUNT), np.full(COUNT, tau**2)
    for gradient in gradients():
        delta = -gradient
        mean = beta1 * mean + (1 - beta1) * delta
        square = beta2 * square + (1 - beta2) * delta**2
        expected += 0.02 * mean / (np.sqrt(square) + tau)
    np.testing.assert_allclose(after(OUTER[2], np.float64), expected, rtol=1e-12)


@each_outer
def test_bits_do_not_depend_on_neighbours_or_alignment(outer: OuterOptimizer) -> None:
    """SIMD and scalar loops round alike: each element has the same bits in a whole vector and alone."""
    whole = after(outer, np.float32)
    inputs = gradients().astype(np.float32)
    for i in range(0, COUNT, 37):
        memory = np.zeros(2, np.float32)
        parameters = memory[1:]
        parameters[...] = 1
        state = outer.state(parameters)
        for gradient in inputs:
            outer.step(parameters, state, gradient[i : i + 1].copy())
        assert parameters[0] == whole[i]


@pytest.mark.parametrize("outer", [OuterNesterov(0.5, 0.8), OuterMomentum(0.5, 0.8)])
def test_look_ahead_is_a_step_of_the_momentum_alone(outer: OuterOptimizer) -> None:
    parameters, momentum, gradient = (np.random.default_rng(i).standard_normal(9) for i in range(3))
    expected, out = parameters.copy(), np.empty(9)
    outer.step(expected, momentum.copy(), np.zeros(9))
    outer.look_ahead(parameters, momentum, gradient, out)
    np.testing.assert_allclose(out, expected - gradient, rtol=1e-12)


@pytest.mark.parametrize("kind", [DiLoCo, AsyncDiLoCo])
@each_outer
def test_state_is_replicated_to_newcomers(master: MasterNode, outer: OuterOptimizer, kind: Kind) -> None:
    options = {"outer": outer, "check_every": 1}
    if kind is AsyncDiLoCo:
        options["fragments"] = 2
    peers = cluster_of(master, 2, kind, **options)
    each_runs(peers, 2)
    newcomer = Peer(master.address, 2, kind, **options)

    def three_have_met_twice(peer: Peer) -> bool:
        return peer.worlds.count(3) == 2

    threads = [Background(partial(peer.run, three_have_met_twice)) for peer in peers]
    newcomer.enter(3).run(three_have_met_twice)
    for thread in threads:
        thread.result()
    everybody = [*peers, newcomer]
    together([peer.diloco.finish for peer in everybody])
    together([peer.close for peer in everybody])
    assert_parity(everybody)


def test_state_of_adam_is_in_checkpoints(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    digests = []
    for saves_after in (2, None):
        with MasterNode("127.0.0.1:0") as master:
            peer = Peer(master.address, 0, outer=OuterAdam(0.1))
            if saves_after is None:
                peer.diloco.load(file)
            peer.enter()
            if saves_after is not None:
                peer.run(saves_after)
                peer.diloco.save(file)
            peer.run(4)
            digests.append(peer.diloco.digest())
            assert peer.diloco.outer_state()["momentum"].shape == (2, 40)
            peer.close()
    assert digests[0] == digests[1]
    other = Peer("127.0.0.1:1", 0)
    with pytest.raises(CheckpointError, match="another outer optimizer"):
        other.diloco.load(file)
    with pytest.raises(ValueError, match="another outer optimizer"):
        Peer("127.0.0.1:1", 0, outer=OuterAdam(0.1)).diloco.take_outer_state(other.diloco.outer_state())


@pytest.mark.parametrize(
    ("outer", "settings"),
    [
        (OuterMomentum, (0.0, 0.5)),
        (OuterMomentum, (0.5, 1.0)),
        (OuterMomentum, (0.5, 0.5, 0.0)),
        (OuterMomentum, (0.5, 0.5, math.nan)),
        (OuterAdam, (-1.0,)),
        (OuterAdam, (1.0, 1.0)),
        (OuterAdam, (1.0, 0.9, -0.1)),
        (OuterAdam, (1.0, 0.9, 0.99, 0.0)),
    ],
)
def test_invalid_settings(outer: Any, settings: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        outer(*settings)
