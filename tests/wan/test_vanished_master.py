"""A master that gathers the peers of a run vanishes without a word, with its machine: the next one at the same address
is found all the same."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import IO

import pytest

from tests.support.cluster import until
from tests.wan.lab import Host, Lab
from tests.wan.shape import Link

PORT = 48148
PEER_TIMEOUT_S = 1.0
WAIT_S = 30.0

PEER = """
import sys
from pccl import Communicator

comm = Communicator(sys.argv[1], master_timeout=120)
comm.connect()
comm.wait_for_peers(2)
print("together", flush=True)
sys.stdin.readline()
comm.update_topology(timeout=60)
print("led", comm.world_size, flush=True)
sys.stdin.readline()
"""


def master_on(host: Host, pipes: ExitStack) -> tuple[subprocess.Popen[str], IO[str]]:
    """A master that listens, and what it says."""
    options = ["--listen", f"{host.address}:{PORT}", "--peer-timeout", str(PEER_TIMEOUT_S)]
    command = [sys.executable, "-P", "-m", "pccl", "master", *options]
    environment = {**os.environ, "PCCL_LOG_LEVEL": "INFO"}
    process = host.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    until_said(pipes.enter_context(process.stdout), "listening")
    return process, process.stdout


def until_said(lines: IO[str], text: str) -> str:
    said = []
    for line in lines:
        said.append(line)
        if text in line:
            return line
    raise AssertionError(f"it ended without saying {text!r}: {''.join(said)}")


def closing(host: Host) -> list[str]:
    """The connections of this host whose processes are gone, and which it still tells about that."""
    return [line for line in host.run("cat", "/proc/net/tcp").splitlines()[1:] if line.split()[3] in ("04", "0B")]


@pytest.mark.slow
def test_the_next_master_is_found_when_one_that_gathered_has_vanished() -> None:
    with Lab(3, Link(delay_ms=1), backend="relay") as lab, ExitStack() as pipes:
        home, *hosts = lab.hosts
        home.set_sysctl("net.ipv4.tcp_orphan_retries", "1")
        first, _ = master_on(home, pipes)
        command = [sys.executable, "-P", "-c", PEER, f"{home.address}:{PORT}"]
        peers = [host.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for host in hosts]
        for peer in peers:
            assert peer.stdin is not None
            assert peer.stdout is not None
            pipes.enter_context(peer.stdin)
            until_said(pipes.enter_context(peer.stdout), "together")
        first.kill()
        first.wait()
        lab.block(hosts[1], home)
        second, lines = master_on(home, pipes)
        until_said(lines, "it waits for peers")  # the first has come, and no byte is under way
        home.down()
        second.kill()
        second.wait()
        until(lambda: not closing(home), "no part of the second master is left")
        master_on(home, pipes)
        home.up()
        begun_s = time.monotonic()
        for peer in peers:
            assert peer.stdin is not None
            peer.stdin.write("\n")
            peer.stdin.flush()
        for peer in peers:
            assert peer.stdout is not None
            assert until_said(peer.stdout, "led").split() == ["led", "2"]
        assert time.monotonic() - begun_s < WAIT_S
