"""Process groups that lose ranks and gain new ones. Each rank is a process group object in this process.

`dist._reconfigure` calls `reconfigure` if torch has it (2.15).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch._C._distributed_c10d import ErrorType  # noqa: E402

from pccl.torch import ArgumentError, BackendError, ProcessGroupPCCL  # noqa: E402
from tests.support.cluster import WAIT_S, Background, together, until  # noqa: E402
from tests.torch.ranks import run_ranks, worlds  # noqa: E402

LIMIT = timedelta(seconds=20)


class Group:
    """A process group object of one rank."""

    def __init__(self) -> None:
        self.pg = ProcessGroupPCCL(dist.HashStore(), 0, 1, LIMIT, name="elastic", enable_reconfigure=True)
        self.handle = self.pg.get_reconfigure_handle()

    def reconfigure(self, uuid: int, groups: Sequence[Group] | set[str], timeout: timedelta | None = LIMIT) -> None:
        handles = groups if isinstance(groups, set) else [group.handle for group in groups]
        if hasattr(dist, "_reconfigure"):
            work = dist._reconfigure(uuid, handles, self.pg, timeout)
        else:
            work = self.pg.reconfigure(SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout, hints={}))
        assert work.wait()
        assert work.is_completed()

    def sum(self) -> list[float]:
        """Return the sum of all ranks plus 1."""
        tensor = torch.full((2,), self.pg.rank() + 1.0)
        self.pg.allreduce([tensor]).wait()
        return [float(each) for each in tensor]

    def failure(self, call: Callable[[], Any] | None = None) -> BackendError:
        with pytest.raises(BackendError) as caught:
            (call or self.sum)()
        return caught.value


def sums(groups: Sequence[Group]) -> list[list[float]]:
    return together([group.sum for group in groups])


def total(size: int) -> list[float]:
    return [size * (size + 1) / 2] * 2


def form(uuid: int, groups: Sequence[Group]) -> None:
    """Make these the ranks of a new world, and see that they are."""
    together([partial(group.reconfigure, uuid, groups) for group in groups])
    assert [(group.pg.rank(), group.pg.size()) for group in groups] == [(i, len(groups)) for i in range(len(groups))]
    assert sums(groups) == [total(len(groups))] * len(groups)


@pytest.fixture
def ranks() -> Iterator[Callable[[int], list[Group]]]:
    made: list[Group] = []

    def make(count: int) -> list[Group]:
        made.extend(Group() for _ in range(count))
        return made[-count:]

    yield make
    together([group.pg.shutdown for group in made])


Ranks = Callable[[int], list[Group]]


def test_handle_order_gives_ranks(ranks: Ranks) -> None:
    a, b, c = ranks(3)
    form(1, [a, b, c])
    form(2, [c, a, b])
    assert [group.pg.get_reconfigure_handle() for group in (a, b, c)] == [a.handle, b.handle, c.handle]
    in_order = sorted([a, b, c], key=lambda group: group.handle)
    together([partial(group.reconfigure, 3, {a.handle, b.handle, c.handle}) for group in in_order])
    assert [group.pg.rank() for group in in_order] == [0, 1, 2]


def test_left_out_rank_can_return(ranks: Ranks) -> None:
    a, b, c = ranks(3)
    form(1, [a, b, c])
    form(2, [a, c])
    error = b.failure()
    assert "it moved to uuid 2" in str(error)
    assert b.pg.get_error() == ErrorType.REMOTE_ERROR
    form(3, [a, b, c])
    assert b.pg.get_error() == ErrorType.SUCCESS


def test_split_and_merge(ranks: Ranks) -> None:
    groups = ranks(4)
    together([partial(group.reconfigure, 10 + i // 2, groups[i // 2 * 2 :][:2]) for i, group in enumerate(groups)])
    assert sums(groups) == [total(2)] * 4
    form(12, groups)
    for i, group in enumerate(groups):
        group.reconfigure(20 + i, [group])
        assert (group.pg.rank(), group.pg.size(), group.sum()) == (0, 1, [1.0, 1.0])
    form(30, groups)


def test_calls_before_first_world_raise(ranks: Ranks) -> None:
    (group,) = ranks(1)
    assert "call reconfigure first" in str(group.failure())
    assert group.pg.supports_reconfigure
    assert group.pg._get_backend(torch.device("cpu")).supports_reconfigure
    assert group.pg.get_error() == ErrorType.SUCCESS


def test_used_uuid_keeps_world(ranks: Ranks) -> None:
    groups = ranks(2)
    form(1, groups)
    for group in groups:
        with pytest.raises(ArgumentError, match="uuid 1 was already used"):
            group.reconfigure(1, groups)
    assert sums(groups) == [total(2)] * 2


@pytest.mark.parametrize("newcomer_is_first", [True, False])
def test_used_uuid_fails_at_once_on_newcomers(ranks: Ranks, newcomer_is_first: bool) -> None:
    """As where a restarted scheduler numbers its worlds from the beginning."""
    a, b, newcomer = ranks(3)
    form(1, [a, b])
    groups = [newcomer, a, b] if newcomer_is_first else [a, b, newcomer]
    entering = Background(
        partial(newcomer.failure, partial(newcomer.reconfigure, 1, groups, timedelta(seconds=WAIT_S)))
    )
    for group in (a, b):
        with pytest.raises(ArgumentError, match="uuid 1 was already used"):
            group.reconfigure(1, groups)
    assert re.search(r"refused it: the uuid 1 was already used|passed different handles", str(entering.result()))
    form(2, groups)


def test_wrong_handles_keep_world(ranks: Ranks) -> None:
    groups = ranks(3)
    form(1, groups[:2])
    a, b, c = groups
    with pytest.raises(ArgumentError, match="is not among the 2 passed to reconfigure"):
        a.reconfigure(2, [b, c])
    with pytest.raises(ArgumentError, match="more than once"):
        a.reconfigure(2, [a, b, a])
    with pytest.raises(ArgumentError, match="at least the handle"):
        a.reconfigure(2, [])
    with pytest.raises(ArgumentError, match="not a handle of a pccl process group"):
        a.reconfigure(2, {a.handle, "gloo:0:-1:0:"})
    assert sums(groups[:2]) == [total(2)] * 2


def test_missing_rank_named_and_retry_works(ranks: Ranks) -> None:
    groups = ranks(3)
    form(1, groups)
    short = timedelta(seconds=0.3)
    calls = [Background(partial(group.failure, partial(group.reconfigure, 2, groups, short))) for group in groups[:2]]
    for call in calls:
        assert "reconfigure with uuid 2 timed out" in str(call.result())
        assert "rank 2 (" in str(call.result())
    error = groups[0].failure()
    assert "reconfigure of process group elastic with uuid 2 failed: reconfigure with uuid 2 timed out" in str(error)
    late = groups[2].failure(partial(groups[2].reconfigure, 2, groups))
    assert "timed out" in str(late)
    form(3, groups)


def test_abort_ends_calls_on_all_ranks(ranks: Ranks) -> None:
    groups = ranks(3)
    form(1, groups)
    works = [group.pg.allreduce([torch.ones(3)]) for group in groups[1:]]
    began_s = time.monotonic()
    groups[1].pg.abort()
    assert "was aborted on rank 1" in str(groups[1].failure(works[0].wait))
    heard = groups[2].failure(works[1].wait)
    assert "was lost (left: it was aborted there" in str(heard)
    assert heard.lost == (1,)
    assert "it was aborted there" in str(groups[0].failure())
    assert time.monotonic() - began_s < WAIT_S / 4
    expected = [ErrorType.REMOTE_ERROR, ErrorType.SUCCESS, ErrorType.REMOTE_ERROR]
    assert [group.pg.get_error() for group in groups] == expected
    for group in groups:
        group.pg.abort()
        assert group.pg.get_error() == ErrorType.SUCCESS
        assert "was aborted" in str(group.failure())
    form(2, groups)


def test_late_rank_sees_same_loss(ranks: Ranks) -> None:
    """Ranks that saw the loss earlier and left are not lost: the next group includes them."""
    groups = ranks(4)
    form(1, groups)
    groups[3].pg.abort()
    for group in groups[1:3]:
        assert group.failure().lost == (3,)
        group.pg.abort()
    communicator: Any = groups[0].pg._scheduler.transport.communicator
    until(lambda: len(communicator.losses) == 3, "that all others have left")
    assert groups[0].failure().lost == (3,)
    form(2, groups[:3])


def test_loss_detected_while_idle(ranks: Ranks) -> None:
    groups = ranks(3)
    form(1, groups)
    groups[0].pg.abort()
    for group in groups[1:]:
        until(lambda group=group: group.pg.get_error() == ErrorType.REMOTE_ERROR, "the loss is known")


def test_queued_calls_fail_on_reconfigure(ranks: Ranks) -> None:
    groups = ranks(2)
    form(1, groups)
    works = [groups[0].pg.allreduce([torch.ones(3)]) for _ in range(40)]
    form_alone = Background(partial(groups[0].reconfigure, 2, [groups[0]]))
    form_alone.result()
    for work in works:
        assert "moved to another world" in str(groups[0].failure(work.wait))


def test_reconfigure_after_timeout(ranks: Ranks) -> None:
    groups = ranks(3)
    form(1, groups)
    groups[1].pg.set_timeout(timedelta(milliseconds=50))
    error = groups[1].failure()
    assert "timed out" in str(error)
    assert groups[1].pg.get_error() == ErrorType.TIMEOUT
    groups[1].pg.set_timeout(LIMIT)
    form(2, groups)
    assert groups[1].pg.get_error() == ErrorType.SUCCESS


def test_dtensor_coordinates_after_reconfigure() -> None:
    """torch keeps what it knows of a mesh, and takes a mesh of as many ranks for the same one."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    handles = ["", ""]
    both_are_here = threading.Barrier(2)

    def script(rank: int) -> list[tuple[list[int], list[float]]]:
        pg = dist.distributed_c10d._get_default_group()
        handles[rank] = pg.get_reconfigure_handle()
        both_are_here.wait(WAIT_S)
        found = []
        for uuid in (1, 2):
            places = handles[::-1] if uuid == 1 else handles
            pg.reconfigure(SimpleNamespace(uuid=uuid, handles=places, timeout=LIMIT, hints={}))
            mesh = init_device_mesh("cpu", (2,))
            sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
            shifted = sharded + 10
            found.append((list(shifted.device_mesh.get_coordinate()), shifted.full_tensor().tolist()))
            assert dist.get_process_group_ranks(pg) == [0, 1]
        return found

    with worlds():
        assert run_ranks(2, script) == [
            [([1], [10.0, 11.0, 12.0, 13.0]), ([0], [10.0, 11.0, 12.0, 13.0])],
            [([0], [10.0, 11.0, 12.0, 13.0]), ([1], [10.0, 11.0, 12.0, 13.0])],
        ]
