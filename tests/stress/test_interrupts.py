"""Interrupts of a stress run: when they come, and what a worker makes of arrays that an error gave back."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import numpy as np
import pytest

from pccl.stress.buffers import MARKED_KEPT, Buffers, Marked
from pccl.stress.errors import BrokenPromiseError
from pccl.stress.interrupts import Interrupts
from pccl.stress.plan import Interval, Plan
from pccl.stress.values import ops_of_step

INTERRUPTED_LATE = """
import os, signal, sys
from pccl.stress import worker

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
"""A worker that is sent SIGINT when its interpreter has put its signal handlers aside."""


def test_they_come_as_often_as_asked_for() -> None:
    interrupts = Interrupts(Plan(interrupts=Interval(1.0, 3.0)), Random(1), 10.0)
    now = 10.0
    hit = set()
    for _ in range(100):
        assert now + 1.0 <= interrupts.next_at <= now + 3.0
        now = interrupts.next_at
        hit.add(interrupts.target(now, [4, 5, 6]))
    assert hit == {4, 5, 6}
    assert interrupts.target(now, []) is None
    assert Interrupts(Plan(), Random(1), 10.0).next_at == float("inf")


@pytest.mark.parametrize("in_place", [True, False])
def test_what_is_written_after_an_error_is_found(in_place: bool) -> None:
    marked = Marked()
    for op in ops_of_step(1, 0, 0, 1 << 12):
        buffers = Buffers(op, 0, 3, in_place, marked)
        given = buffers.recv
        buffers.take_back()
        assert buffers.recv is not given
        buffers.check_untouched()
        marked.check()
    given[-1] = 0
    with pytest.raises(BrokenPromiseError, match="had failed, and later"):
        marked.check()
    for _ in range(MARKED_KEPT - 1):
        marked.add("another op", np.zeros(1, np.uint8))
    arrays = [np.zeros(1, np.uint8) for _ in range(MARKED_KEPT)]
    with pytest.raises(BrokenPromiseError, match="had failed, and later"):
        marked.add("the last to be kept", *arrays)


def test_an_input_that_an_error_changed_is_found() -> None:
    for op in ops_of_step(1, 0, 0, 1 << 12):
        buffers = Buffers(op, 0, 3, True, Marked())
        buffers.send.view(np.uint8)[0] ^= 1
        with pytest.raises(BrokenPromiseError, match="was not restored"):
            buffers.take_back()


def test_a_worker_that_ends_does_not_die_of_an_interrupt() -> None:
    assert subprocess.run([sys.executable, "-c", INTERRUPTED_LATE], timeout=60, check=False).returncode == 0
