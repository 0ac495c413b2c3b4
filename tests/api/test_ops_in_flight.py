"""Ops in flight together: tags in any order, handles, many ops at once, and group calls at the same time."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest

from pccl import Communicator, PCCLError, ReduceOp, Result, SharedState
from tests.api.descriptors import descriptors
from tests.support.cluster import (
    SUM,
    WAIT_S,
    Background,
    Cluster,
    ones,
    reduce_once,
    refusal,
    together,
    until,
)


def test_tags_launched_in_any_order_from_several_threads(cluster: Cluster) -> None:
    cluster.join(3, segment_bytes=256)
    tags = range(60)

    def work(peer: Communicator, index: int, thread: int) -> None:
        order = [tag for tag in tags if tag % 3 == thread]
        random.Random(f"{index} {thread}").shuffle(order)
        arrays = {tag: np.full(tag * 7, tag + index, np.int64) for tag in order}
        handles = {tag: peer.all_reduce_async(arrays[tag], op=SUM, tag=tag) for tag in order}
        random.Random(f"{thread} {index}").shuffle(order)
        for tag in order:
            is_success, status, info = handles[tag].wait(WAIT_S)
            assert (is_success, status) == (True, Result.SUCCESS)
            assert info is not None
            assert info.world_size == 3
            assert np.all(arrays[tag] == 3 * tag + 3)

    together([partial(work, peer, i, thread) for i, peer in enumerate(cluster.peers) for thread in range(3)])
    until(lambda: cluster[0].stats["ops_open"] == 0, "its engine has let go of all ops")


def test_large_op_does_not_delay_small_ones(cluster: Cluster) -> None:
    cluster.join(2)
    large = [np.ones(2**20, np.float32) for _ in cluster.peers]
    first = cluster[0].all_reduce_async(large[0], op=SUM, tag=1)  # its partner does not come for long
    for _ in range(20):
        assert cluster.each(reduce_once) == [2, 2]
    assert not first.done()
    second = cluster[1].all_reduce_async(large[1], op=SUM, tag=1)
    assert first.result(WAIT_S) == second.result(WAIT_S)


def test_are_peers_pending_with_ops_in_flight(cluster: Cluster) -> None:
    cluster.join(2)
    handle = cluster[0].all_reduce_async(ones(), op=SUM)
    assert cluster.each(lambda peer, _: peer.are_peers_pending()) == [False, False]
    assert not handle.done()
    reduce_once(cluster[1])
    assert handle.wait(WAIT_S)[0]


def test_failed_handle_raises_each_time(cluster: Cluster) -> None:
    cluster.join(2)
    handle = cluster[0].all_reduce_async(ones(), op=SUM)
    cluster.close(cluster[1])
    for _ in range(2):
        assert handle.wait() == (False, Result.RANK_CONNECTION_LOST, None)
        assert refusal(handle.result).result is Result.RANK_CONNECTION_LOST


@pytest.mark.parametrize("max_in_flight", [1, 4, 100])
def test_many_ops_in_different_orders(cluster: Cluster, max_in_flight: int) -> None:
    cluster.join(3)

    def work(peer: Communicator, index: int) -> None:
        tags = list(range(20))
        random.Random(index).shuffle(tags)
        arrays, ops = descriptors(50, tags)
        info = peer.all_reduce_multiple_with_retry(ops, max_in_flight=max_in_flight)
        assert info.world_size == 3
        assert info.tx_bytes > 0
        assert all(np.all(x == 3 * tag) for x, tag in zip(arrays, tags, strict=True))

    cluster.each(work)


def test_many_ops_retry_after_a_loss(cluster: Cluster) -> None:
    cluster.join(3)
    arrays = [descriptors(50, list(range(6))) for _ in range(2)]
    calls = [
        Background(partial(peer.all_reduce_multiple_with_retry, ops))
        for peer, (_, ops) in zip(cluster.peers, arrays, strict=False)
    ]
    until(lambda: cluster[0].stats["ops_open"] == 4, "they wait for the third peer")
    cluster[2].all_reduce(np.full(50, 0.0), op=SUM, tag=0)  # committed, so not tried again
    cluster.peers.pop().close()
    assert [call.result().world_size for call in calls] == [2, 2]
    for found, _ in arrays:
        assert [x[0] for x in found] == [0, 2, 4, 6, 8, 10]


def test_many_ops_end_with_too_few_peers(cluster: Cluster) -> None:
    cluster.join(2)
    arrays, ops = descriptors(50, [0, 1])
    call = Background(partial(cluster[0].all_reduce_multiple_with_retry, ops))
    until(lambda: cluster[0].stats["ops_open"] == 2, "they are in flight")
    cluster.peers.pop().close()
    assert call.outcome().result is Result.TOO_FEW_PEERS
    assert [x[0] for x in arrays] == [0, 1]


def test_many_ops_fail_together(cluster: Cluster) -> None:
    """One of them fails for good: the others are given up, with the same reason for everybody."""
    cluster.join(2)
    arrays, ops = descriptors(50, [0, 1, 2])
    call = Background(partial(cluster[0].all_reduce_multiple_with_retry, ops))
    until(lambda: cluster[0].stats["ops_open"] == 3, "they are in flight")
    differing = refusal(partial(cluster[1].all_reduce, np.zeros(50), op=ReduceOp.MAX, tag=0))
    assert call.outcome().result is differing.result is Result.INVALID_ARGUMENT
    assert [x[0] for x in arrays] == [0, 1, 2]
    late = refusal(partial(cluster[1].all_reduce, np.zeros(50), op=SUM, tag=1))
    assert (late.result, late.message) == (Result.INVALID_ARGUMENT, differing.message)


@pytest.mark.parametrize(("tags", "max_in_flight"), [([], 4), ([1, 2, 1], 4), ([1, 2], 0)])
def test_many_ops_with_wrong_arguments(cluster: Cluster, tags: list[int], max_in_flight: int) -> None:
    (peer,) = cluster.join()
    call = partial(peer.all_reduce_multiple_with_retry, descriptors(5, tags)[1], max_in_flight=max_in_flight)
    assert refusal(call).result is Result.INVALID_ARGUMENT


def test_tag_in_flight_is_refused(cluster: Cluster) -> None:
    cluster.join(2)
    handle = cluster[0].all_reduce_async(ones(), op=SUM, tag=3)
    for call in (cluster[0].all_reduce, cluster[0].all_reduce_async):
        error = refusal(partial(call, ones(), op=SUM, tag=3))
        assert (error.result, "tag 3 is already in flight" in str(error)) == (Result.INVALID_USAGE, True)
    cluster[1].all_reduce(ones(), op=SUM, tag=3)
    assert handle.wait()[0], "the first of them is not disturbed"


@pytest.mark.parametrize("kind", ["update_topology", "optimize_topology", "sync_shared_state"])
def test_ops_in_flight_exclude_some_group_calls(cluster: Cluster, kind: str) -> None:
    cluster.join(2)
    handle = cluster[0].all_reduce_async(ones(), op=SUM, tag=9)
    arguments = [SharedState.from_numpy({"x": ones()})] if kind == "sync_shared_state" else []
    error = refusal(lambda: getattr(cluster[0], kind)(*arguments))
    assert (error.result, "tags [9]" in str(error)) == (Result.PENDING_ASYNC_OPS, True)
    cluster[1].all_reduce(ones(), op=SUM, tag=9)
    assert handle.wait()[0]
    assert cluster.each(lambda peer, _: getattr(peer, kind)(*arguments) is not error) == [True, True]


def test_interrupt_while_a_timeout_aborts_returns_the_arrays(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.join(2)
    [array], ops = descriptors(50, [3])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pccl.handle.Retry.cancel", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cluster[0].all_reduce_multiple_with_retry(ops, timeout=0.02)
    with pytest.raises(PCCLError):
        cluster[1].all_reduce(np.ones_like(array), op=SUM, tag=3, timeout=1.0)
    assert np.all(array == 3)
