"""The progress threads of a process group, which call the callbacks of its futures, and a program's end."""

import subprocess
import sys
import threading
from pathlib import Path

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


def test_exception_with_calls_in_flight_is_all_that_a_rank_prints(tmp_path: Path) -> None:
    text = """
import sys
import torch, torch.distributed as dist

rank = int(sys.argv[1])
dist.init_process_group("pccl", store=dist.FileStore(sys.argv[2], 3), rank=rank, world_size=3)
dist.barrier()
if rank == 0:
    calls = [dist.all_reduce(torch.zeros(2), async_op=True), dist.barrier(async_op=True)]
    calls += [dist.isend(torch.zeros(2), 1), dist.irecv(torch.zeros(2), 1), dist.irecv(torch.zeros(2), tag=1)]
    for call in calls[:2]:
        call.get_future().then(lambda _: None)
    raise ValueError("of the program")
sys.stdin.read()
"""
    command = [sys.executable, "-c", text]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        said = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [(rank.returncode, *each) for rank, each in zip(ranks[1:], said[1:], strict=True)] == [(0, "", "")] * 2
    assert ranks[0].returncode == 1
    assert said[0][1].splitlines()[-1].endswith("ValueError: of the program")
    assert "pccl" not in said[0][1]


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
