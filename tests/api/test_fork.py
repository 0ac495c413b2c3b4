"""Forks while ops are in flight: the child has no part in the run, and the parent continues."""

from __future__ import annotations

import gc
import multiprocessing
from functools import partial
from typing import Any

import numpy as np

from pccl import Communicator, PCCLError, ReduceOp, Result, SharedState, TensorInfo
from tests.support import fake_device
from tests.support.cluster import WAIT_S, Background, Cluster, refusal, until
from tests.support.forks import forking, in_child, needs_proc

SUM = ReduceOp.SUM

pytestmark = needs_proc


def refused(peer: Communicator) -> str:
    try:
        peer.update_topology()
    except PCCLError as error:
        return error.result.name
    return "not refused"


def test_fork_while_other_threads_launch(cluster: Cluster) -> None:
    """Whatever was between two threads in the parent, an op of it is over in the child, or was never launched."""
    cluster.join(2)
    handles: list[Any] = []

    def reduce(peer: Communicator, _: int) -> None:
        for _ in range(150):
            handle = peer.all_reduce_async(np.ones(8), op=SUM)
            handles.append(handle)
            handle.result(WAIT_S)

    def child() -> str:
        found = {handle.wait(WAIT_S)[1] for handle in handles[-4:]}
        return "fine" if found <= {Result.SUCCESS, Result.NOT_INITIALIZED} else str(found)

    reducing = Background(lambda: cluster.each(reduce))
    until(lambda: handles, "they reduce")
    said = {in_child(child)}
    while not reducing.is_over:
        said.add(in_child(child))
    reducing.result()
    assert said == {"fine"}


LOADED = np.arange(1000.0)


def load(batch: int) -> float:
    return float(LOADED.sum() + batch)


def test_forked_dataloader_workers(cluster: Cluster) -> None:
    cluster.join(2)
    context = multiprocessing.get_context("fork")
    for _ in range(2):
        with forking():
            loaders = context.Pool(2)
        handle = cluster[0].all_reduce_async(LOADED.copy(), op=SUM)
        loading = loaders.map_async(load, range(20))
        assert cluster[1].all_reduce(LOADED.copy(), op=SUM).world_size == 2
        assert handle.wait(WAIT_S)[0]
        assert loading.get(WAIT_S) == [LOADED.sum() + batch for batch in range(20)]
        with forking():
            loaders.terminate()
        loaders.join()
    assert cluster.each(lambda peer, _: peer.world_size) == [2, 2]


def test_forked_child_does_not_use_the_device(cluster: Cluster) -> None:
    cluster.join(2)
    with fake_device.running(2) as devices:
        held = [device.array(np.ones(5000)) for device in devices]
        devices[0].reads_held.clear()
        handles = [peer.all_reduce_async(held[i], op=SUM) for i, peer in enumerate(cluster.peers)]
        until(lambda: devices[0].reads, "a copy is under way")

        def child() -> str:
            def forbidden(*_: Any) -> None:
                raise AssertionError("the child uses the device")

            for name in ("mark", "read", "write", "follow", "allocate", "synchronize"):
                setattr(devices[0], name, forbidden)
            state = SharedState([TensorInfo.from_torch(held[0], "x")])
            calls = [
                handles[0].result,
                partial(cluster[0].all_reduce, held[0], op=SUM),
                partial(cluster[0].all_gather, held[0]),
                partial(cluster[0].sync_shared_state, state),
            ]
            handles.clear()
            gc.collect()
            return ", ".join(refusal(call).result.name for call in calls)

        assert in_child(child) == ", ".join(["NOT_INITIALIZED"] * 4)
        devices[0].reads_held.set()
        for handle, array in zip(handles, held, strict=True):
            assert handle.wait()[0]
            np.testing.assert_array_equal(array.get(), np.full(5000, 2.0))
