"""Parameters on a grid: additions can be undone in any order, with the same bits everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.training.spsa.grid import UNITS_MAX, Grid, Tensor
from pccl.training.spsa.spsa import MAGNITUDES, decode_gradient, encode_gradient

EPSILON = 1e-3


def tensors(seed: int = 0, scale: float = 1.0) -> list[Tensor]:
    random = np.random.default_rng(seed)
    normal = [random.standard_normal(size) * scale for size in (300, 4100, 1)]
    return [*(each.astype(np.float32) for each in normal), np.zeros(5, np.float32), np.zeros(0, np.float32)]


def bits(of: Sequence[Tensor]) -> bytes:
    return b"".join(each.tobytes() for each in of)


def assert_on_grid(grid: Grid, of: Sequence[Tensor]) -> None:
    for tensor, exponent in zip(of, grid.exponents.tolist(), strict=True):
        quanta = np.ldexp(tensor.astype(np.float64), -exponent)
        np.testing.assert_array_equal(quanta, np.rint(quanta))
        assert np.abs(quanta).max(initial=0) + EPSILON / 2.0**exponent <= UNITS_MAX


directions = st.integers(0, 2**32 - 1)


@settings(max_examples=40, deadline=None)
@given(
    st.floats(-20, 20).map(lambda power: 10.0**power),
    st.lists(st.dictionaries(directions, st.integers(-1, 1), max_size=2), max_size=4),
    st.dictionaries(directions, st.floats(-1e-2, 1e-2), max_size=4),
)
def test_displaced_grid_comes_home(scale: float, ways: list[dict[int, int]], coefficients: dict[int, float]) -> None:
    epsilon = scale * EPSILON
    there, stays = tensors(1, scale), tensors(1, scale)
    wanderer, other = Grid(there, epsilon, 7), Grid(stays, epsilon, 7)
    for factors in ways:
        wanderer.displace(3, factors)
        assert wanderer.is_home == (not any(factors.values()))
    updates = {d: coefficient * scale for d, coefficient in coefficients.items()}
    wanderer.update(3, updates)
    other.update(3, dict(reversed(updates.items())))
    assert wanderer.is_home
    assert bits(there) == bits(stays)
    wanderer.displace(4, {5: 1})
    wanderer.displace(4, {5: -1})
    wanderer.displace(4, {})
    assert bits(there) == bits(stays)


def test_tiny_updates_are_unbiased() -> None:
    one = [np.ones(1, np.float32)]
    grid = Grid(one, EPSILON, 3)
    quantum = 2.0 ** int(grid.exponents[0])
    moved = 0
    for step in range(4000):
        before = one[0][0]
        grid.update(step, {0: quantum / 8})
        moved += before != one[0][0]
    assert 400 < moved < 600


@pytest.mark.parametrize("stray", [0, 5])
def test_growing_elements_coarsen_the_grid(stray: int) -> None:
    """The second peer has joined a while ago, so it knows of a smaller bound than the first."""
    random = np.random.default_rng(stray)
    steps = [{d: float(random.normal(0.0, 3.0)) for d in range(3)} for _ in range(60)]
    first = tensors()
    old = Grid(first, EPSILON, 1)
    exponents = old.exponents.copy()
    for step in range(20):
        old.update(step, steps[step])
    second = tensors(9, 100.0)
    new = Grid(second, EPSILON, 1)
    for mine, theirs in zip(second, first, strict=True):
        mine[...] = theirs
    new.exponents[:] = old.exponents
    new.adopt()
    for step in range(20, 60):
        old.displace(step, {7: 1})
        old.update(step, steps[step])
        new.displace(step, {8: -1})
        if stray:
            new.displace(step, {})
        new.update(step, steps[step])
        assert bits(first) == bits(second)
        assert old.exponents.tolist() == new.exponents.tolist()
        assert_on_grid(old, first)
    assert (old.exponents[:4] > exponents[:4]).all()


def test_untrainable_models_are_refused() -> None:
    for wrong, reason in ((np.inf, "not finite"), (np.nan, "not finite"), (3e6, "vanish")):
        with pytest.raises(ValueError, match=reason):
            Grid([np.array([wrong], np.float32)], EPSILON, 0)


def test_divergence_raises() -> None:
    one = [np.ones(1, np.float32)]
    grid = Grid(one, EPSILON, 0)
    with pytest.raises(OverflowError, match="diverges"):
        grid.update(0, {0: 1e9})


def test_interrupted_pass_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    of = tensors()
    grid = Grid(of, EPSILON, 0)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("pccl.training.spsa.grid.add_signs", interrupted)
        with pytest.raises(KeyboardInterrupt):
            grid.displace(0, {0: 1})
    assert not grid.is_home
    with pytest.raises(RuntimeError, match="interrupted"):
        grid.displace(0, {})
    grid.adopt()
    assert grid.is_home


def test_gradient_byte() -> None:
    assert MAGNITUDES[:20] == (*range(17), 18, 20, 22)
    assert MAGNITUDES[-1] == 245760
    for code in range(256):
        assert encode_gradient(decode_gradient(code, 0.25), 0.25) == (0 if code == 0x80 else code)
    assert decode_gradient(encode_gradient(1e9, 1.0), 1.0) == 245760
    assert decode_gradient(encode_gradient(-1e9, 1.0), 1.0) == -245760
    for value in np.geomspace(8, 245760, 1000).tolist():
        assert abs(decode_gradient(encode_gradient(-value, 1.0), 1.0) + value) <= value / 16
    for value in np.linspace(-8, 8, 100).tolist():
        assert abs(decode_gradient(encode_gradient(value, 1.0), 1.0) - value) <= 0.5
