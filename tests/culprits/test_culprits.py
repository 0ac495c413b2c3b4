"""A slow, a frozen and an absent peer are named; healthy programs with habits are not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pccl import MasterNode
from pccl.status import run_status
from tests.support.cluster import until

PEERS = 3
QUIET_S = 25.0
STRAGGLER_WITHIN_S = 30.0

Peers = list[subprocess.Popen[str]]


@contextmanager
def run(habit: str = "steady") -> Iterator[tuple[str, Peers]]:
    """The address of a master, and the processes of its peers."""
    with MasterNode("127.0.0.1:0") as node:
        command = [sys.executable, "-P", str(Path(__file__).with_name("peer.py")), node.address]
        peers = [
            subprocess.Popen([*command, f"p{i}", "100", habit], stdin=subprocess.PIPE, text=True) for i in range(PEERS)
        ]
        try:
            until(lambda: run_status(node.address).totals.ops_committed > 10, "the peers reduce")
            yield node.address, peers
        finally:
            for peer in peers:
                peer.kill()
                peer.communicate()


def named(address: str) -> set[tuple[str, str]]:
    status = run_status(address)
    names = {member.peer: member.name for member in status.members}
    return {(found.kind, names.get(found.peer, "")) for found in status.findings}


@pytest.mark.slow
def test_a_slow_peer_is_named_and_recovers() -> None:
    with run() as (address, peers):
        stdin = peers[1].stdin
        assert stdin is not None
        stdin.write("6.0\n")
        stdin.flush()
        until(lambda: named(address) == {("straggler", "p1")}, "it is named", STRAGGLER_WITHIN_S)
        stdin.write("1.0\n")
        stdin.flush()
        until(lambda: not named(address), "it is as fast as the others", STRAGGLER_WITHIN_S)


@pytest.mark.slow
def test_a_frozen_peer_is_named_as_silent() -> None:
    with run() as (address, peers):
        peers[2].send_signal(signal.SIGSTOP)
        until(lambda: named(address) == {("silent", "p2")}, "it is named")
        peers[2].send_signal(signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("habit", ["uneven", "saves", "overlaps"])
def test_healthy_peers_are_not_named(habit: str) -> None:
    with run(habit) as (address, _):
        end_s = time.monotonic() + QUIET_S
        while time.monotonic() < end_s:
            assert named(address) == set()
            time.sleep(0.5)
