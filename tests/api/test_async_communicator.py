"""The communicator for trio: the same calls as coroutines, ended by cancellation as any other."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

import pccl
from pccl import (
    AsyncCommunicator,
    Attribute,
    MasterNode,
    PCCLError,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    Result,
    SharedState,
)
from tests.support.cluster import WAIT_S, Background, Cluster, until

SUM = ReduceOp.SUM
Peers = list[AsyncCommunicator]


def ones() -> np.ndarray[Any, Any]:
    return np.ones(8, np.float32)


WAITING = ("connect", "are_peers_pending", "update_topology", "optimize_topology", "sync_shared_state", "all_reduce")


@pytest.mark.parametrize("name", [*WAITING, "all_reduce_multiple_with_retry", "all_gather", "barrier", "close"])
def test_methods_are_coroutine_functions(name: str) -> None:
    """Libraries that retry, wrap or mock calls ask whether a method is one."""
    assert inspect.iscoroutinefunction(getattr(AsyncCommunicator, name))
    assert inspect.iscoroutinefunction(getattr(AsyncCommunicator("127.0.0.1:9"), name))
    assert not inspect.iscoroutinefunction(getattr(pccl.Communicator, name))


@pytest.mark.parametrize("name", [*WAITING, "all_gather", "barrier", "wait_for_peers", "admit_peers"])
def test_methods_have_signature_and_help_of_communicator(name: str) -> None:
    method, blocking = getattr(AsyncCommunicator, name), getattr(pccl.Communicator, name)
    assert inspect.signature(method) == inspect.signature(blocking)
    assert inspect.getdoc(method) == inspect.getdoc(blocking)


def test_wrong_argument_is_raised_by_await() -> None:
    peer = AsyncCommunicator("127.0.0.1:9")

    async def main() -> None:
        for call in (peer.connect("many"), peer.all_reduce(ones(), op=9)):  # type: ignore[arg-type]
            with pytest.raises(PCCLError, match="INVALID_ARGUMENT"):
                await call

    trio.run(main)


async def gather(peer: AsyncCommunicator, world: int) -> None:
    while peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < world:
        await peer.update_topology()


async def all_of(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Their values, or the PCCLErrors that they raised."""
    found: list[Any] = [None] * len(calls)

    async def one(index: int, call: Callable[[], Awaitable[Any]]) -> None:
        try:
            found[index] = await call()
        except PCCLError as error:
            found[index] = error

    async with trio.open_nursery() as nursery:
        for index, call in enumerate(calls):
            nursery.start_soon(one, index, call)
    return found


def in_run(world: int) -> Callable[[Callable[[Peers], Awaitable[None]]], Callable[[MasterNode], None]]:
    """Make a test of a coroutine that takes this number of accepted peers."""

    def decorate(test: Callable[[Peers], Awaitable[None]]) -> Callable[[MasterNode], None]:
        async def main(address: str) -> None:
            with trio.fail_after(WAIT_S):
                peers = [AsyncCommunicator(address) for _ in range(world)]

                async def join(peer: AsyncCommunicator) -> None:
                    await peer.connect()
                    await gather(peer, world)

                await all_of(*(partial(join, peer) for peer in peers))
                await test(peers)
                await all_of(*(peer.close for peer in peers))

        def run(master: MasterNode) -> None:
            trio.run(main, master.address)

        run.__doc__ = test.__doc__
        return run

    return decorate


@in_run(3)
async def test_reduces_and_group_calls(peers: Peers) -> None:
    arrays = [ones() for _ in peers]
    infos = await all_of(*(partial(peer.all_reduce, x, op=SUM) for peer, x in zip(peers, arrays, strict=True)))
    assert [info.world_size for info in infos] == [3] * 3
    assert all(np.all(x == 3) for x in arrays)
    assert await all_of(*(peer.are_peers_pending for peer in peers)) == [False] * 3
    assert await all_of(*(peer.optimize_topology for peer in peers)) == [None] * 3
    states = [SharedState.from_numpy({"x": np.full(9, i)}) for i in range(3)]
    synced = await all_of(*(partial(p.sync_shared_state, s) for p, s in zip(peers, states, strict=True)))
    assert sorted(info.rx_bytes for info in synced) == [0, 72, 72]


@in_run(2)
async def test_cancelled_await_leaves_op_in_flight(peers: Peers) -> None:
    x = ones()
    handle = peers[0].all_reduce_async(x, op=SUM, tag=1)
    with trio.move_on_after(0.02) as scope:
        await handle
    assert scope.cancelled_caught
    assert not handle.done()
    await peers[1].all_reduce(ones(), op=SUM, tag=1)
    assert (await handle).world_size == 2
    assert np.all(x == 2)


