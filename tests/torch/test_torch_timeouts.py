"""The timeouts of calls of a process group: they pass for everybody, whatever is done with a work."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import pccl  # noqa: E402
import pccl.torch  # noqa: E402
from tests.torch.ranks import LIMIT_S, run_ranks, worlds  # noqa: E402

SHORT_S = 0.5


@pytest.fixture(autouse=True)
def _worlds() -> Iterator[None]:
    with worlds():
        yield


def group() -> pccl.torch.ProcessGroupPCCL:
    found = dist.distributed_c10d._get_default_group()
    found.set_timeout(timedelta(seconds=SHORT_S))
    return found


def test_timeout_reaches_future() -> None:
    is_over = threading.Event()

    def script(rank: int) -> str:
        group()
        if rank == 1:
            assert is_over.wait(LIMIT_S)
            return ""
        try:
            with pytest.raises(RuntimeError, match=r"(?s)Timed out .*rank 1 .*has not called it") as caught:
                dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()
        finally:
            is_over.set()
        return str(caught.value)

    assert "gave up after 0.5 s" in run_ranks(2, script)[0]


def test_timeout_of_call_without_wait() -> None:
    is_over = threading.Event()

    def script(rank: int) -> list[str]:
        pg = group()
        if rank == 1:
            assert is_over.wait(LIMIT_S)
            return []
        ended = threading.Semaphore(0)
        works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(20)]
        for work in works:
            work.when_over(ended.release)
        try:
            for _ in works:
                assert ended.acquire(timeout=LIMIT_S)
        finally:
            is_over.set()
        assert pg.get_error() is not None
        return [str(work.exception()) for work in works]

    assert all("Timed out" in text or "waited for earlier calls" in text for text in run_ranks(2, script)[0])


def test_timeout_of_recv_from_any_rank() -> None:
    has_given_up = threading.Event()

    def script(rank: int) -> list[float]:
        pg = group()
        if rank == 1:
            assert has_given_up.wait(LIMIT_S)
            pg.set_timeout(timedelta(seconds=LIMIT_S))
            dist.send(torch.full((3,), 5.0), 0)
            dist.send(torch.full((3,), 6.0), 0)
            return []
        untouched, found, other = torch.zeros(3), torch.zeros(3), torch.zeros(3)
        try:
            with pytest.raises(RuntimeError, match=r"Timed out .*no rank has sent .*with tag 0") as caught:
                dist.recv(untouched)
        finally:
            has_given_up.set()
        assert caught.value.result is pccl.Result.TIMEOUT
        pg.set_timeout(timedelta(seconds=LIMIT_S))
        assert dist.recv(found) == 1
        dist.recv(other, 1)
        return [untouched[0].item(), found[0].item(), other[0].item()]

    assert run_ranks(2, script)[0] == [0.0, 5.0, 6.0]
