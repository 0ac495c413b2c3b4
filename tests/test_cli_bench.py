"""`pccl bench` end to end, with the smallest work that passes through every part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pccl import MasterNode
from tests.crew import together
from tests.streams import TIMEOUT_S


def _bench(report: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pccl", "bench", "--json", str(report), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(report.read_text())


@pytest.mark.parametrize("quantization", ["none", "min-max", "zero-point-scale"])
def test_cases(tmp_path: Path, quantization: str) -> None:
    table, report = _bench(
        tmp_path / "report.json",
        *("--peers", "2,3", "--sizes", "4KiB,40KiB", "--tensors", "1,3", "--connections", "2"),
        *("--iterations", "3", "--warmup", "1", "--quantize", quantization),
    )
    cases = [(row["peers"], row["bytes"], row["tensors"]) for row in report["rows"]]
    assert cases == [(peers, size, tensors) for peers in (2, 3) for size in (4096, 40960) for tensors in (1, 3)]
    for row in report["rows"]:
        assert 0 < row["pccl"]["median_s"] <= row["pccl"]["p95_s"]
        assert row["per_cent_of_raw_ring"] == pytest.approx(100 * row["raw_ring"]["median_s"] / row["pccl"]["median_s"])
    assert "40 KiB" in table
    assert "…" not in table


def test_kill(tmp_path: Path) -> None:
    table, report = _bench(tmp_path / "report.json", "--kill", "--iterations", "5")
    verdicts = {survivor["verdict"] for survivor in report["survivors"]}
    assert len(report["survivors"]) == 2
    assert len(verdicts) == 1
    assert verdicts <= {"commit", "RANK_CONNECTION_LOST"}
    assert report["cost_s"] == pytest.approx(report["longest_gap_s"] - report["usual_step_s"])
    assert "the loss cost" in table


def test_one_peer_per_host(master: MasterNode, tmp_path: Path) -> None:
    """Two hosts' worth of processes: each reports the slowest rank's times, so both report the same."""

    def host(number: int) -> tuple[str, dict[str, Any]]:
        return _bench(
            tmp_path / f"{number}.json",
            *("--master", master.address, "--peers", "2", "--sizes", "4KiB,40KiB", "--tensors", "1,3"),
            *("--iterations", "3", "--warmup", "1"),
        )

    (table, report), (_, other) = together([lambda: host(0), lambda: host(1)])
    assert [(row["bytes"], row["tensors"]) for row in report["rows"]] == [(4096, 1), (4096, 3), (40960, 1), (40960, 3)]
    assert report["rows"] == other["rows"]
    assert all(row["raw_ring"] is None for row in report["rows"])
    assert "40 KiB" in table


def test_hosts_that_measure_different_things(master: MasterNode) -> None:
    def host(size: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "pccl", "bench", "--master", master.address, "--peers", "2"]
        return subprocess.run([*command, "--sizes", size], capture_output=True, text=True, timeout=TIMEOUT_S)

    hosts = together([lambda: host("4KiB"), lambda: host("8KiB")])
    assert [done.returncode for done in hosts] == [1, 1]
    assert all(done.stderr.startswith("pccl bench: ") and "INVALID_ARGUMENT" in done.stderr for done in hosts)


@pytest.mark.parametrize("arguments", [("--peers", "2,3"), ("--peers", "3", "--kill")])
def test_what_one_peer_cannot_measure(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-P", "-m", "pccl", "bench", "--master", "127.0.0.1:1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert "--master" in done.stderr


@pytest.mark.parametrize(
    "arguments", [("--peers", "1,2"), ("--sizes", "huge"), ("--tensors", "0"), ("--dtype", "float7")]
)
def test_bad_arguments(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pccl", "bench", *arguments], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 2
    assert f"argument {arguments[0]}: " in done.stderr


def test_a_size_that_cannot_be_cut() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pccl", "bench", "--sizes", "4B", "--tensors", "2"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert (done.returncode, done.stderr) == (
        1,
        "pccl bench: 4 bytes cannot be cut into 2 tensors of float32\n",
    )