@in_run(2)
async def test_async_cancel_aborts_op_and_returns_arrays(peers: Peers) -> None:
    x = ones()
    handle = peers[0].all_reduce_async(x, op=SUM, tag=1)
    with pytest.raises(PCCLError, match="async_cancel"):
        handle.cancel()
    assert await handle.async_cancel()
    assert np.all(x == 1)
    with pytest.raises(PCCLError, match="TIMEOUT"):
        await handle
    (late,) = await all_of(partial(peers[1].all_reduce, ones(), op=SUM, tag=1))
    assert late.result is Result.TIMEOUT


@in_run(2)
async def test_cancel_scope_aborts_op_on_all_peers(peers: Peers) -> None:
    x = ones()
    with trio.move_on_after(0.02) as scope:
        await peers[0].all_reduce(x, op=SUM)
    assert scope.cancelled_caught
    assert np.all(x == 1)
    (late,) = await all_of(partial(peers[1].all_reduce, ones(), op=SUM))
    assert (late.result, "gave up the op" in str(late)) == (Result.TIMEOUT, True)
    infos = await all_of(*(partial(peer.all_reduce, ones(), op=SUM) for peer in peers))
    assert [info.world_size for info in infos] == [2, 2]


@in_run(2)
async def test_ctrl_c_withdraws_async_calls(peers: Peers) -> None:
    x = ones()
    state = SharedState.from_numpy({"x": ones()})
    ops = [ReduceOpDescriptor.from_numpy(x, x, ReduceDescriptor(8, SUM, tag)) for tag in (1, 2)]
    calls: list[Callable[[], Awaitable[Any]]] = [
        partial(peers[0].all_reduce, x, op=SUM),
        partial(peers[0].all_reduce_multiple_with_retry, ops),
        peers[0].update_topology,
        partial(peers[0].sync_shared_state, state),
    ]
    session = peers[0]._inner._session
    assert session is not None

    @trio.lowlevel.enable_ki_protection  # so that it comes where the main task waits, and not here
    def press() -> None:
        signal.raise_signal(signal.SIGINT)

    async def ctrl_c() -> None:
        await trio.to_thread.run_sync(until, lambda: session.ops.table or len(session._calls), "it waits")
        press()

    for call in calls:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ctrl_c)
            with pytest.raises(KeyboardInterrupt):
                await call()
        assert not session.ops.table
    found = await all_of(*(partial(peer.all_reduce, ones(), op=SUM, tag=9) for peer in peers))
    assert [info.world_size for info in found] == [2, 2]
    assert await all_of(*(peer.update_topology for peer in peers)) == [None, None]


@in_run(2)
async def test_cancel_withdraws_group_calls(peers: Peers) -> None:
    state = SharedState.from_numpy({"x": ones()})
    calls: list[Callable[[], Awaitable[Any]]] = [
        peers[0].update_topology,
        partial(peers[0].sync_shared_state, state),
        peers[0].are_peers_pending,
    ]
    for call in calls:
        with trio.move_on_after(0.02) as scope:
            await call()
        assert scope.cancelled_caught
    assert await all_of(*(peer.update_topology for peer in peers)) == [None, None]


@in_run(1)
async def test_cancel_withdraws_connect(peers: Peers) -> None:
    newcomer = AsyncCommunicator(peers[0]._inner.address)
    with trio.move_on_after(0.02) as scope:
        await newcomer.connect()
    assert scope.cancelled_caught
    while await peers[0].are_peers_pending():
        pass
    await all_of(partial(gather, peers[0], 2), newcomer.connect)
    assert newcomer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 2
    await newcomer.close()


def test_blocking_and_async_peers_in_one_run(cluster: Cluster) -> None:
    cluster.join(1)
    x, y = ones(), ones()

    async def main() -> None:
        async with AsyncCommunicator(cluster.address) as peer:
            assert (await peer.all_reduce(x, op=SUM)).world_size == 2

    other = Background(partial(trio.run, main))
    while cluster[0].world_size < 2:
        cluster[0].update_topology()
    cluster[0].all_reduce(y, op=SUM)
    other.result()
    assert x.tolist() == y.tolist() == [2.0] * 8


@pytest.mark.parametrize("has_op", [False, True])
def test_peer_leaves_when_its_trio_run_ends(cluster: Cluster, has_op: bool) -> None:
    cluster.join(1)
    x = ones()

    async def main() -> None:
        peer = AsyncCommunicator(cluster.address)
        await peer.connect()
        if has_op:
            peer.all_reduce_async(x, op=SUM)

    other = Background(partial(trio.run, main))
    while not other.is_over:
        cluster[0].update_topology()
    other.result()
    until(lambda: cluster[0].world_size == 1, "it is gone")
    assert np.all(x == 1)
