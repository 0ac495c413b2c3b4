"""Calls of a process group that end early: by Ctrl-C, with their group, or before anybody knows what became of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from pccl.torch.errors import BackendError  # noqa: E402
from pccl.torch.scheduler import QUEUES  # noqa: E402
from tests.torch.ranks import LIMIT_S, run_ranks, worlds  # noqa: E402


@pytest.fixture(autouse=True)
def _worlds() -> Iterator[None]:
    with worlds():
        yield


class Interrupting:
    """A lock after one of whose uses Ctrl-C is pressed."""

    def __init__(self, lock: Any, uses: int) -> None:
        self._lock = lock
        self._left = uses

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


def interrupt(call: Callable[[], Any], uses: int) -> None:
    """Make a call, which is interrupted as it leaves the scheduler's lock for that time."""
    scheduler = dist.distributed_c10d._get_default_group()._scheduler
    lock = scheduler._lock
    scheduler._lock = Interrupting(lock, uses)
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        scheduler._lock = lock
    assert not scheduler._queues
    assert scheduler.is_idle()


def test_interrupted_send_or_recv_leaves_no_trace() -> None:
    def script(rank: int) -> list[float]:
        def call() -> None:
            dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)

        def start() -> Any:
            return dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)

        tensor, found = torch.zeros(3), []
        for number, interrupted in enumerate((call, start)):
            for _ in range(2):  # the first op of a tag goes another way
                tensor.fill_(number + 1 if rank == 0 else 0)
                interrupt(interrupted, 1)
                call()
                start().wait()
                found.append(tensor[0].item())
        return found

    assert run_ranks(2, script) == [[1.0, 1.0, 2.0, 2.0]] * 2


@pytest.mark.parametrize("is_async", [False, True])
def test_interrupted_collective_only_counts(is_async: bool) -> None:
    number_and_queue = 2

    def script(rank: int) -> float:
        tensor = torch.ones(1)
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        interrupt(lambda: dist.all_reduce(tensor, async_op=is_async), number_and_queue + is_async)
        for _ in range(2 * QUEUES):
            dist.all_reduce(tensor)
        dist.barrier()
        return tensor.item()

    assert run_ranks(2, script) == [4.0**QUEUES] * 2


def test_monitored_barrier_aborted_with_group() -> None:
    is_over = threading.Event()

    def script(rank: int) -> str:
        if rank == 1:
            assert is_over.wait(LIMIT_S)
            return ""
        group = dist.distributed_c10d._get_default_group()
        scheduler = group._scheduler
        texts: list[str] = []

        def call() -> None:
            with pytest.raises(BackendError) as caught:
                group.monitored_barrier()
            texts.append(str(caught.value))

        caller = threading.Thread(target=call)
        caller.start()
        while not scheduler._queues:
            caller.join(0.001)
        try:
            group.abort()
        finally:
            is_over.set()
        caller.join(LIMIT_S)
        return texts[0]

    text = run_ranks(2, script)[0]
    assert "was aborted on rank 0" in text
    assert "failed to pass" not in text
