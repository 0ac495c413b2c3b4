"""`pccl bench` end to end, with the smallest work that passes through every part."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pccl import MasterNode
from tests.conftest import Command
from tests.support.cluster import together
from tests.support.commands import ended


def _bench(report: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    done = ended("bench", "--json", str(report), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(report.read_text())


TINY = ("--iterations", "3", "--warmup", "1")


@pytest.mark.slow
def test_cases(tmp_path: Path) -> None:
    table, report = _bench(
        tmp_path / "report.json",
        *("--peers", "2,3", "--sizes", "4KiB,40KiB", "--tensors", "1,3", "--connections", "2", *TINY),
    )
    cases = [(row["peers"], row["bytes"], row["tensors"]) for row in report["rows"]]
    assert cases == [(peers, size, tensors) for peers in (2, 3) for size in (4096, 40960) for tensors in (1, 3)]
    for row in report["rows"]:
        assert 0 < row["pccl"]["median_s"] <= row["pccl"]["p95_s"]
        assert row["per_cent_of_raw_ring"] == pytest.approx(100 * row["raw_ring"]["median_s"] / row["pccl"]["median_s"])
        assert row["gloo"] is row["times_as_fast_as_gloo"] is row["memory"] is None
    assert "40 KiB" in table
    assert "2 connections, in place" in table
    assert "…" not in table


@pytest.mark.slow
def test_collectives(tmp_path: Path) -> None:
    unruled = ["all_to_all", "gather", "scatter", "reduce"]
    names = ["all_reduce", "all_gather", "reduce_scatter", *unruled, "broadcast", "send", "barrier"]
    table, report = _bench(
        tmp_path / "report.json",
        *("--peers", "3", "--sizes", "4KiB,1MiB", "--collective", ",".join(names), "--memory", *TINY),
    )
    cases = [(row["collective"], row["bytes"]) for row in report["rows"]]
    assert cases == [*itertools.product(names[:-1], [4096, 1 << 20]), ("barrier", 4096)]
    factors = {"all_reduce": 4 / 3, "broadcast": 1, "send": 1, "reduce": 1}
    factors |= dict.fromkeys(["all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"], 2 / 3)
    for row in report["rows"]:
        rate = factors.get(row["collective"], 0) * row["bytes"] / row["pccl"]["median_s"]
        assert row["pccl"]["bus_bytes_per_s"] == pytest.approx(rate)
        assert row["collective"] in unruled or row["raw_ring"]["median_s"] > 0
    for text in ["collectives of float32", *names]:
        assert text in table


QUANTIZATIONS = [
    *("min-max", "min-max:int16", "min-max:uint4:block=32", "min-max:int8:stochastic:seed=7"),
    *("zero-point-scale:int8", "zero-point-scale:uint16", "zero-point-scale:int4", "cast:bfloat16", "cast:float16"),
]


def test_encrypted(tmp_path: Path) -> None:
    table, report = _bench(tmp_path / "report.json", "--peers", "2", "--sizes", "400KiB", "--encrypt", *TINY)
    assert "encrypted" in table
    assert report["plan"]["encrypt"] is True
    assert report["rows"][0]["pccl"]["median_s"] > 0


@pytest.mark.slow
def test_sweep(tmp_path: Path) -> None:
    """Every result is checked against the bound of its quantization."""
    table, report = _bench(
        tmp_path / "report.json",
        *("--peers", "3", "--sizes", "40KiB", "--algorithm", "ring,direct", "--connections", "2", *TINY),
        *("--quantize", ",".join(["none", *QUANTIZATIONS])),
    )
    cases = [(row["quantization"], row["algorithm"]) for row in report["rows"]]
    assert cases == list(itertools.product(["none", *QUANTIZATIONS], ["ring", "direct"]))
    assert report["plan"]["quantizations"] == ["none", *QUANTIZATIONS]
    assert "3 peers" in table
    for text in ["algo", *QUANTIZATIONS]:
        assert text in table


@pytest.mark.slow
def test_out_of_place_and_memory(tmp_path: Path) -> None:
    table, report = _bench(
        tmp_path / "report.json",
        *("--peers", "2", "--sizes", "4KiB,4MiB", "--out-of-place", "--memory", *TINY),
    )
    assert "out of place" in table
    assert "scratch" in table
    for row in report["rows"]:
        assert row["memory"]["held_bytes_max"] >= row["memory"]["scratch_bytes_max"] >= 0


@pytest.mark.slow
def test_against_gloo_of_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="compares with torch's Gloo")
    table, report = _bench(
        tmp_path / "report.json",
        *("--peers", "2", "--sizes", "4KiB,40KiB", "--tensors", "1,3", "--against", "gloo", *TINY),
    )
    assert "Gloo/" in table
    assert report["machine"]["torch"] == importlib.metadata.version("torch")
    for row in report["rows"]:
        ratio = row["gloo"]["median_s"] / row["pccl"]["median_s"]
        assert row["times_as_fast_as_gloo"] == pytest.approx(ratio)
        assert row["per_cent_of_raw_ring"] is not None


@pytest.mark.slow
def test_one_peer_per_host_against_gloo_of_torch(master: MasterNode, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="compares with torch's Gloo")

    def host(number: int) -> tuple[str, dict[str, Any]]:
        return _bench(
            tmp_path / f"{number}.json",
            *("--master", master.address, "--peers", "2", "--sizes", "4KiB", "--against", "gloo,raw-ring", *TINY),
        )

    (table, report), (_, other) = together([lambda: host(0), lambda: host(1)])
    assert report["rows"] == other["rows"]
    assert report["rows"][0]["times_as_fast_as_gloo"] > 0
    assert report["rows"][0]["per_cent_of_raw_ring"] > 0
    assert "Gloo/" in table


@pytest.mark.slow
def test_one_peer_per_host(master: MasterNode, tmp_path: Path) -> None:
    """Two hosts' worth of processes: each reports the slowest rank's times, so both report the same."""

    def host(number: int) -> tuple[str, dict[str, Any]]:
        return _bench(
            tmp_path / f"{number}.json",
            *("--master", master.address, "--peers", "2", "--sizes", "40KiB", "--tensors", "1,3"),
            *("--connections", "1,3", "--quantize", "none,cast:bfloat16", "--out-of-place", "--memory", *TINY),
        )

    (table, report), (_, other) = together([lambda: host(0), lambda: host(1)])
    cases = [(row["connections"], row["tensors"], row["quantization"]) for row in report["rows"]]
    assert cases == list(itertools.product([1, 3], [1, 3], ["none", "cast:bfloat16"]))
    assert report["rows"] == other["rows"]
    assert all(row["raw_ring"] is None for row in report["rows"])
    assert "40 KiB" in table


def test_hosts_with_different_plans(master: MasterNode) -> None:
    def host(arguments: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        return ended("bench", "--master", master.address, "--peers", "2", *arguments)

    hosts = together([lambda: host(("--memory",)), lambda: host(())])
    assert [done.returncode for done in hosts] == [1, 1]
    assert hosts[0].stderr == "pccl bench: hosts were given different memory: True here, False on another\n"
    assert hosts[1].stderr.startswith("pccl bench: hosts were given different ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--json", "/nowhere/report.json"), "--json /nowhere/report.json: folder /nowhere does not exist"),
        (("--sizes", "4B", "--tensors", "2"), "4 bytes cannot be cut into 2 tensors of float32"),
    ],
)
def test_invalid_plans(arguments: tuple[str, ...], complaint: str, command: Command) -> None:
    done = command("bench", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"pccl bench: {complaint}\n")


def test_several_numbers_of_peers_with_master(command: Command) -> None:
    done = command("bench", "--master", "127.0.0.1:1", "--peers", "2,3")
    assert (done.returncode, done.stdout) == (1, "")
    assert "--master" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--peers", "2,x"),
        *(("--peers", "1,2"), ("--sizes", "huge"), ("--tensors", "0"), ("--dtype", "float7"), ("--against", "nccl")),
        *(("--connections", "1,-1"), ("--quantize", "none,min"), ("--algorithm", "ring,tree")),
        ("--in-place", "--out-of-place"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], command: Command) -> None:
    done = command("bench", *arguments)
    assert done.returncode == 2
    wrong = [word for word in arguments if word.startswith("--")][-1]
    assert f"argument {wrong}: " in done.stderr
