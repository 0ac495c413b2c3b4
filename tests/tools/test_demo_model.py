"""The demo's network and optimizer."""

from __future__ import annotations

import numpy as np
import pytest

from pccl.tools.demo.model import (
    NEWTON_SCHULZ,
    WARM_UP_STEPS,
    AdamW,
    ByteModel,
    Bytes,
    ModelShape,
    Muon,
    orthogonalized,
)

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


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_orthogonalized_moves_singular_values_by_the_polynomial(shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(1).standard_normal(shape)
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values /= np.linalg.norm(values)
    a, b, c = NEWTON_SCHULZ
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    np.testing.assert_allclose(orthogonalized(matrix), left @ np.diag(values) @ right, atol=1e-12)
    assert 0.6 < values.min() <= values.max() < 1.3
    assert not orthogonalized(np.zeros(shape)).any()


def test_muon_moves_matrices_and_adamw_the_rest() -> None:
    random = np.random.default_rng(0)
    parameters = random.normal(size=SMALL.size)
    start, rest = parameters.copy(), parameters.copy()
    optimizer, others = Muon(SMALL, parameters, learning_rate=0.1), AdamW(rest, learning_rate=0.1)
    matrices = (1, 3)
    expected = [SMALL.arrays(start)[index].copy() for index in matrices]
    means = [np.zeros_like(each) for each in expected]
    for step in range(1, 2 * WARM_UP_STEPS):
        gradient = random.normal(size=SMALL.size)
        rate = 3 * 0.1 * 0.5 * min(1.0, step / WARM_UP_STEPS)
        for index, matrix, mean in zip(matrices, expected, means, strict=True):
            slope = SMALL.arrays(gradient)[index]
            mean += 0.05 * (slope - mean)
            matrix *= 1 - rate * others.weight_decay
            outputs_by_inputs = matrix.shape[1] / matrix.shape[0]
            matrix -= rate * max(1, outputs_by_inputs) ** 0.5 * orthogonalized(0.05 * slope + 0.95 * mean)
        others.step(rest, gradient.copy(), scale=0.5)
        optimizer.step(parameters, gradient.copy(), scale=0.5)
    for index, array in enumerate(SMALL.arrays(parameters)):
        wanted = expected[matrices.index(index)] if index in matrices else SMALL.arrays(rest)[index]
        np.testing.assert_allclose(array, wanted, rtol=1e-10, atol=1e-10)


def test_muon_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch", "2.9")
    shape = ModelShape(context=1, embedding=8, hidden=16)
    random = np.random.default_rng(0)
    parameters = random.normal(size=shape.size).astype(np.float32)
    optimizer = Muon(shape, parameters, learning_rate=0.01)
    # torch's matrices multiply from the left.
    theirs = [torch.nn.Parameter(torch.from_numpy(shape.arrays(parameters)[index].T.copy())) for index in (1, 3)]
    peer = torch.optim.Muon(theirs, lr=0.03, weight_decay=AdamW.weight_decay)
    for step in range(1, 6):
        gradient = random.normal(size=shape.size).astype(np.float32)
        for parameter, index in zip(theirs, (1, 3), strict=True):
            parameter.grad = torch.from_numpy(shape.arrays(gradient)[index].T.copy())
        peer.param_groups[0]["lr"] = 0.03 * step / WARM_UP_STEPS
        peer.step()
        optimizer.step(parameters, gradient)
    for parameter, index in zip(theirs, (1, 3), strict=True):
        # torch orthogonalizes in bfloat16.
        np.testing.assert_allclose(parameter.detach().numpy().T, shape.arrays(parameters)[index], atol=2e-3)
