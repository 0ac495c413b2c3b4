"""Calls of a process group that end early: by Ctrl-C, with their group, or before anybody knows what became of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from pccl.errors import PCCLError  # noqa: E402
from pccl.torch.alone import Alone  # noqa: E402
from pccl.torch.errors import BackendError, Names  # noqa: E402
from pccl.torch.scheduler import LANES  # noqa: E402
from pccl.torch.work import OpWork  # noqa: E402
from pccl.types import Result  # noqa: E402
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
    assert not scheduler._lanes
    assert scheduler.is_idle()


def test_a_send_or_recv_that_is_interrupted_at_its_beginning_leaves_no_trace() -> None:
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
def test_a_collective_that_all_ranks_interrupt_at_its_beginning_has_only_been_counted(is_async: bool) -> None:
    number_and_lane = 2

    def script(rank: int) -> float:
        tensor = torch.ones(1)
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        interrupt(lambda: dist.all_reduce(tensor, async_op=is_async), number_and_lane + is_async)
        for _ in range(2 * LANES):
            dist.all_reduce(tensor)
        dist.barrier()
        return tensor.item()

    assert run_ranks(2, script) == [4.0**LANES] * 2


class Unheard(Alone):
    """A process group whose ops nobody hears of before their works have been given up."""

    def launch(self, spec: Any, title: str, over: Callable[[], None], ops: list[Any]) -> None:
        ops.append(None)
        self.over = over

    def give_up(self, ops: Sequence[Any], title: str, timeout_s: float) -> None:
        raise PCCLError(Result.OUTCOME_UNKNOWN, title, "nobody says what became of it")


def test_an_op_may_end_after_its_work_has_ended_with_an_unknown_outcome() -> None:
    group = Unheard(Names("the default group", 0, [0]))
    work = OpWork(group, "send", None, 0, 0.0, None, -1)  # type: ignore[arg-type]
    work.start()
    work.expire()
    group.over()
    with pytest.raises(BackendError, match="nobody says what became of it"):
        work.wait()


def test_a_monitored_barrier_that_ends_with_its_group_blames_no_rank() -> None:
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
        while not scheduler._lanes:
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
