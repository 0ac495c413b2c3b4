"""DiLoCo in trainers that have loops of their own: their examples, by the commands that their docstrings give."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.streams import TIMEOUT_S

ROOT = Path(__file__).resolve().parents[2]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


@pytest.mark.parametrize("name", ["lightning", "accelerate", "transformers"])
def test_example(name: str) -> None:
    for module in ("torch", "sklearn", name):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    command = [sys.executable, "-P", "-m", "pccl", "launch", "-n", "2", "--fail-fast"]
    done = subprocess.run(
        [*command, f"examples/frameworks/with_{name}.py"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=ROOT,
        env={**os.environ, **OFFLINE},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if "outer step" in line] == [
        f"[0] outer step {number}: 2 peers, 69 kB sent" for number in range(1, 9)
    ]
    digests = [line.split()[-1] for line in lines if "] digest " in line]
    assert len(digests) == 2
    assert len(set(digests)) == 1
    shares = [float(line.split()[1].rstrip("%")) for line in lines if "% of the held-out digits" in line]
    assert len(shares) == 2
    assert min(shares) > 85
