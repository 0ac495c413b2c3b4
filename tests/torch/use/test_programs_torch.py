"""torch's ways to train in parallel give on pccl what they give on Gloo."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("pccl.torch")

from tests.torch.use import ranks  # noqa: E402


def compare(pccl: Any, gloo: Any, name: str, tolerance: float) -> None:
    """Assert that two results are the same; with a tolerance where sums may have been formed in another order."""
    assert type(pccl) is type(gloo), name
    if isinstance(pccl, torch.Tensor):
        assert pccl.dtype == gloo.dtype, name
        torch.testing.assert_close(pccl, gloo, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")
    elif isinstance(pccl, dict):
        assert pccl.keys() == gloo.keys(), name
        for key, value in pccl.items():
            compare(value, gloo[key], f"{name}[{key!r}]", tolerance)
    elif isinstance(pccl, list | tuple):
        assert len(pccl) == len(gloo), name
        for number, value in enumerate(pccl):
            compare(value, gloo[number], f"{name}[{number}]", tolerance)
    elif isinstance(pccl, float):
        assert pccl == pytest.approx(gloo, rel=tolerance, abs=tolerance), name
    else:
        assert pccl == gloo, name


def check(program: str, world_size: int, folder: Path, tolerance: float) -> None:
    program = f"tests.torch.use.programs:{program}"
    on_gloo = ranks.run(program, "gloo", world_size, folder)
    on_pccl = ranks.run(program, "pccl", world_size, folder)
    compare(on_pccl, on_gloo, program, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "ddp",
        "ddp_hooks",
        "zero",
        "fsdp2",
        "dtensor",
        "checkpoint",
        "differentiable",
        "objects",
        "functional",
        "pipeline",
    ],
)
def test_two_ranks_equal_gloo(program: str, tmp_path: Path) -> None:
    check(program, 2, tmp_path, 0.0)  # a sum of two is the same in either order


@pytest.mark.slow
def test_four_ranks_close_to_gloo(tmp_path: Path) -> None:
    check("hsdp", 4, tmp_path, 1e-5)
