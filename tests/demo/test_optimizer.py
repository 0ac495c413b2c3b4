"""The demo's optimizers against the formulas of their papers, written without regard for speed."""

from __future__ import annotations

import numpy as np
import pytest

from pccl.demo.optimizer import WARM_UP_STEPS, AdamW, AdamWOptions, cosine_scale
from pccl.training import OuterNesterov

RANDOM_SIZE = 50


def test_adamw_follows_the_paper() -> None:
    random = np.random.default_rng(0)
    o = AdamWOptions(learning_rate=0.1, beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.2)
    parameters = random.normal(size=RANDOM_SIZE)
    expected, mean, square = parameters.copy(), np.zeros(RANDOM_SIZE), np.zeros(RANDOM_SIZE)
    optimizer = AdamW(parameters, o)
    for step in range(1, 2 * WARM_UP_STEPS):
        gradient = random.normal(size=RANDOM_SIZE)
        rate = o.learning_rate * 0.5 * min(1.0, step / WARM_UP_STEPS)
        mean = o.beta1 * mean + (1 - o.beta1) * gradient
        square = o.beta2 * square + (1 - o.beta2) * gradient**2
        unbiased = mean / (1 - o.beta1**step), square / (1 - o.beta2**step)
        expected -= rate * o.weight_decay * expected
        expected -= rate * unbiased[0] / (np.sqrt(unbiased[1]) + o.epsilon)
        optimizer.step(parameters, gradient.copy(), scale=0.5)
        np.testing.assert_allclose(parameters, expected, rtol=1e-12)


def test_outer_step_is_nesterov_momentum() -> None:
    random = np.random.default_rng(1)
    outer = OuterNesterov(learning_rate=0.7, momentum=0.9)
    parameters, momentum = random.normal(size=RANDOM_SIZE), np.zeros(RANDOM_SIZE)
    expected, velocity = parameters.copy(), np.zeros(RANDOM_SIZE)
    for _ in range(5):
        gradient = random.normal(size=RANDOM_SIZE)
        velocity = 0.9 * velocity + gradient
        expected = expected - 0.7 * (gradient + 0.9 * velocity)
        outer.step(parameters, momentum, gradient.copy())
        np.testing.assert_allclose(parameters, expected, rtol=1e-12)
        np.testing.assert_allclose(momentum, velocity, rtol=1e-12)


def test_outer_step_without_momentum_and_rate_one_adopts_the_mean() -> None:
    shared = np.arange(4, dtype=np.float32)
    trained = np.array([[1, 1, 1, 1], [3, 3, 3, 5]], np.float32)
    OuterNesterov(1.0, 0.0).step(shared, np.zeros(4, np.float32), (shared - trained).mean(axis=0))
    assert shared.tolist() == [2, 2, 2, 3]


def test_optimizers_keep_float32() -> None:
    parameters, momentum = np.ones(3, np.float32), np.zeros(3, np.float32)
    AdamW(parameters).step(parameters, np.ones(3, np.float32))
    OuterNesterov().step(parameters, momentum, np.ones(3, np.float32))
    assert parameters.dtype == momentum.dtype == np.float32


def test_cosine_schedule() -> None:
    assert cosine_scale(0) == 1
    assert cosine_scale(0.5, floor=0.1) == pytest.approx(0.55)
    assert cosine_scale(1, floor=0.1) == cosine_scale(2, floor=0.1) == pytest.approx(0.1)
    scales = [cosine_scale(done / 10) for done in range(11)]
    assert scales == sorted(scales, reverse=True)
