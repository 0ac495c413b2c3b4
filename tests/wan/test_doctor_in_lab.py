"""`pccl doctor` on hosts of their own: packets of full size that vanish, ports that are shut, ways that are long."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.wan.lab import Host, Lab
from tests.wan.shape import Link

TIMEOUT_S = 60.0
BYTES_MAX = 1000

pytestmark = pytest.mark.slow


@contextmanager
def lab_with_master(delay_ms: float) -> Iterator[tuple[Lab, str]]:
    """Two hosts, the first one with a master at this address."""
    with Lab(2, Link(delay_ms=delay_ms)) as lab:
        address = f"{lab.hosts[0].address}:48148"
        command = [sys.executable, "-P", "-m", "pccl", "master", "--found", "--state", "none", "--listen", address]
        master = lab.hosts[0].popen(command, stdout=subprocess.PIPE, text=True)
        assert master.stdout is not None
        with master.stdout as said:
            assert "listening" in said.readline()
            yield lab, address


def examined(host: Host, address: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit status of `pccl doctor` on a host, and what it has found, by name."""
    command = [sys.executable, "-P", "-m", "pccl", "doctor", address, "--json"]
    process = host.popen(command, stdout=subprocess.PIPE, text=True)
    printed, _ = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, {check["name"]: check for check in json.loads(printed)["checks"]}


@pytest.mark.parametrize(("way", "says"), [("out", "from this host to the master"), ("back", "to this host")])
def test_mtu_of_path(way: str, says: str) -> None:
    with lab_with_master(1.0) as (lab, address):
        master, host = lab.hosts
        status, found = examined(host, address)
        assert (status, found["mtu"]["verdict"]) == (0, "ok"), found
        assert found["dialled back"]["verdict"] == "ok"
        if way == "out":
            lab.limit(host, master, BYTES_MAX)
        else:
            lab.limit(master, host, BYTES_MAX)
        status, found = examined(host, address)
    assert status == 1
    assert found["mtu"]["verdict"] == "failed"
    assert says in found["mtu"]["text"]


def test_long_path_and_blocked_path() -> None:
    with lab_with_master(40.0) as (lab, address):
        master, host = lab.hosts
        status, found = examined(host, address)
        assert status == 0, found
        round_trip = re.match(r"([\d.]+) ms", found["round trip"]["text"])
        assert round_trip is not None
        assert 75 < float(round_trip[1]) < 200
        assert "windows" in found
        lab.block(host, master)
        status, found = examined(host, address)
    assert status == 1
    assert "packets are dropped on the path" in found["reach"]["text"]
