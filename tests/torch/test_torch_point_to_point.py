"""Sends and recvs of a process group, and what is made of them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import pccl.torch  # noqa: E402
from tests.support.cluster import until  # noqa: E402
from tests.torch.ranks import run_ranks, worlds  # noqa: E402


@pytest.fixture(autouse=True)
def _worlds() -> Iterator[None]:
    with worlds():
        yield


def test_sends_match_in_order_per_tag() -> None:
    def script(rank: int) -> list[float]:
        if rank == 0:
            works = [dist.isend(torch.full((3,), float(number)), 1) for number in range(20)]
            works.append(dist.isend(torch.full((3,), 99.0), 1, tag=7))
        else:
            tensors = [torch.zeros(3) for _ in range(21)]
            works = [dist.irecv(tensors[20], 0, tag=7)]
            works += [dist.irecv(tensor, 0) for tensor in tensors[:20]]
        for work in works:
            work.wait()
        return [] if rank == 0 else [tensor[2].item() for tensor in tensors]

    assert run_ranks(2, script)[1] == [*map(float, range(20)), 99.0]


def test_batch_isend_irecv() -> None:
    def script(rank: int) -> float:
        tensor, found = torch.full((4,), float(rank)), torch.zeros(4)
        ops = [dist.P2POp(dist.isend, tensor, (rank + 1) % 3), dist.P2POp(dist.irecv, found, (rank - 1) % 3)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return found[0].item()

    assert run_ranks(3, script) == [2.0, 0.0, 1.0]


def test_send_of_all_dtypes_and_layouts() -> None:
    kinds = [
        torch.arange(6.0),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(4).to(torch.complex64) * 1j,
        (torch.arange(4).to(torch.complex64) * 1j).conj(),
        torch.tensor([True, False, True]),
        torch.arange(4.0).to(torch.float8_e4m3fn),
        torch.nn.Parameter(torch.arange(3.0)),
        torch.zeros(0),
        torch.arange(8.0)[1::3],
        torch.tensor(7),
    ]

    def script(rank: int) -> list[bool]:
        same = []
        for _, is_blocking in itertools.product(range(2), (True, False)):  # a tag's first op goes another way
            for given in kinds:
                kind = given.detach()
                found = torch.empty_strided(kind.size(), kind.stride(), dtype=kind.dtype).zero_()
                if is_blocking or kind.is_conj():  # which torch's isend refuses
                    dist.send(given, 1) if rank == 0 else dist.recv(found, 0)
                else:
                    (dist.isend(kind, 1) if rank == 0 else dist.irecv(found, 0)).wait()
                same.append(rank == 0 or torch.equal(found.to(torch.complex64), kind.to(torch.complex64)))
        return same

    assert all(run_ranks(2, script)[1])


def test_concurrent_sends_with_one_tag() -> None:
    each, threads = 20, 4

    def script(rank: int) -> list[float]:
        def send(number: int) -> None:
            for count in range(each):
                group.send([torch.full((3,), float(number * each + count))], 1, 0, waits=True).wait()

        group = dist.distributed_c10d._get_default_group()
        if rank == 0:
            senders = [threading.Thread(target=send, args=(number,)) for number in range(threads)]
            for sender in senders:
                sender.start()
            for sender in senders:
                sender.join(30)
            return []
        found = []
        for _ in range(each * threads):
            tensor = torch.zeros(3)
            dist.recv(tensor, 0)
            found.append(tensor[1].item())
        return found

    assert sorted(run_ranks(2, script)[1]) == [float(number) for number in range(each * threads)]


def test_blocking_calls_follow_async_ones() -> None:
    def script(rank: int) -> list[float]:
        numbers = range(12)
        if rank == 0:
            works = []
            for number in numbers:
                tensor = torch.full((2,), float(number))
                works.append(dist.isend(tensor, 1) if number % 3 else dist.send(tensor, 1))
            for work in works:
                if work is not None:
                    work.wait()
            return []
        tensors = [torch.zeros(2) for _ in numbers]
        works = [dist.irecv(tensor, 0) if number % 2 else dist.recv(tensor, 0) for number, tensor in enumerate(tensors)]
        for work in works:
            if isinstance(work, dist.Work):
                work.wait()
        return [tensor[0].item() for tensor in tensors]

    assert run_ranks(2, script)[1] == [float(number) for number in range(12)]


def test_loss_ends_blocking_calls() -> None:
    has_sent = threading.Event()

    def script(rank: int) -> list[str]:
        if rank == 1:
            for _ in range(3):
                dist.recv(torch.zeros(2), 0)
            assert has_sent.wait(30)
            dist.destroy_process_group()
            return []
        for _ in range(3):
            dist.send(torch.zeros(2), 1)
        has_sent.set()
        texts = []
        for call in (dist.send, dist.recv, dist.send):
            with pytest.raises(pccl.torch.BackendError) as caught:
                call(torch.zeros(2), 1)
            texts.append(str(caught.value))
        return texts

    assert all("rank 1" in text for text in run_ranks(2, script)[0])


def test_recv_from_any_rank_returns_source() -> None:
    def script(rank: int) -> list[tuple[int, float]]:
        if rank != 0:
            for number in range(3):
                dist.send(torch.full((2,), 10.0 * rank + number), 0)
            dist.barrier()  # a rank that leaves is lost to the others
            return []
        found = []
        for _ in range(5):
            tensor = torch.zeros(2)
            source = dist.recv(tensor)
            found.append((source, tensor[1].item()))
        sources = [source for source, _ in found]
        missing = 1 if sources.count(1) < 3 else 2
        tensor = torch.zeros(2)
        dist.recv(tensor, missing)
        dist.barrier()
        return sorted([*found, (missing, tensor[0].item())])

    expected = [(rank, 10.0 * rank + number) for rank in (1, 2) for number in range(3)]
    assert run_ranks(3, script)[0] == expected


def test_recvs_take_posted_tensors_in_order() -> None:
    def script(rank: int) -> list[float]:
        if rank == 1:
            dist.barrier()
            for number, count in enumerate((2, 2, 3)):
                dist.send(torch.full((count,), float(number)), 0)
            return []
        tensors = [torch.zeros(count) for count in (2, 2, 3)]
        works = [dist.irecv(tensors[0]), dist.irecv(tensors[1], 1), dist.irecv(tensors[2], 1)]
        dist.barrier()
        for work in works:
            work.wait()
        return [tensor[-1].item() for tensor in tensors]

    assert run_ranks(2, script)[0] == [0.0, 1.0, 2.0]


def test_recv_is_not_held_up_by_one_that_expects_another_length() -> None:
    def script(rank: int) -> list[float]:
        if rank == 0:
            first, large, small = torch.zeros(4), torch.zeros(8), torch.zeros(4)
            work = dist.irecv(first)
            dist.barrier()
            work.wait()
            later = [dist.irecv(large), dist.irecv(small, 1)]
            dist.barrier()
            dist.barrier()
            for each in reversed(later):
                each.wait()
            return [first[0].item(), large[0].item(), small[0].item()]
        if rank == 2:
            dist.send(torch.full((4,), 1.0), 0)
        dist.barrier()
        dist.barrier()
        if rank == 1:
            dist.send(torch.full((4,), 2.0), 0)
        dist.barrier()
        if rank == 2:
            dist.send(torch.full((8,), 3.0), 0)
        return []

    assert run_ranks(3, script)[0] == [1.0, 3.0, 2.0]


def test_loss_ends_recv() -> None:
    is_waiting = threading.Event()

    def script(rank: int) -> str:
        if rank == 1:
            assert is_waiting.wait(30)
            dist.destroy_process_group()
            return ""
        work = dist.irecv(torch.zeros(2), 1)
        is_waiting.set()
        with pytest.raises(pccl.torch.BackendError) as caught:
            work.wait()
        return str(caught.value)

    assert "rank 1" in run_ranks(2, script)[0]


def test_wrong_ranks_refused() -> None:
    def script(rank: int) -> bool:
        group = dist.distributed_c10d._get_default_group()
        for other in (rank, 2, -1):
            with pytest.raises(pccl.torch.ArgumentError, match="rank"):
                group.send([torch.zeros(1)], other, 0)
        return True

    assert all(run_ranks(2, script))


def test_monitored_barrier_names_missing_ranks() -> None:
    is_over = threading.Event()

    def script(rank: int) -> str:
        dist.monitored_barrier(timeout=timedelta(seconds=30))
        if rank == 1:
            assert is_over.wait(30)
            return ""
        try:
            with pytest.raises(RuntimeError) as caught:
                dist.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True)
        finally:
            if rank == 0:
                is_over.set()
        return str(caught.value)

    texts = run_ranks(3, script)
    assert "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 500 ms" in texts[0]
    assert "received errors while waiting for send/recv from rank 0" in texts[2]


def test_leaving_rank_does_not_disturb_pair() -> None:
    has_left = threading.Event()
    size = 4

    def script(rank: int) -> list[float]:
        dist.barrier()
        if rank >= 2:
            dist.destroy_process_group()
            has_left.set()
            return []
        found = torch.zeros(3)
        early = dist.irecv(found, 1) if rank == 0 else None
        assert has_left.wait(30)
        tensors = [torch.full((3,), 1.0), torch.full((3,), 2.0)]
        if rank == 1:
            dist.send(tensors[0], 0)
            dist.send(tensors[1], 0, tag=3)
            return []
        assert early is not None
        early.wait()
        late = torch.zeros(3)
        dist.recv(late, 1, tag=3)
        with pytest.raises(pccl.torch.BackendError):
            dist.all_reduce(late.clone())
        return [found[0].item(), late[0].item()]

    assert run_ranks(size, script)[0] == [1.0, 2.0]


def test_recv_from_any_rank_goes_on_until_all_others_have_left() -> None:
    size = 4
    may_go = [threading.Event() for _ in range(size)]

    def script(rank: int) -> list[tuple[int, float]]:
        tensor = torch.full((3,), float(rank))
        if rank != 0:
            assert may_go[rank].wait(30)
            dist.send(tensor, 0)
            return []
        found = []
        for other in (2, 1, 3):
            works = [dist.irecv(torch.zeros(3), tag=1), dist.irecv(tensor)]
            may_go[other].set()
            works[1].wait()
            found.append((works[1]._source_rank(), tensor[-1].item()))
            until(lambda: _others() + len(found) == size - 1, "the sender has left")
        for work in (works[0], dist.irecv(tensor), dist.irecv(tensor)):
            with pytest.raises(pccl.torch.BackendError, match=r"rank 3.*: left: it was destroyed there"):
                work.wait()
        return found

    assert run_ranks(size, script)[0] == [(2, 2.0), (1, 1.0), (3, 3.0)]


def test_recv_from_any_rank_takes_tensors_of_ranks_that_have_left() -> None:
    may_go, has_left = threading.Event(), threading.Event()

    def script(rank: int) -> list[tuple[int, float]]:
        tensor = torch.full((3,), float(rank))
        if rank == 1:
            dist.send(tensor, 0)
            assert has_left.wait(30)
            dist.send(tensor + 10, 0)
            return []
        if rank == 2:
            assert may_go.wait(30)
            dist.send(tensor, 0)  # rank 0 has posted a recv
            return []
        found = [(dist.recv(tensor), tensor[-1].item())]
        may_go.set()
        until(lambda: _others() == 1, "rank 2 has left")
        with pytest.raises(pccl.torch.BackendError):
            dist.all_reduce(tensor.clone())
        found.append((dist.recv(tensor), tensor[-1].item()))
        work = dist.irecv(tensor)
        has_left.set()
        work.wait()
        found.append((work._source_rank(), tensor[-1].item()))
        with pytest.raises(pccl.torch.BackendError, match="left: it was destroyed there"):
            dist.recv(tensor)
        return found

    assert run_ranks(3, script)[0] == [(1, 1.0), (2, 2.0), (1, 11.0)]


def test_recv_that_takes_a_posted_tensor_fails_when_its_rank_leaves() -> None:
    may_leave = threading.Event()

    def script(rank: int) -> None:
        tensor = torch.zeros(3)
        if rank == 1:
            dist.send(tensor, 0)
            dist.recv(tensor, 0)
            dist.send(tensor, 0)
            return
        if rank == 2:
            assert may_leave.wait(30)
            return
        dist.recv(tensor)
        work = dist.irecv(tensor, 2)
        may_leave.set()
        with pytest.raises(pccl.torch.BackendError, match=r"rank 2.*: left: it was destroyed there") as caught:
            work.wait()
        assert caught.value.lost == (2,)
        dist.send(tensor, 1)
        assert dist.recv(tensor) == 1

    run_ranks(3, script)


def test_mismatch_of_two_ranks_shows_both_sizes_after_a_rank_has_left() -> None:
    def script(rank: int) -> str:
        dist.barrier()
        if rank == 2:
            return ""
        until(lambda: _others() == 1, "rank 2 has left")
        call, other = (dist.send, 1) if rank == 0 else (dist.recv, 0)
        with pytest.raises(pccl.torch.BackendError) as caught:
            call(torch.zeros(3 + rank), other)
        assert caught.value.lost == ()
        call(torch.zeros(3), other)
        return str(caught.value)

    for text in run_ranks(3, script)[:2]:
        assert all(each in text for each in ("INVALID_ARGUMENT", "send of 3 x float32", "recv of 4 x float32"))


def _others() -> int:
    return len(dist.distributed_c10d._get_default_group()._scheduler.transport.present_ring()) - 1


def test_started_send_completes_without_wait() -> None:
    def script(rank: int) -> list[float]:
        got = []
        for number in range(6):
            tensor = torch.full((4,), float(number))
            work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
            if number % 2:
                work.get_future().wait()
            while not work.is_completed():
                time.sleep(0)
            got.append(tensor[0].item())
        return got

    assert run_ranks(2, script)[1] == [float(number) for number in range(6)]


def test_any_two_ranks_of_large_group_exchange() -> None:
    """Ranks that are not neighbors in the ring link at their first call, whichever of the two calls first."""

    def script(rank: int) -> list[float]:
        others = [(rank + step) % 17 for step in (5, 8)], [(rank - step) % 17 for step in (5, 8)]
        found = [torch.zeros(3) for _ in range(2)]
        works = [dist.irecv(tensor, other) for tensor, other in zip(found, others[1], strict=True)]
        works += [dist.isend(torch.full((3,), float(rank)), other) for other in others[0]]
        for work in works:
            work.wait()
        dist.barrier()
        if rank in (0, 9):
            tensor = torch.full((1 << 20,), float(rank))
            for _ in range(3):
                dist.send(tensor, 9) if rank == 0 else dist.recv(tensor, 0)
                dist.recv(tensor, 9) if rank == 0 else dist.send(tensor, 0)
            assert tensor[-1].item() == 0
        dist.monitored_barrier()
        return [tensor[2].item() for tensor in found]

    assert run_ranks(17, script) == [[float((rank - 5) % 17), float((rank - 8) % 17)] for rank in range(17)]
