"""The process group for torchft: its configure, its errors, and torchft's own Manager where that is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from pccl.torch import BackendError  # noqa: E402
from pccl.torch.reconfigure import Handle  # noqa: E402
from pccl.torch.torchft import ProcessGroupPCCL  # noqa: E402
from tests.support.cluster import together  # noqa: E402

TIMEOUT = timedelta(seconds=20)


class Replicas:
    """Process groups as torchft's Managers have them: each is a replica, and all know one store."""

    def __init__(self, count: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._quorum = 0
        self.groups = [ProcessGroupPCCL(TIMEOUT) for _ in range(count)]

    def configure(self, groups: list[ProcessGroupPCCL]) -> None:
        self._quorum += 1
        address = f"127.0.0.1:{self._store.port}/torchft/{self._quorum}/0"
        calls = [
            partial(group.configure, address, f"replica_{rank}", rank, len(groups), self._quorum, 0, 1, [])
            for rank, group in enumerate(groups)
        ]
        together(calls)
        assert [(group.rank(), group.size()) for group in groups] == [(i, len(groups)) for i in range(len(groups))]

    def reconfigure(self, groups: list[ProcessGroupPCCL]) -> None:
        """As Managers of torchft 0.3 do, which exchange handles and no store."""
        self._quorum += 1
        handles = [group.get_reconfigure_handle() for group in groups]
        options = SimpleNamespace(uuid=self._quorum, handles=handles, timeout=TIMEOUT, hints={})
        together([partial(group.reconfigure, options) for group in groups])
        assert [(group.rank(), group.size()) for group in groups] == [(i, len(groups)) for i in range(len(groups))]

    def sum(self, groups: list[ProcessGroupPCCL]) -> list[float]:
        return [float(tensor) for tensor, _ in self.reduce(groups)]

    def reduce(self, groups: list[ProcessGroupPCCL]) -> list[tuple[Any, Any]]:
        def reduce(group: ProcessGroupPCCL) -> tuple[Any, Any]:
            tensor = torch.tensor([group.rank() + 1.0])
            options = dist.AllreduceOptions()
            work = group.allreduce([tensor], options)
            work.wait()
            return tensor, work

        return together([partial(reduce, group) for group in groups])


@pytest.fixture
def replicas() -> Iterator[Callable[[int], Replicas]]:
    made: list[Replicas] = []

    def make(count: int) -> Replicas:
        made.append(Replicas(count))
        return made[-1]

    yield make
    for each in made:
        together([group.shutdown for group in each.groups])


def test_configure_repeatedly(replicas: Callable[[int], Replicas]) -> None:
    four = replicas(4)
    four.configure(four.groups[:3])
    assert four.sum(four.groups[:3]) == [6.0] * 3
    four.configure(four.groups[1:])
    assert four.sum(four.groups[1:]) == [6.0] * 3
    four.configure([four.groups[2]])
    assert four.sum([four.groups[2]]) == [1.0]
    assert four.groups[2].getBackendName() == "torchft-pccl"


def test_loss_in_future_and_errored(replicas: Callable[[int], Replicas]) -> None:
    three = replicas(3)
    three.configure(three.groups)
    three.groups[2].abort()
    survivors = three.groups[:2]
    for (tensor, work), group in zip(three.reduce(survivors), survivors, strict=True):
        assert float(tensor) == group.rank() + 1.0  # as it was
        with pytest.raises(RuntimeError, match=r"rank 2 .replica_2, .*it was aborted there"):
            work.get_future().wait()
        error = group.errored()
        assert isinstance(error, BackendError)
        assert error.lost == (2,)
    assert "was aborted" in str(three.groups[2].errored())
    three.configure(survivors)
    assert [group.errored() for group in survivors] == [None, None]
    assert three.sum(survivors) == [3.0, 3.0]


@pytest.mark.parametrize("again", ["configure", "reconfigure"])
def test_abort_until_next_quorum(replicas: Callable[[int], Replicas], again: str) -> None:
    """A Manager commits no step while `errored` returns an error."""
    two = replicas(2)
    getattr(two, again)(two.groups)
    two.groups[0].abort()
    assert "was aborted" in str(two.groups[0].errored())
    getattr(two, again)(two.groups)
    assert [group.errored() for group in two.groups] == [None, None]
    assert two.sum(two.groups) == [3.0, 3.0]
    assert [group.errored() for group in two.groups] == [None, None]


def test_failed_reconfigure_until_next(replicas: Callable[[int], Replicas]) -> None:
    (group,) = replicas(1).groups
    group.abort()
    handles = [group.get_reconfigure_handle(), str(Handle("0" * 16, "127.0.0.1", 9, "nobody"))]
    options = SimpleNamespace(uuid=1, handles=handles, timeout=timedelta(seconds=0.5), hints={})
    with pytest.raises(BackendError, match="with uuid 1 failed"):
        group.reconfigure(options)
    assert "with uuid 1 failed" in str(group.errored())
    options.uuid, options.handles = 2, handles[:1]
    group.reconfigure(options)
    assert group.errored() is None


def test_loss_after_all_calls_keeps_step(replicas: Callable[[int], Replicas]) -> None:
    two = replicas(2)
    two.configure(two.groups)
    assert two.sum(two.groups) == [3.0, 3.0]
    two.groups[1].abort()
    assert two.groups[0].errored() is None


def test_missing_replica_fails_configure(replicas: Callable[[int], Replicas]) -> None:
    (group,) = replicas(1).groups
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group.set_timeout(timedelta(seconds=0.5))
    with pytest.raises(BackendError, match="configure of process group of torchft in quorum 7 failed"):
        group.configure(f"127.0.0.1:{store.port}/torchft/7/0", "replica_1", 1, 2, 7)
    with pytest.raises(BackendError, match="in quorum 7 failed"):
        group.allreduce([torch.ones(1)], dist.AllreduceOptions())


def test_calls_before_configure_raise(replicas: Callable[[int], Replicas]) -> None:
    (group,) = replicas(1).groups
    with pytest.raises(BackendError, match="call configure first"):
        group.allreduce([torch.ones(1)], dist.AllreduceOptions())


def test_is_torchft_process_group() -> None:
    process_group = pytest.importorskip("torchft.process_group", reason="torchft is not installed")
    group = ProcessGroupPCCL()
    assert isinstance(group, process_group.ProcessGroup)
    group.shutdown()
