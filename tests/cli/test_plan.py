"""`pccl plan`."""

from __future__ import annotations

import json

import pytest

from tests.conftest import Command

GIGABYTE = ["250M", "--peers", "8", "--uplink", "200", "--inner-steps", "600", "--round-trip", "0"]
"""The example in docs/operations.md, "Sizing": a model of 1 GB among 8 peers with 200 Mbit/s each."""


@pytest.mark.parametrize(
    ("quantization", "sent_gb", "network_s", "utilization"),
    [("none", 1.75, 70, 600 / 670), ("8", 0.451171875, 18.046875, 0.9708), ("2", 0.1162109375, 4.6484375, 0.9923)],
)
def test_estimate(command: Command, quantization: str, sent_gb: float, network_s: float, utilization: float) -> None:
    done = command("plan", *GIGABYTE, "--quantization", quantization, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["sent_bytes"] == pytest.approx(sent_gb * 1e9)
    assert found["network_s"] == pytest.approx(network_s)
    assert found["utilization"] == pytest.approx(utilization, abs=1e-4)
    assert found["sent_gb_per_day"] == pytest.approx(sent_gb * 86400 / (600 + network_s))
    assert found["utilization_async"] == 1


def test_text(command: Command) -> None:
    lines = command("plan", *GIGABYTE).stdout.splitlines()
    assert lines[0] == "outer step          10 min of computing, 70 s of waiting for the network"
    assert lines[2] == "each peer sends     1.8 GB per outer step, 225.7 GB a day"


def test_round_trips_add_up_around_the_ring(command: Command) -> None:
    found = json.loads(command("plan", "1", "--peers", "5", "--round-trip", "0.1", "--json").stdout)
    assert found["network_s"] == pytest.approx(0.4, abs=1e-3)


@pytest.mark.parametrize("wrong", ["0", "many", "-1B", "B"])
def test_wrong_amount(command: Command, wrong: str) -> None:
    done = command("plan", "--", wrong)
    assert done.returncode == 2
    assert "is not a number of parameters" in done.stderr
