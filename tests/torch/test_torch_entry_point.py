"""How torch comes to know the backend, and the example that uses it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import _pccl_torch  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def test_entry_point_registers_backend() -> None:
    points = list(entry_points(group="torch.backends", name="pccl"))
    assert points
    assert all(point.load() is _pccl_torch.register for point in points)
    assert torch.distributed.is_backend_available("pccl")


def test_registration_imports_little() -> None:
    tree = ast.parse(Path(_pccl_torch.__file__).read_text(encoding="utf-8"))
    taken = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {name.name for node in taken if isinstance(node, ast.Import) for name in node.names}
    modules |= {node.module for node in taken if isinstance(node, ast.ImportFrom) and node.module}
    assert modules == {"__future__", "collections.abc", "functools", "sys", "types", "typing", "warnings"}


def test_other_backends_unchanged(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch.distributed.monitored_barrier()
        with pytest.raises(RuntimeError, match="No device associated"):
            torch.distributed.split_group(split_ranks=[[0]])
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["pccl", "torchrun"])
def test_example_names_lost_rank(launcher: str) -> None:
    command = {
        "pccl": [sys.executable, "-P", "-m", "pccl", "launch", "-n", "2"],
        "torchrun": [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", "2"],
    }[launcher]

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = [*command, str(ROOT / "examples/torch_backend.py"), "--lose"]
    lost = subprocess.run(script, capture_output=True, text=True, timeout=120, env=environment)
    assert lost.returncode != 0
    assert "rank 1" in lost.stderr
    assert "BackendError" in lost.stderr
