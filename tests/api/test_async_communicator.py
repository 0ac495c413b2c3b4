"""The communicator for trio: the same calls as coroutines, ended by cancellation as any other."""

from __future__ import annotations

import inspect
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
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
def test_methods_that_wait_are_coroutine_functions(name: str) -> None:
    """Libraries that retry, wrap or mock calls ask whether a method is one."""
    assert inspect.iscoroutinefunction(getattr(AsyncCommunicator, name))
    assert inspect.iscoroutinefunction(getattr(AsyncCommunicator("127.0.0.1:9"), name))
    assert not inspect.iscoroutinefunction(getattr(pccl.Communicator, name))


def test_wrong_arguments_are_told_where_a_call_is_awaited() -> None:
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
    """Makes a test of a coroutine that takes so many accepted peers."""

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


async def awaited(handle: Any) -> Any:
    return await handle


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
async def test_handles_are_awaited_by_any_number_of_tasks(peers: Peers) -> None:
    arrays = [ones(), ones()]
    handles = [peer.all_reduce_async(x, op=SUM, tag=1) for peer, x in zip(peers, arrays, strict=True)]
    found = await all_of(*(partial(awaited, handle) for handle in handles * 2))
    assert [info.world_size for info in found] == [2] * 4
    assert await handles[0] == found[0]
    assert handles[0].done()
    assert np.all(arrays[0] == 2)


@in_run(2)
async def test_await_that_is_cancelled_leaves_op_in_flight(peers: Peers) -> None:
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
async def test_many_ops_at_once(peers: Peers) -> None:
    arrays = [[ones() for _ in range(9)] for _ in peers]

    async def reduce(peer: AsyncCommunicator, mine: list[Any]) -> int:
        ops = [ReduceOpDescriptor.from_numpy(x, x, ReduceDescriptor(8, SUM, tag)) for tag, x in enumerate(mine)]
        return (await peer.all_reduce_multiple_with_retry(ops)).world_size

    assert await all_of(*(partial(reduce, *pair) for pair in zip(peers, arrays, strict=True))) == [2, 2]
    assert all(np.all(x == 2) for mine in arrays for x in mine)


@in_run(3)
async def test_many_ops_notice_that_one_is_given_up_although_an_older_one_was_never_launched(peers: Peers) -> None:
    x = [ones() for _ in range(3)]
    ops = [ReduceOpDescriptor.from_numpy(each, each, ReduceDescriptor(8, SUM, tag)) for tag, each in enumerate(x)]
    found = await all_of(
        partial(peers[0].all_reduce_multiple_with_retry, ops),
        partial(peers[1].all_reduce, ones(), op=SUM, tag=2, timeout=0.1),
    )
    assert [error.result for error in found] == [Result.TIMEOUT] * 2


@in_run(2)
async def test_a_cancelled_reduce_gives_its_buffer_back_and_all_go_on(peers: Peers) -> None:
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
async def test_ctrl_c_in_the_main_task_withdraws_its_calls(peers: Peers) -> None:
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
async def test_ctrl_c_in_a_task_of_pccl_comes_to_the_main_task_and_the_communicator_lives(peers: Peers) -> None:
    async def press() -> None:
        signal.raise_signal(signal.SIGINT)

    x = ones()
    session = peers[0]._inner._session
    assert session is not None
    session._lifetime.spawn(press)
    with pytest.raises(KeyboardInterrupt):
        await peers[0].all_reduce(x, op=SUM, tag=5)
    assert not session.ops.table
    assert np.all(x == 1)
    found = await all_of(*(partial(peer.all_reduce, ones(), op=SUM, tag=9) for peer in peers))
    assert [info.world_size for info in found] == [2, 2]


WITHOUT_EFFECT = {
    *("parse_masters", "parse_masters.<locals>.<listcomp>", "parse", "_require_text", "is_loopback", "is_name"),
    *("View.global_world_size", "View.world_size", "PeerSession.failure"),
}


