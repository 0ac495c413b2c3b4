"""Parameters moved where torch has them, against what the CPU's kernel does, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from pccl import signs
from pccl.training.spsa import grid as elements
from pccl.training.spsa.grid import Grid, HostElements, TorchElements
from tests.native.sign_cases import SignCase, sign_cases

torch = pytest.importorskip("torch")

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
    ),
]
every_device = pytest.mark.parametrize("device", DEVICES)


@every_device
@settings(max_examples=40, deadline=None)
@given(sign_cases(2000, 2**21))
def test_the_same_bits_are_added(device: str, case: SignCase) -> None:
    values = case.values()
    there = torch.from_numpy(values.copy()).to(device)
    signs.add_signs(values, case.quantum, **case.numbers())
    elements.add_torch_signs(torch, there, case.quantum, **case.numbers())
    assert there.cpu().numpy().tobytes() == values.tobytes()


@every_device
def test_chunks_go_on_with_the_counter(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: Any = {"seed": 3, "tensor": 1, "step": 2, "directions": [5, 6], "amounts": [1, -7]}
    whole, parts = torch.zeros(1000, device=device), torch.zeros(1000, device=device)
    elements.add_torch_signs(torch, whole, 1.0, **numbers)
    monkeypatch.setattr(elements, "TORCH_CHUNK", 256)
    elements.add_torch_signs(torch, parts, 1.0, **numbers)
    assert torch.equal(whole, parts)


@every_device
def test_a_grid_is_the_same_wherever_its_tensors_are(device: str) -> None:
    random = np.random.default_rng(1)
    arrays = [random.standard_normal(size).astype(np.float32) * 30 for size in (5000, 1, 0)]
    arrays[0][:4] = -0.0, 1e-30, -1e-40, 2.5
    tensors = [torch.from_numpy(array.copy()).to(device) for array in arrays]
    here = Grid(arrays, 1e-3, 7)
    there = Grid([TorchElements(torch, tensor) for tensor in tensors], 1e-3, 7)
    for step in range(30):
        for grid in (here, there):
            grid.displace(step, {3: 1})
            grid.displace(step, {3: -1})
            grid.update(step, {d: float(np.random.default_rng([step, d]).normal(0, 40)) for d in range(3)})
        assert here.exponents.tolist() == there.exponents.tolist()
        for array, tensor in zip(arrays, tensors, strict=True):
            assert tensor.cpu().numpy().tobytes() == array.tobytes()


@every_device
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_elements_that_are_not_finite_are_seen(device: str, wrong: float) -> None:
    values = np.array([1, wrong, -3], np.float32)
    assert not np.isfinite(HostElements(values).largest())
    assert not np.isfinite(TorchElements(torch, torch.from_numpy(values).to(device)).largest())


def test_a_device_that_computes_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "_checked", set())
    monkeypatch.setattr(elements, "MASK", 2**31 - 1)
    with pytest.raises(ValueError, match="cpu computes other random signs"):
        TorchElements(torch, torch.zeros(3))
