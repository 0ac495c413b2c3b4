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

    assert all("Timed out" in text or "for earlier calls" in text for text in run_ranks(2, script)[0])


def test_timeout_of_a_recv_that_takes_a_posted_tensor_names_only_itself() -> None:
    is_over = threading.Event()

    def script(rank: int) -> list[str]:
        if rank:
            if rank == 1:
                dist.send(torch.ones(2), 0, tag=3)
            assert is_over.wait(LIMIT_S)
            if rank == 2:
                dist.send(torch.full((2,), 5.0), 0, tag=3)
            return []
        found = []
        try:
            assert dist.recv(torch.zeros(2), None, tag=3) == 1  # the recv posted to rank 2 stays
            group()
            for source in (2, None):
                with pytest.raises(RuntimeError, match="Timed out") as caught:
                    dist.recv(torch.zeros(2), source, tag=3)
                found.append(str(caught.value))
        finally:
            dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=LIMIT_S))
            is_over.set()
        late = torch.zeros(2)
        dist.recv(late, 2, tag=3)
        assert late.tolist() == [5, 5]
        return found

    texts = run_ranks(3, script)[0]
    assert "rank 2 has not sent a tensor with tag 3 within 0.5 s. Only this recv has ended" in texts[0]
    assert "no rank has sent a tensor with tag 3" in texts[1]
    assert not any("aborted on all" in text for text in texts)


def test_timeout_of_a_wait_does_not_claim_an_abort() -> None:
    is_over = threading.Event()

    def script(rank: int) -> str:
        tensor = torch.ones(3)
        if rank == 1:
            assert is_over.wait(LIMIT_S)
            dist.all_reduce(tensor)
            return ""
        work = dist.all_reduce(tensor, async_op=True)
        try:
            with pytest.raises(RuntimeError, match="still in progress") as caught:
                work.wait(timedelta(seconds=0.05))
        finally:
            is_over.set()
        work.wait()
        assert tensor.tolist() == [2] * 3
        return str(caught.value)

    assert "aborted" not in run_ranks(2, script)[0]
