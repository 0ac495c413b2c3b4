"""Arrays of a stress worker after an error, and its end."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from pccl.tools.stress.values import ops_of_step
from pccl.tools.stress.worker import MARKED_KEPT, BrokenPromiseError, Buffers, Marked

INTERRUPTED_LATE = """
import os, signal, sys
from pccl.tools.stress import worker

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGINT):
        kill(pid, number)

class Worker:
    def __init__(self, options):
        self.late = Late()

    def run(self):
        sys.modules["late"] = self.late  # lives until modules are cleared

    def interrupt(self, number, frame):
        pass

worker.Worker = Worker
worker.msgspec.json.decode = lambda text, type: None
sys.argv = ["worker", "{}"]
worker.main()
"""
"""A worker that gets SIGINT after its interpreter has reset the signal handlers."""


@pytest.mark.parametrize("in_place", [True, False])
def test_late_write_is_found(in_place: bool) -> None:
    marked = Marked()
    for op in ops_of_step(1, 0, 0, 1 << 12):
        buffers = Buffers(op, 0, 3, in_place, marked)
        given = buffers._recv
        buffers.take_back()
        assert buffers._recv is not given
        marked.check()
    given[-1] = 0
    with pytest.raises(BrokenPromiseError, match="were written later"):
        marked.check()
    arrays = [np.zeros(1, np.uint8) for _ in range(MARKED_KEPT)]
    with pytest.raises(BrokenPromiseError, match="were written later"):
        marked.add("the last to be kept", *arrays)


def test_changed_input_is_found() -> None:
    for op in ops_of_step(1, 0, 0, 1 << 12):
        buffers = Buffers(op, 0, 3, True, Marked())
        buffers._send.view(np.uint8)[0] ^= 1
        with pytest.raises(BrokenPromiseError, match="were not restored"):
            buffers.take_back()


def test_interrupt_at_exit() -> None:
    assert subprocess.run([sys.executable, "-c", INTERRUPTED_LATE], timeout=60, check=False).returncode == 0
