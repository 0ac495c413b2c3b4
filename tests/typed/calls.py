"""Calls that type-check, and calls that must not: `mypy --strict` rejects an unused `ignore`.

CI has mypy check this file; this code is not run.
"""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

from pccl import (
    AsyncCollectiveHandle,
    AsyncCommunicator,
    AsyncReduceHandle,
    CollectiveInfo,
    Communicator,
    ReduceInfo,
    ReduceOp,
    Result,
    SharedState,
    SharedStateSyncInfo,
)


def arrays(comm: Communicator, x: NDArray[np.float32], flags: NDArray[np.bool_], anything: Any) -> None:
    comm.all_reduce(x)
    comm.all_reduce(x, x, op=ReduceOp.AVG, timeout=None)
    comm.all_reduce(np.zeros((2, 3)), op=ReduceOp.MAX)
    comm.all_reduce(anything)
    comm.all_gather(flags)
    comm.all_gather(b"bytes")
    comm.broadcast(bytearray(4), root=0)
    comm.send(memoryview(b"bytes"), dst=1)
    comm.recv(x, src=1)

    comm.all_reduce([1, 2])  # type: ignore[arg-type]
    comm.all_reduce((1.0, 2.0))  # type: ignore[arg-type]
    comm.all_reduce(3)  # type: ignore[arg-type]
    comm.all_reduce(np.float32(3))  # type: ignore[arg-type]
    comm.all_reduce(b"bytes")  # type: ignore[arg-type]
    comm.all_reduce("text")  # type: ignore[arg-type]
    comm.all_reduce(x, [1, 2])  # type: ignore[arg-type]
    comm.all_reduce_async([1, 2])  # type: ignore[arg-type]
    comm.reduce_scatter([1, 2])  # type: ignore[arg-type]
    comm.all_gather([1, 2])  # type: ignore[arg-type]
    comm.broadcast("text", root=0)  # type: ignore[arg-type]
    comm.send([1, 2], dst=1)  # type: ignore[arg-type]
    comm.all_reduce(x, op="sum")  # type: ignore[arg-type]
    comm.all_reduce(x, ReduceOp.SUM)  # type: ignore[arg-type]
    comm.wait_for_peers()  # type: ignore[call-arg]
    Communicator(48148)  # type: ignore[arg-type]


def results(comm: Communicator, x: NDArray[np.float32], state: SharedState) -> None:
    assert_type(Communicator(), Communicator)
    assert_type(comm.wait_for_peers(2), int)
    assert_type(comm.are_peers_pending(), bool)
    assert_type(comm.all_reduce(x), ReduceInfo)
    assert_type(comm.all_gather(x), CollectiveInfo)
    assert_type(comm.sync_shared_state(state), SharedStateSyncInfo)
    assert_type(comm.all_reduce_async(x), AsyncReduceHandle)
    assert_type(comm.launch.all_gather(x), AsyncCollectiveHandle)
    assert_type(comm.all_reduce_async(x).wait(), tuple[bool, Result, ReduceInfo | None])
    assert_type(comm.all_reduce_async(x).result(), ReduceInfo)


async def awaited(comm: AsyncCommunicator, x: NDArray[np.float32], state: SharedState) -> None:
    assert_type(await comm.wait_for_peers(2), int)
    assert_type(await comm.are_peers_pending(), bool)
    assert_type(await comm.all_reduce(x), ReduceInfo)
    assert_type(await comm.all_gather(x), CollectiveInfo)
    assert_type(await comm.sync_shared_state(state), SharedStateSyncInfo)
    assert_type(await comm.all_reduce_async(x), ReduceInfo)
    assert_type(await comm.launch.all_gather(x), CollectiveInfo)
    assert_type(comm.world_size, int)
    await comm.all_reduce([1, 2])  # type: ignore[arg-type]
    await comm.broadcast(x)  # type: ignore[call-arg]
    await comm.broadcast(x, root="first")  # type: ignore[arg-type]
    await comm.wait_for_peers(count="two")  # type: ignore[arg-type]