def test_ctrl_c_is_raised_nowhere_in_the_middle_of_pccl(master: MasterNode) -> None:
    """Neither in its own tasks nor in calls, unless they wait."""
    exposed, tasks = set[str](), set[str]()
    parts = tuple(str(Path(pccl.__file__).with_name(name)) for name in ("runtime", "protocol"))

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(parts):
            return
        with suppress(RuntimeError):  # between tasks
            tasks.add(trio.lowlevel.current_task().name)
            if not trio.lowlevel.currently_ki_protected():
                exposed.add(frame.f_code.co_qualname)

    @in_run(3)
    async def everything(peers: Peers) -> None:
        handles = [peer.all_reduce_async(ones(), op=SUM) for peer in peers]
        await all_of(*(partial(awaited, handle) for handle in handles))
        states = [SharedState.from_numpy({"x": np.full(9, i)}) for i in range(3)]
        await all_of(*(partial(peer.sync_shared_state, state) for peer, state in zip(peers, states, strict=True)))
        await all_of(*(peer.optimize_topology for peer in peers))
        await all_of(*(partial(peer.broadcast, ones(), root=1) for peer in peers))

    sys.setprofile(profile)
    try:
        everything(master)
    finally:
        sys.setprofile(None)
    assert len(tasks) > 10, tasks
    assert exposed <= WITHOUT_EFFECT


@in_run(2)
async def test_cancelled_group_calls_are_withdrawn(peers: Peers) -> None:
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
async def test_a_cancelled_connect_is_withdrawn(peers: Peers) -> None:
    newcomer = AsyncCommunicator(peers[0]._inner.address)
    with trio.move_on_after(0.02) as scope:
        await newcomer.connect()
    assert scope.cancelled_caught
    while await peers[0].are_peers_pending():
        pass
    await all_of(partial(gather, peers[0], 2), newcomer.connect)
    assert newcomer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 2
    await newcomer.close()


@in_run(2)
async def test_timeouts_and_wrong_use_are_as_in_the_blocking_face(peers: Peers) -> None:
    calls: list[Callable[[], Awaitable[Any]]] = [
        partial(peers[0].update_topology, timeout=0.02),
        partial(peers[0].connect),
        partial(peers[0].all_reduce, [1], op=SUM),
        partial(peers[0].all_reduce, ones(), op=SUM, tag=8, timeout=0.02),
        AsyncCommunicator(peers[0]._inner.address).update_topology,
    ]
    found = [(await all_of(call))[0].result for call in calls]
    assert found == [
        Result.TIMEOUT,
        Result.INVALID_USAGE,
        Result.INVALID_ARGUMENT,
        Result.TIMEOUT,
        Result.NOT_INITIALIZED,
    ]


@in_run(2)
async def test_a_peer_that_closes_fails_the_ops_of_the_others(peers: Peers) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(peers[1].close)
        (found,) = await all_of(partial(peers[0].all_reduce, ones(), op=SUM))
    assert found.result in (Result.RANK_CONNECTION_LOST, Result.TOO_FEW_PEERS)
    (found,) = await all_of(peers[1].update_topology)
    assert found.result is Result.NOT_INITIALIZED


def test_blocking_and_async_peers_are_in_one_run(cluster: Cluster) -> None:
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
def test_a_trio_run_that_ends_takes_its_peer_along(cluster: Cluster, has_op: bool) -> None:
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


def test_who_connects_again_waits_for_the_end_of_the_former_session() -> None:
    """Which listens at the same port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        listen = f"127.0.0.1:{probe.getsockname()[1]}"

    async def main(address: str) -> None:
        async with AsyncCommunicator(address, listen=listen) as peer, trio.open_nursery() as nursery:
            session = peer._inner.session("test")
            may_end, is_again = trio.Event(), trio.Event()

            async def linger() -> None:
                with trio.CancelScope(shield=True):
                    await may_end.wait()

            async def connect_again() -> None:
                try:
                    await peer.connect()
                    is_again.set()
                finally:
                    may_end.set()

            session._lifetime.spawn(linger)
            with session._driver.taking_over as machine:
                machine.give_up("as if it were evicted")
            assert not peer.is_connected
            nursery.start_soon(connect_again)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert not session.over.is_set()
            assert not peer.is_connected
            may_end.set()
            with trio.fail_after(WAIT_S):
                await is_again.wait()
            assert peer.is_connected

    with MasterNode("127.0.0.1:0") as master:
        trio.run(main, master.address)


def test_the_timeout_of_all_calls_may_be_set() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        comm = AsyncCommunicator(f"127.0.0.1:{silent.getsockname()[1]}", timeout=60)
        assert comm.timeout == 60
        comm.timeout = 0.01
        with pytest.raises(PCCLError) as caught:
            trio.run(comm.connect)
    assert caught.value.result is Result.TIMEOUT
    with pytest.raises(PCCLError, match="soon"):
        comm.timeout = "soon"  # type: ignore[assignment]
