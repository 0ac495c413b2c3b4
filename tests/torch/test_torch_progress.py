"""The progress threads of a process group, which call the callbacks of its futures."""

import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from tests.torch.ranks import run_ranks, worlds  # noqa: E402

LIMIT_S = 30.0


def test_program_end_waits_for_callbacks() -> None:
    text = """
import threading, time
import torch
from pccl.torch.background import Progress

began = threading.Event()

def callback(_):
    began.set()
    time.sleep(0.3)
    print("called")

progress, future = Progress("test"), torch.futures.Future()
future.then(callback)
progress.later(lambda: future.set_result(None))
began.wait()
"""
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=LIMIT_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "called\n", "")


def test_callback_may_wait_for_another_call() -> None:
    chained = threading.Event()

    def script(rank: int) -> list[float]:
        group = dist.group.WORLD
        assert group is not None
        if rank == 1:
            assert chained.wait(LIMIT_S)  # rank 0 has its callback in place before its call can be over
        first = group.allreduce([torch.ones(4)]).get_future()

        def then(future: torch.futures.Future) -> torch.Tensor:
            return group.allreduce([future.value()[0] * 10]).get_future().wait()[0]

        second = first.then(then)
        chained.set()
        return list(second.wait())

    with worlds():
        assert run_ranks(2, script) == [[40.0] * 4] * 2
