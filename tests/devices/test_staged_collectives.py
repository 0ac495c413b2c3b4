"""The collectives besides all_reduce, with arrays on a device whose copies come late, and on several kinds at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from pccl import AsyncCollectiveHandle, CollectiveInfo, Communicator, ReduceAlgorithm, ReduceOp, Result
from pccl.devices.staging import helper_of
from tests.support.cluster import Background, Cluster, outcomes, refusal, results, until
from tests.support.fake_device import FakeArray, FakeDevice

COUNT = 5197
WORLD = 3
LATE_S = 0.03
SUM = ReduceOp.SUM

Call = Callable[[Communicator, Any], CollectiveInfo]

CALLS: dict[str, Call] = {
    "all_gather": lambda peer, array: peer.all_gather(array),
    "reduce_scatter": lambda peer, array: peer.reduce_scatter(array, op=SUM),
    "broadcast": lambda peer, array: peer.broadcast(array, root=1),
}
every_call = pytest.mark.parametrize("name", CALLS)


def values(rank: int, count: int = COUNT, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(rank).integers(0, 100, count).astype(dtype)


def expected(name: str, rank: int, count: int = COUNT, dtype: Any = np.float32) -> Any:
    given = [values(each, count, dtype) for each in range(WORLD)]
    if name == "all_gather":
        return np.stack(given)
    if name == "broadcast":
        return given[1]
    return np.array_split(sum(given), WORLD)[rank]


def seen(array: Any) -> Any:
    return array.get() if isinstance(array, FakeArray) else array


@every_call
def test_order_with_streams_of_program(three_peers: Cluster, devices: list[FakeDevice], name: str) -> None:
    def call(peer: Communicator, i: int) -> None:
        devices[i].kernel_s = devices[i].write_s = LATE_S
        rank = peer.membership.rank
        with devices[i].stream(devices[i].new_stream()):
            array = devices[i].array(np.zeros(COUNT, np.float32)).set_later(values(rank))
            info = CALLS[name](peer, array)
            np.testing.assert_array_equal(info.array.get(), expected(name, rank))
            if name != "broadcast":
                np.testing.assert_array_equal(array.get(), values(rank))

    three_peers.each(call)


@every_call
@pytest.mark.parametrize("algorithm", ReduceAlgorithm)
@pytest.mark.parametrize("on_device", [(0,), (1,), (0, 2)])
def test_devices_and_cpus_share_ops_of_any_size(
    three_peers: Cluster, devices: list[FakeDevice], name: str, algorithm: ReduceAlgorithm, on_device: tuple[int, ...]
) -> None:
    def call(peer: Communicator, i: int) -> None:
        rank = peer.membership.rank
        array = devices[i].array(values(rank)) if rank in on_device else values(rank)
        options = {"broadcast": {"root": 1}, "reduce_scatter": {"op": SUM}}.get(name, {})
        info = getattr(peer, name)(array, **options, algorithm=algorithm)
        assert isinstance(info.array, FakeArray) == (rank in on_device)
        np.testing.assert_array_equal(seen(info.array), expected(name, rank))

    three_peers.each(call)


@pytest.mark.parametrize("count", [0, 1, 2, 7])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.int64])
@every_call
def test_small_ones_of_every_dtype(
    three_peers: Cluster, devices: list[FakeDevice], name: str, count: int, dtype: Any
) -> None:
    def call(peer: Communicator, i: int) -> None:
        rank = peer.membership.rank
        info = CALLS[name](peer, devices[i].array(values(rank, count, dtype)))
        np.testing.assert_array_equal(seen(info.array), expected(name, rank, count, dtype))

    three_peers.each(call)


@pytest.mark.parametrize("on_device", [(0,), (1,), (0, 1)])
def test_send_and_recv(three_peers: Cluster, devices: list[FakeDevice], on_device: tuple[int, ...]) -> None:
    def call(peer: Communicator, i: int) -> None:
        rank = peer.membership.rank
        if rank == 2:
            return
        array = devices[i].array(values(rank)) if rank in on_device else values(rank)
        if rank == 0:
            peer.send(array, dst=1)
        else:
            peer.recv(array, src=0)
        np.testing.assert_array_equal(seen(array), values(0))

    three_peers.each(call)


def test_concurrent_ops(three_peers: Cluster, devices: list[FakeDevice]) -> None:
    ops = 5

    def result_of(handle: AsyncCollectiveHandle) -> Any:
        return handle.result().array.get()

    def call(peer: Communicator, i: int) -> None:
        rank = peer.membership.rank
        for turn in range(3):
            held = [devices[i].array(values(rank) + tag + turn) for tag in range(ops)]
            handles = [peer.launch.all_gather(array, tag=tag) for tag, array in enumerate(held)]
            for tag in reversed(range(ops)):
                for thread in [Background(partial(result_of, handles[tag])) for _ in range(2)]:
                    np.testing.assert_array_equal(thread.result(), expected("all_gather", rank) + tag + turn)

    three_peers.each(call)
    pool = helper_of(devices[0]).pool
    until(lambda: pool.idle_bytes == pool.pinned_bytes, "all blocks are free again")


def test_arguments_are_checked(three_peers: Cluster, devices: list[FakeDevice]) -> None:
    array = devices[0].array(values(0))
    for recv in (devices[1].array(np.zeros(WORLD * COUNT, np.float32)), np.zeros(WORLD * COUNT, np.float32)):
        error = refusal(partial(three_peers[0].all_gather, array, recv))
        assert error.result is Result.INVALID_ARGUMENT
        assert "send is on fake:0 but recv on" in str(error)
    wrong = devices[0].array(np.zeros(COUNT, np.float32))
    given = [wrong, None, None]
    failed = three_peers.outcomes(lambda peer, i: peer.all_gather(devices[i].array(values(i)), given[i]))
    assert results(failed) == [Result.INVALID_ARGUMENT] * WORLD
    assert f"recv has {COUNT} elements" in str(failed[1])
    array.is_writable = False
    next_rank = (three_peers[0].membership.rank + 1) % WORLD
    assert "read-only" in str(refusal(lambda: three_peers[0].recv(array, src=next_rank)))


# Failure.


def launched(name: str, peer: Communicator, array: Any) -> AsyncCollectiveHandle:
    """Launch an op and wait until it has begun: who is lost from then on was part of it."""
    options = {"broadcast": {"root": 1}, "reduce_scatter": {"op": SUM}}.get(name, {})
    handle: AsyncCollectiveHandle = getattr(peer, f"{name}_async")(array, **options)
    until(lambda: handle._op.epoch is not None, "the op has begun")
    return handle


@every_call
def test_loss_leaves_arrays_unchanged(cluster: Cluster, devices: list[FakeDevice], name: str) -> None:
    cluster.join(WORLD)
    held = [device.array(values(i)) for i, device in enumerate(devices)]
    lost = cluster.peers.pop()
    for device in devices:
        device.reads_held.clear()
    handles = [launched(name, *pair) for pair in zip([*cluster.peers, lost], held, strict=True)]
    lost.close()
    for handle in handles[:2]:
        assert refusal(handle.result).result is Result.RANK_CONNECTION_LOST
    for device in devices:
        device.reads_held.set()
    for i in range(2):
        np.testing.assert_array_equal(held[i].settled(), values(i))
        assert devices[i].writes == 0
    for info in cluster.each(lambda peer, i: peer.all_gather(held[i])):
        assert info.world_size == 2


@pytest.mark.parametrize("breaks_late", [False, True])
@every_call
def test_device_failure_fails_op_on_all_peers(
    cluster: Cluster, devices: list[FakeDevice], name: str, breaks_late: bool
) -> None:
    cluster.join(2)
    for device in devices:
        device.breaks_late = breaks_late
        device.fails_after_reads = 0
    failed = cluster.outcomes(lambda peer, i: CALLS[name](peer, devices[i].array(values(i))))
    assert results(failed) == [Result.INTERNAL_ERROR] * 2
    assert "the fake device is broken" in str(failed[0])
    for device in devices:
        device.fails_after_reads = None
    cluster.each(lambda peer, i: CALLS[name](peer, devices[i].array(values(i))))


def test_device_out_of_memory_fails_own_caller(
    cluster: Cluster, devices: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.join(2)

    def full(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(devices[0], "empty", full)
    handles = [peer.launch.all_gather(devices[i].array(values(i))) for i, peer in enumerate(cluster.peers)]
    found = outcomes([handle.result for handle in handles])
    assert results(found) == [Result.INTERNAL_ERROR, Result.SUCCESS]
    assert "out of memory" in str(found[0])
    monkeypatch.undo()
    np.testing.assert_array_equal(handles[0].result().array.get()[0], values(handles[0].result().rank))
