"""What the system's congestion control does to links between hosts: they grow where CUBIC takes losses for congestion,
and take BBR where they may."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pccl.tools.harness import module_command
from tests.support.streams import TIMEOUT_S, Lines
from tests.wan.lab import Lab
from tests.wan.shape import Link

pytestmark = pytest.mark.slow

CONNECTIONS = 40
"""More than a far link starts with."""
PEER = f"""
import sys
import numpy as np
from pccl import Communicator

with Communicator() as comm:
    comm.wait_for_peers(2)
    values, is_grown = np.zeros(1 << 20, np.float32), np.zeros(1, np.int32)
    print("up", flush=True)
    sys.stdin.readline()
    while not is_grown[0]:
        comm.all_reduce(values)
        is_grown[0] = comm.stats["connections"] >= {CONNECTIONS}
        comm.all_reduce(is_grown)
    print("grown", flush=True)
"""


@contextmanager
def two_peers(lab: Lab) -> Iterator[tuple[list[Lines], list[subprocess.Popen[str]]]]:
    """Peers on two hosts that have met, and wait for a line. What they print, and they themselves."""
    first = lab.hosts[0]
    address = f"{first.address}:48148"
    with ExitStack() as pipes:
        master = first.popen(
            module_command("pccl", "master", "--found", "--listen", address), stdout=subprocess.PIPE, text=True
        )
        assert master.stdout is not None
        pipes.enter_context(master.stdout).readline()
        peers, said = [], []
        for host in lab.hosts:
            environment = {**os.environ, "PCCL_MASTER": address}
            command = [sys.executable, "-P", "-c", PEER]
            peer = host.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
            assert peer.stdin is not None
            assert peer.stdout is not None
            pipes.enter_context(peer.stdin)
            peers.append(peer)
            said.append(Lines(pipes.enter_context(peer.stdout)))
        for lines in said:
            lines.expect("up")
        yield said, peers
        for peer in peers:
            peer.kill()


def test_links_grow_under_loss_without_udp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_UDP", "0")
    with Lab(2, Link(delay_ms=10.0, rate_mbit=1000.0, loss=0.01)) as lab:
        for host in lab.hosts:
            host.set_congestion_control("cubic")
        with two_peers(lab) as (said, peers):
            for peer in peers:
                assert peer.stdin is not None
                peer.stdin.write("\n")
                peer.stdin.flush()
            for lines in said:
                lines.expect("grown")
            assert [peer.wait(TIMEOUT_S) for peer in peers] == [0, 0]


STEPS = """
import numpy as np
from pccl import Communicator

with Communicator() as comm:
    comm.wait_for_peers(2)
    values = np.zeros(100_000, np.float32)
    while True:
        comm.all_reduce(values)
        print("step", flush=True)
"""
NO_UDP = (
    "echo 0 > /proc/sys/net/ipv4/udp_early_demux; ip rule add pref 100 lookup local; "
    "ip rule add pref 50 ipproto udp blackhole; ip rule del pref 0"
)
"""Drops arriving datagrams; rules before the one for local addresses need that one to come later."""


def test_ops_go_on_over_tcp_when_datagrams_no_longer_arrive() -> None:
    with Lab(2, Link(delay_ms=25.0, rate_mbit=100.0, loss=0.01)) as lab, ExitStack() as stack:
        address = f"{lab.hosts[0].address}:48148"
        master = lab.hosts[0].popen(module_command("pccl", "master", "--found", "--listen", address))
        stack.callback(master.kill)
        said = []
        for host in lab.hosts:
            environment = {**os.environ, "PCCL_MASTER": address, "PCCL_LOG_LEVEL": "DEBUG"}
            command = [sys.executable, "-P", "-c", STEPS]
            peer = host.popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            stack.callback(peer.kill)
            assert peer.stdout is not None
            said.append(Lines(peer.stdout))
        for lines in said:
            lines.expect(".* travels over UDP")
        for _ in range(20):
            said[0].seen.clear()
            said[0].expect("step")
        lab.hosts[1].run("sh", "-c", NO_UDP)
        said[0].seen.clear()
        said[0].expect(".* continues over TCP: .*")  # whichever end notices first
        for _ in range(3):
            said[0].seen.clear()
            said[0].expect("step")


@pytest.mark.parametrize("is_locked", [False, True])
def test_bbr_on_long_links(is_locked: bool) -> None:
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    if not {"bbr", "cubic"} <= set(known):
        pytest.skip("this kernel has no BBR")
    with Lab(2, Link(delay_ms=5.0)) as lab:
        for host in lab.hosts:
            host.set_congestion_control("cubic", is_locked=is_locked)
        with two_peers(lab):
            first, second = lab.hosts
            # All of the peer's connections to the other host but those to the master, from either side.
            sockets = first.run("ss", "-tinH", "dst", second.address, "and", "not", "sport", "48148")
            kinds = {"bbr" if " bbr " in line else "cubic" for line in sockets.splitlines() if "cwnd:" in line}
    assert kinds == {"cubic" if is_locked else "bbr"}
