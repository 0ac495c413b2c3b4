"""The demo's network and optimizer."""

from __future__ import annotations

import numpy as np
import pytest

from pccl.tools.demo.model import WARM_UP_STEPS, AdamW, ByteModel, Bytes, ModelShape

SMALL = ModelShape(context=3, embedding=4, hidden=5)
STEP = 1e-5


def _batch(sequences: int = 3, positions: int = 4, context: int = SMALL.context) -> Bytes:
    return np.random.default_rng(7).integers(0, 256, (sequences, context + positions), np.uint8)


def _parameters() -> np.ndarray:
    # Not `initial`: there the output layer is zero, and with it most of the gradient.
    return np.random.default_rng(8).normal(0, 0.5, SMALL.size)


def test_gradient() -> None:
    batch, parameters = _batch(), _parameters()
    model = ByteModel(SMALL, parameters)
    gradient = np.full(SMALL.size, np.nan)
    model.loss_and_gradient(batch, gradient)

    # Each part in full but for embeddings of bytes that the batch does not have.
    chosen = np.flatnonzero(np.arange(SMALL.size) >= 256 * SMALL.embedding)
    used = np.unique(batch[:, :-1])
    chosen = np.concatenate([(used[:, None] * SMALL.embedding + np.arange(SMALL.embedding)).ravel(), chosen])
    scratch = np.empty(SMALL.size)
    measured = np.empty(chosen.size)
    for index, element in enumerate(chosen):
        value = parameters[element]
        parameters[element] = value + STEP
        above = model.loss_and_gradient(batch, scratch)
        parameters[element] = value - STEP
        below = model.loss_and_gradient(batch, scratch)
        parameters[element] = value
        measured[index] = (above - below) / (2 * STEP)
    np.testing.assert_allclose(gradient[chosen], measured, rtol=1e-6, atol=1e-9)

    unused = np.setdiff1d(np.arange(256), used)
    assert not gradient[: 256 * SMALL.embedding].reshape(256, -1)[unused].any()


def test_untrained_loss() -> None:
    shape = ModelShape()
    bits = ByteModel(shape, shape.initial(0)).bits_per_byte(_batch(40, 5, shape.context))
    assert bits == pytest.approx(8, abs=1e-5)


def test_prediction_depends_on_the_window() -> None:
    model = ByteModel(SMALL, _parameters())
    batch = _batch(sequences=1, positions=1)
    loss = model.bits_per_byte(batch)
    longer = np.concatenate([np.zeros((1, 1), np.uint8), batch], axis=1)
    assert model.bits_per_byte(longer[:, 1:]) == loss
    for position in range(SMALL.context + 1):
        changed = batch.copy()
        changed[0, position] ^= 1
        assert model.bits_per_byte(changed) != loss


def test_parts_cover_the_vector() -> None:
    flat = np.zeros(SMALL.size, np.float32)
    parts = SMALL.parts(flat)
    for number, part in enumerate(parts.values(), 1):
        assert part.flags.c_contiguous
        assert part.base is flat
        part += number
    assert flat.all()
    assert [int(part[0]) for part in parts.values()] == [1, 2, 3, 4]
    assert sum(array.size for array in SMALL.arrays(flat)) == SMALL.size


def test_initial_parameters_depend_on_the_seed() -> None:
    assert SMALL.initial(1).tobytes() == SMALL.initial(1).tobytes()
    assert SMALL.initial(1).tobytes() != SMALL.initial(2).tobytes()
    assert SMALL.initial(1).dtype == np.float32


def test_adamw() -> None:
    random = np.random.default_rng(0)
    parameters = random.normal(size=50)
    expected, mean, square = parameters.copy(), np.zeros(50), np.zeros(50)
    o = optimizer = AdamW(parameters, learning_rate=0.1)
    for step in range(1, 2 * WARM_UP_STEPS):
        gradient = random.normal(size=50)
        rate = o.learning_rate * 0.5 * min(1.0, step / WARM_UP_STEPS)
        mean = o.beta1 * mean + (1 - o.beta1) * gradient
        square = o.beta2 * square + (1 - o.beta2) * gradient**2
        unbiased = mean / (1 - o.beta1**step), square / (1 - o.beta2**step)
        expected -= rate * o.weight_decay * expected
        expected -= rate * unbiased[0] / (np.sqrt(unbiased[1]) + o.epsilon)
        optimizer.step(parameters, gradient.copy(), scale=0.5)
        np.testing.assert_allclose(parameters, expected, rtol=1e-12)
