"""`python -m tests.wan -- sync`: the command that the figures of state transfers come from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
BYTES = 8_000_000


@pytest.mark.slow
def test_every_donor_feeds_a_joiner() -> None:
    lab = ["--hosts", "4", "--delay-ms", "5", "--rate-mbit", "100", "--site", "3:1000/1000"]
    command = [sys.executable, "-m", "tests.wan", *lab, "--", "sync", "--megabytes", str(BYTES // 1_000_000)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    *donors, joiner = sorted(map(json.loads, done.stdout.splitlines()), key=lambda found: found["host"])
    assert [donor["host"] for donor in donors] == [0, 1, 2]
    assert {donor["digest"] for donor in donors} == {joiner["digest"]}
    assert joiner["rx_bytes"] == BYTES
    assert all(donor["tx_bytes"] > 0 for donor in donors)
    assert sum(donor["tx_bytes"] for donor in donors) >= BYTES
