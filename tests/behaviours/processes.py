"""Peers in processes of their own, for promises about a program's process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pccl import Attribute, Communicator, MasterNode
from tests.support.cluster import WAIT_S, until

PROMPT_S = 15.0
"""A few seconds, on a busy machine."""
PRELUDE = """\
import os, signal, sys
import numpy as np
from pccl import Communicator, PCCLError
comm = Communicator(sys.argv[1])
comm.connect()
comm.wait_for_peers(2)
x = np.full(1000, 3.0, np.float32)
"""


@contextmanager
def peer_process(script: str) -> Iterator[tuple[Communicator, subprocess.Popen[str]]]:
    """Yield a peer in this process, and a process whose `comm` is in the same run and which runs a script."""
    with MasterNode("127.0.0.1:0") as master, Communicator(master.address) as peer:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + script, master.address],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            peer.wait_for_peers(2, timeout=WAIT_S)
            yield peer, process
        finally:
            process.kill()
            process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    """Return the next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def until_alone(peer: Communicator) -> None:
    """Wait until the other process has left the run."""
    until(lambda: peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 1, "the other has left", limit_s=PROMPT_S)
