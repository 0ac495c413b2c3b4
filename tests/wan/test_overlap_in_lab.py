"""`python -m tests.wan.overlap` in a lab: the command that the figures of asynchronous DiLoCo come from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0


@pytest.mark.slow
def test_asynchronous_diloco_waits_less() -> None:
    """An all-reduce of 0.5 s is hidden behind inner steps of 1 s."""
    lab = ["--hosts", "3", "--delay-ms", "5", "--rate-mbit", "50"]
    overlap = [sys.executable, "-m", "tests.wan.overlap", "--hosts", "3", "--parameters", "600000", "--inner-s", "1"]
    command = [sys.executable, "-m", "tests.wan", *lab, "--", *overlap, "--steps", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["DiLoCo waited_s"] > 0.5
    assert found["AsyncDiLoCo waited_s"] < found["DiLoCo waited_s"] / 2
