"""A process group of pccl: how it comes to be, its first collectives, its end."""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

import pccl  # noqa: E402
import pccl.torch.bootstrap  # noqa: E402
from pccl import Communicator, PCCLError  # noqa: E402
from pccl.torch import bootstrap  # noqa: E402
from tests.support.cluster import until  # noqa: E402
from tests.torch.ranks import run_ranks, worlds  # noqa: E402


@pytest.fixture(autouse=True)
def _worlds() -> Iterator[None]:
    with worlds():
        yield


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_reduce_after_init(size: int) -> None:
    def script(rank: int) -> list[float]:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, size, "pccl")
        tensor = torch.full((5,), float(rank + 1))
        dist.all_reduce(tensor)
        return tensor.tolist()

    assert run_ranks(size, script) == [[size * (size + 1) / 2] * 5] * size


def test_broadcast_and_barrier() -> None:
    def script(rank: int) -> list[int]:
        tensor = torch.arange(6).view(2, 3) if rank == 1 else torch.zeros(2, 3, dtype=torch.int64)
        dist.broadcast(tensor, 1)
        dist.barrier()
        return tensor.flatten().tolist()

    assert run_ranks(3, script) == [list(range(6))] * 3


def test_many_calls_in_flight() -> None:
    def script(rank: int) -> list[float]:
        tensors = [torch.full((4,), float(number * (rank + 1))) for number in range(100)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        futures = [work.get_future() for work in works]
        for work in works:
            work.wait()
        assert all(work.is_completed() and work.is_success() for work in works)
        assert all(torch.equal(future.wait()[0], tensor) for future, tensor in zip(futures, tensors, strict=True))
        return [tensor[0].item() for tensor in tensors]

    assert run_ranks(2, script) == [[float(3 * number) for number in range(100)]] * 2


def test_timeout_of_call_without_partners() -> None:
    is_over = threading.Event()

    def script(rank: int) -> str:
        if rank == 1:
            assert is_over.wait(30)
            return ""
        try:
            with pytest.raises(pccl.torch.BackendError) as caught:
                dist.group.WORLD.barrier(timeout=timedelta(seconds=0.3)).wait()
        finally:
            is_over.set()
        return str(caught.value)

    text = run_ranks(2, script)[0]
    assert "barrier" in text
    assert "TIMEOUT" in text
    assert "rank 0" in text


def test_lost_rank_named_and_group_ends() -> None:
    both_have_failed = threading.Barrier(2)

    def script(rank: int) -> list[str]:
        if rank == 1:
            dist.destroy_process_group()
            return []
        texts = []
        tensor = torch.ones(3)
        for _ in range(2):
            with pytest.raises(pccl.torch.BackendError) as caught:
                dist.all_reduce(tensor)
            texts.append(str(caught.value))
        both_have_failed.wait(timeout=30)  # the first to leave would be lost to the other, too
        assert caught.value.lost == (1,)
        assert tensor.tolist() == [1, 1, 1]
        return texts

    texts = run_ranks(3, script)
    for text in [*texts[0], *texts[2]]:
        assert "rank 1" in text
        assert "destroy it" in text


def test_subgroups() -> None:
    def script(rank: int) -> tuple[float, int]:
        groups = [dist.new_group([0, 2]), dist.new_group([1]), dist.new_group([2, 1])]
        mine = [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
        total = 0.0
        for group in mine:
            tensor = torch.ones(2) * (rank + 1)
            dist.all_reduce(tensor, group=group)
            total += tensor[0].item()
        dist.all_reduce(torch.ones(1))
        if mine:
            dist.destroy_process_group(mine[0])
        return total, len(mine)

    assert run_ranks(3, script) == [(4.0, 1), (2.0 + 5.0, 2), (4.0 + 5.0, 2)]


def test_split_group_without_gpu() -> None:
    def script(rank: int) -> tuple[float, list[int]]:
        half = dist.split_group(split_ranks=[[0, 1], [3, 2]])
        tensor = torch.ones(2) * rank
        dist.all_reduce(tensor, group=half)
        return tensor[0].item(), dist.get_process_group_ranks(half)

    assert run_ranks(4, script) == [(1.0, [0, 1])] * 2 + [(5.0, [2, 3])] * 2


def test_device_mesh() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    def script(rank: int) -> tuple[float, float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        found = []
        for name in ("replica", "shard"):
            tensor = torch.ones(1) * (rank + 1)
            dist.all_reduce(tensor, group=mesh[name].get_group())
            found.append(tensor.item())
        return found[0], found[1]

    assert run_ranks(4, script) == [(4.0, 3.0), (6.0, 3.0), (4.0, 7.0), (6.0, 7.0)]


def test_barrier_waits_for_earlier_calls() -> None:
    def script(rank: int) -> bool:
        tensors = [torch.full((100,), float(number)) for number in range(30)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        dist.barrier()
        return all(work.is_completed() for work in works)

    assert run_ranks(2, script) == [True, True]


def test_ddp_backward_raises_on_loss() -> None:
    def script(rank: int) -> str:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
        model(torch.ones(3, 4)).sum().backward()
        loss = model(torch.ones(3, 4)).sum()
        dist.barrier()
        if rank == 1:
            return ""
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        return str(caught.value)

    assert "rank 1" in run_ranks(2, script)[0]


@pytest.mark.parametrize(("rank", "missing"), [(0, r"rank 11, rank 12"), (1, r"rank 10"), (2, r"rank 10")])
def test_init_timeout_names_missing_ranks(
    rank: int, missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pccl.protocol.wait_reasons.FIRST_S", 0.1)
    store = dist.HashStore()
    with pytest.raises(dist.DistStoreError, match=f"process group 7 .*after \\d\\.\\d s: {missing} .*not called it"):
        pccl.torch.ProcessGroupPCCL(store, rank, 3, timedelta(seconds=0.5), global_ranks=[10, 11, 12], name="7")
    assert re.search(f"process group 7 has waited 0 s for {missing}, which", caplog.text)


def test_groups_of_a_process_share_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        monkeypatch.setenv("PCCL_LISTEN", f"0.0.0.0:{held.getsockname()[1]}")

        def script(rank: int) -> list[float]:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
            groups = [
                dist.new_group([0, 1, 3]),
                dist.new_group(),
                mesh["rows"].get_group(),
                mesh["columns"].get_group(),
            ]
            sums = []
            for group in groups:
                tensor = torch.tensor([float(rank)])
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    dist.all_reduce(tensor, group=group)
                sums.append(tensor.item())
            return sums

        assert run_ranks(4, script) == [[4, 6, 2, 1], [4, 6, 4, 1], [2, 6, 2, 5], [4, 6, 4, 5]]


@pytest.mark.parametrize(("backend", "is_ours"), [("cpu:pccl,cuda:gloo", True), ("cuda:pccl,cpu:gloo", False)])
def test_device_map(backend: str, is_ours: bool) -> None:
    """Each device type has the backend that the map names, also in groups made from the default group."""

    def script(rank: int) -> list[Any]:
        found: list[Any] = []
        for group in (dist.group.WORLD, dist.new_group([0, 1])):
            assert dist.get_backend_config(group) == dist.get_backend(group) == backend
            assert {device.type for device in group._device_types} == {"cpu", "cuda"}
            kinds = [type(group._get_backend(torch.device(kind))).__name__ for kind in ("cpu", "cuda")]
            assert kinds == (["BackendPCCL", "ProcessGroupGloo"] if is_ours else ["ProcessGroupGloo", "BackendPCCL"])
            tensor = torch.full((3,), float(rank))
            work = dist.all_reduce(tensor, group=group, async_op=True)
            work.wait()
            assert isinstance(work, pccl.torch.PCCLWork) is is_ours
            if rank == 0:
                dist.send(tensor, 1, group)
            else:
                dist.recv(tensor, 0, group)
            dist.barrier(group)
            objects = [None, None]
            dist.all_gather_object(objects, rank, group)
            found += [tensor.tolist(), objects]
            with pytest.raises(NotImplementedError, match="device map"):
                group.reconfigure(None)
        assert len(dist.distributed_c10d._world.pg_map) == 2
        dist.destroy_process_group(group)
        return found

    assert run_ranks(2, script, backend=backend) == [[[1.0] * 3, [0, 1]] * 2] * 2


def test_device_map_of_one_backend() -> None:
    def script(rank: int) -> list[Any]:
        group = dist.group.WORLD
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        return [type(group), tensor.tolist()]

    assert run_ranks(2, script, backend="cpu:pccl,cuda:pccl") == [[pccl.torch.ProcessGroupPCCL, [2.0, 2.0]]] * 2


def test_normal_end_logs_no_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks end one after the other, and with the first ones the master and its standbys."""
    monkeypatch.setattr(bootstrap.Hosting, "retire", lambda *_: None)
    over = [threading.Event() for _ in range(4)]
    known = [threading.Barrier(4 - rank - 1) for rank in range(3)]
    hostings: dict[int, bootstrap.Hosting | None] = {}

    def script(rank: int) -> None:
        communicator, hostings[rank] = dist.group.WORLD._meeting.communicator, dist.group.WORLD._meeting.hosting
        dist.barrier()
        for earlier in range(rank):
            assert over[earlier].wait(60)
            left = 4 - earlier - 1
            until(lambda left=left: _world_size(communicator) <= left, "the others know of it")  # type: ignore[misc]
            hosting = hostings[earlier] if known[earlier].wait(60) == 0 else None
            if hosting is not None:
                hosting._stop()
        dist.destroy_process_group()
        over[rank].set()

    with caplog.at_level(logging.INFO, "pccl"):
        run_ranks(4, script)
    texts = [record.getMessage() for record in caplog.records]
    assert any(re.search(r"peer \d+ \(.*, rank \d\) was lost: left: it was destroyed there", text) for text in texts)
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == []


def _world_size(communicator: Communicator) -> int:
    try:
        return communicator.membership.world_size
    except PCCLError:  # it has lost all masters
        return 0


def test_ranks_of_one_machine_link_once() -> None:
    """Each connection in shared memory takes three descriptors."""

    def script(rank: int) -> int:
        dist.barrier()
        count = int(dist.group.WORLD._meeting.communicator.stats["connections"])
        dist.barrier()
        return count

    assert run_ranks(2, script) == [1, 1]
