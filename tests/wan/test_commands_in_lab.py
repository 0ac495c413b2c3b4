"""`python -m tests.wan`: the commands behind the figures of the documentation."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support.cluster import until
from tests.wan.conftest import is_over

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0


def _wan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.wan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)


@pytest.mark.slow
def test_all_reduce(tmp_path: Path) -> None:
    """The benchmark checks every result that it times."""
    report = tmp_path / "report.json"
    done = _wan(
        *["--hosts", "3", "--delay-ms", "5", "--rate-mbit", "100", "--loss", "0.1%", "--"],
        *["bench", "--sizes", "4KiB,40KiB", "--tensors", "1,2", "--iterations", "2", "--warmup", "1", "--json"],
        str(report),
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())["rows"]
    cases = [(row["peers"], row["bytes"], row["tensors"]) for row in rows]
    assert cases == [(3, size, tensors) for size in (4096, 40960) for tensors in (1, 2)]
    # No answer of the master can be there sooner.
    assert all(row["pccl"]["median_s"] >= 0.01 for row in rows)


def test_a_command_on_every_host() -> None:
    code = "import os; print(os.environ['PCCL_HOST'] + ' ' + os.environ['PCCL_MASTER'] + '\\n', end='')"
    done = _wan(*["--hosts", "2", "--delay-ms", "1", "--"], sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 198.18.0.1:48148", "1 198.18.0.1:48148"]


@pytest.mark.slow
def test_failure_of_a_command_ends_the_others() -> None:
    command = 'if [ "$PCCL_HOST" = 1 ]; then exit 7; else sleep 1000; fi'
    assert _wan(*["--hosts", "2", "--"], "sh", "-c", command).returncode == 7


def test_ctrl_c_ends_all_processes() -> None:
    command = [sys.executable, "-m", "tests.wan", *["--hosts", "2", "--", "sh", "-c"], "echo $$; exec sleep 1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as wan:
        assert wan.stdout is not None
        pids = [int(wan.stdout.readline()) for _ in range(2)]
        wan.send_signal(signal.SIGINT)
        assert wan.wait(TIMEOUT_S) == 130
    for pid in pids:
        until(partial(is_over, pid), f"process {pid} ends with its lab")


@pytest.mark.slow
def test_probe() -> None:
    done = _wan(*["--delay-ms", "2", "--rate-mbit", "100", "--", "probe", "256KiB"])
    assert done.returncode == 0, done.stderr
    assert "round trip" in done.stdout
    assert "median" in done.stdout


@pytest.mark.slow
def test_sync_has_all_donors() -> None:
    lab = ["--hosts", "4", "--delay-ms", "5", "--rate-mbit", "100", "--site", "3:1000/1000"]
    done = _wan(*lab, "--", "sync", "--megabytes", "8")
    assert done.returncode == 0, done.stderr
    *donors, joiner = sorted(map(json.loads, done.stdout.splitlines()), key=lambda found: found["host"])
    assert [donor["host"] for donor in donors] == [0, 1, 2]
    assert {donor["digest"] for donor in donors} == {joiner["digest"]}
    assert joiner["rx_bytes"] == 8_000_000
    assert all(donor["tx_bytes"] > 0 for donor in donors)
    assert sum(donor["tx_bytes"] for donor in donors) >= 8_000_000


@pytest.mark.slow
def test_async_diloco_waits_less() -> None:
    """An all-reduce of 0.5 s is hidden behind inner steps of 1 s."""
    lab = ["--hosts", "3", "--delay-ms", "5", "--rate-mbit", "50"]
    overlap = [sys.executable, "-m", "tests.wan.overlap", "--hosts", "3", "--parameters", "600000", "--inner-s", "1"]
    done = _wan(*lab, "--", *overlap, "--steps", "4")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["DiLoCo waited_s"] > 0.5
    assert found["AsyncDiLoCo waited_s"] < found["DiLoCo waited_s"] / 2
