"""The progress threads of a process group, on which callbacks of its futures are called."""

import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from pccl.torch.background import Progress  # noqa: E402
from tests.torch.ranks import run_ranks, worlds  # noqa: E402

LIMIT_S = 30.0


def test_a_call_may_wait_for_one_that_is_handed_over_later() -> None:
    progress = Progress("test")
    done = threading.Event()

    def nested(depth: int) -> None:
        if depth:
            inner = threading.Event()

            def deeper() -> None:
                nested(depth - 1)
                inner.set()

            progress.later(deeper)
            assert inner.wait(LIMIT_S)
        else:
            done.set()

    progress.later(lambda: nested(5))
    assert done.wait(LIMIT_S)
    progress.stop()


def meet(all_there: threading.Barrier) -> None:
    all_there.wait(LIMIT_S)


def test_threads_end_after_stop() -> None:
    progress = Progress("a thread of this test")
    made = threading.Barrier(4)
    for _ in range(3):
        progress.later(lambda: meet(made))
    made.wait(LIMIT_S)
    progress.stop()
    for thread in threading.enumerate():
        if thread.name == "a thread of this test":
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def test_the_end_of_the_program_waits_for_callbacks() -> None:
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


def test_a_callback_of_a_future_may_wait_for_another_call_of_its_group() -> None:
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
