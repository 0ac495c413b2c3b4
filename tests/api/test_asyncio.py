"""AsyncCommunicator in asyncio programs, and handles that are awaited, of either communicator in either library."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio

from pccl import (
    AsyncCommunicator,
    AsyncReduceHandle,
    Communicator,
    ErrorFeedback,
    MasterNode,
    PCCLError,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    Result,
    SharedState,
)
from tests.support.cluster import SUM, WAIT_S, Background, Cluster, ones, reduce_once, until, waits_at_master

Peers = list[AsyncCommunicator]


def in_run(world: int) -> Callable[[Callable[[Peers], Awaitable[None]]], Callable[[MasterNode], None]]:
    """Make a test of a coroutine that takes this number of peers of an asyncio program."""

    def decorate(test: Callable[[Peers], Awaitable[None]]) -> Callable[[MasterNode], None]:
        async def main(address: str) -> None:
            async with asyncio.timeout(WAIT_S):
                peers = [AsyncCommunicator(address) for _ in range(world)]

                async def join(peer: AsyncCommunicator) -> None:
                    await peer.connect()
                    await peer.wait_for_peers(world)

                await asyncio.gather(*map(join, peers))
                await test(peers)
                await asyncio.gather(*(peer.close() for peer in peers))

        def run(master: MasterNode) -> None:
            asyncio.run(main(master.address))

        run.__doc__ = test.__doc__
        return run

    return decorate


async def waits_in(peer: AsyncCommunicator) -> None:
    """Returns when the peer waits in a group call or in an op."""
    session = peer._inner._session
    assert session is not None
    await asyncio.to_thread(until, lambda: session.ops.table or len(session._calls), "it waits")


# What it does.


@in_run(3)
async def test_each_kind_of_call(peers: Peers) -> None:
    arrays = [ones() for _ in peers]
    infos = await asyncio.gather(*(peer.all_reduce(x) for peer, x in zip(peers, arrays, strict=True)))
    assert [info.world_size for info in infos] == [3] * 3
    assert all(np.all(x == 3) for x in arrays)
    assert await asyncio.gather(*(peer.are_peers_pending() for peer in peers)) == [False] * 3
    assert await asyncio.gather(*(peer.optimize_topology() for peer in peers)) == [None] * 3
    states = [SharedState.from_numpy({"x": np.full(9, i)}) for i in range(3)]
    synced = await asyncio.gather(*(p.sync_shared_state(s) for p, s in zip(peers, states, strict=True)))
    assert sorted(info.rx_bytes for info in synced) == [0, 72, 72]
    gathered = await asyncio.gather(*(peer.all_gather(ones(2)) for peer in peers))
    assert [info.array.shape for info in gathered] == [(3, 2)] * 3
    ops = [[ReduceOpDescriptor.from_numpy(x, x, ReduceDescriptor(8, SUM, tag)) for tag in (1, 2)] for x in arrays]
    many = await asyncio.gather(
        *(peer.all_reduce_multiple_with_retry(mine) for peer, mine in zip(peers, ops, strict=True))
    )
    assert [info.world_size for info in many] == [3] * 3
    feedback = [ErrorFeedback() for _ in peers]
    quantized = [
        peer.all_reduce(x, quantization=QuantizationOptions(), feedback=feedback[i])
        for i, (peer, x) in enumerate(zip(peers, arrays, strict=True))
    ]
    await asyncio.gather(*quantized)
    assert all(each.kept.array is not None for each in feedback)
    assert [peer.world_size for peer in peers] == [3] * 3
    assert peers[0].stats["tx_payload_bytes"] > 0
    assert peers[0].flight_recorder().ops


@in_run(2)
async def test_event_loop_is_not_blocked(peers: Peers) -> None:
    reducing = asyncio.ensure_future(peers[0].all_reduce(ones()))
    await waits_in(peers[0])
    assert not reducing.done()
    await peers[1].all_reduce(ones())
    assert (await reducing).world_size == 2


@in_run(2)
async def test_timeout_and_other_errors(peers: Peers) -> None:
    with pytest.raises(PCCLError, match="TIMEOUT"):
        await peers[0].all_reduce(ones(), timeout=0.05)
    with pytest.raises(PCCLError, match=r"barrier: TIMEOUT"):
        await peers[0].barrier(timeout=0.05, tag=7)
    with pytest.raises(PCCLError, match=r"update_topology: TIMEOUT.*0.05 s"):
        await peers[0].update_topology(timeout=0.05)
    with pytest.raises(PCCLError, match="INVALID_ARGUMENT"):
        await peers[0].all_reduce([1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^Communicator\.broadcast\(\) missing"):
        await peers[0].broadcast(ones())  # type: ignore[call-arg]


# Cancellation.


@in_run(2)
async def test_cancel_aborts_op_on_all_peers(peers: Peers) -> None:
    x = ones()
    reducing = asyncio.ensure_future(peers[0].all_reduce(x))
    await waits_in(peers[0])
    reducing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reducing
    assert np.all(x == 1)
    with pytest.raises(PCCLError, match="gave up the op"):
        await peers[1].all_reduce(ones())
    infos = await asyncio.gather(*(peer.all_reduce(ones()) for peer in peers))
    assert [info.world_size for info in infos] == [2, 2]


@in_run(2)
async def test_op_cancelled_twice_frees_its_tag(peers: Peers) -> None:
    for _ in range(30):
        reducing = asyncio.ensure_future(peers[0].all_reduce(ones()))
        await waits_in(peers[0])
        reducing.cancel()
        await asyncio.sleep(0)
        reducing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reducing
        with pytest.raises(PCCLError, match="gave up the op"):
            await peers[1].all_reduce(ones())
        await asyncio.gather(*(peer.all_reduce(ones()) for peer in peers))


@in_run(2)
async def test_asyncio_timeout_withdraws_calls(peers: Peers) -> None:
    ops = [ReduceOpDescriptor.from_numpy(ones(), None, ReduceDescriptor(8, SUM, tag)) for tag in (1, 2)]
    calls: list[Callable[[], Awaitable[Any]]] = [
        peers[0].update_topology,
        partial(peers[0].sync_shared_state, SharedState.from_numpy({"x": ones()})),
        partial(peers[0].wait_for_peers, 3),
        partial(peers[0].all_reduce_multiple_with_retry, ops),
        partial(peers[0].barrier, tag=5),
    ]
    for call in calls:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.03):
                await call()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call(), 0.03)
    assert await asyncio.gather(*(peer.are_peers_pending() for peer in peers)) == [False, False]
    await asyncio.gather(*(peer.all_reduce(ones(), tag=9) for peer in peers))


@in_run(2)
async def test_cancel_at_any_time(peers: Peers) -> None:
    """asyncio tells it once: a loop of reduces must end with it, also if the op was committed at that moment."""
    last = [np.zeros(1, np.int64), np.zeros(1, np.int64)]

    async def reduce_for_ever(peer: AsyncCommunicator, x: np.ndarray[Any, Any]) -> None:
        while True:
            await peer.all_reduce(x, op=ReduceOp.MAX)

    for pause in range(12):
        tasks = [asyncio.ensure_future(reduce_for_ever(*each)) for each in zip(peers, last, strict=True)]
        await asyncio.sleep(pause / 2000)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with pytest.raises((asyncio.CancelledError, PCCLError)):
                await asyncio.wait_for(task, 10)
        # The other may have been told the abort of an op that it launches only now.
        while any(isinstance(found, PCCLError) for found in await _barriers(peers)):
            pass


async def _barriers(peers: Peers) -> list[Any]:
    return list(await asyncio.gather(*(peer.barrier(tag=1) for peer in peers), return_exceptions=True))


def test_cancel_withdraws_a_connect(cluster: Cluster) -> None:
    cluster.join(1)

    async def main() -> None:
        peer = AsyncCommunicator(cluster.address)
        connecting = asyncio.ensure_future(peer.connect())
        await asyncio.to_thread(until, partial(waits_at_master, peer), "it has come")  # type: ignore[arg-type]
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        assert not peer.is_connected
        again = asyncio.ensure_future(peer.connect())
        admitting = asyncio.to_thread(partial(cluster[0].wait_for_peers, 2, timeout=WAIT_S))
        assert await admitting == 2
        await again
        await peer.close()

    asyncio.run(main())


def test_ctrl_c_ends_an_asyncio_program() -> None:
    program = """
        import asyncio, os, signal, threading
        from pccl import AsyncCommunicator, MasterNode

        async def main(address):
            async with AsyncCommunicator(address) as peer:
                threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
                try:
                    await peer.wait_for_peers(2)
                finally:
                    print("withdrawn", flush=True)

        with MasterNode("127.0.0.1:0") as master:
            try:
                asyncio.run(main(master.address))
            except KeyboardInterrupt:
                print("interrupted", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.stdout, done.returncode) == ("withdrawn\ninterrupted\n", 0), done.stderr


# Handles.


@pytest.mark.parametrize("library", ["asyncio", "trio"])
def test_await_a_handle_of_a_blocking_communicator(cluster: Cluster, library: str) -> None:
    """As in a notebook; also where the op ends in another thread while it is waited for."""
    cluster.join(2)

    async def reduce() -> int:
        handle: AsyncReduceHandle = cluster[0].all_reduce_async(ones())
        other = Background(partial(reduce_once, cluster[1]))
        info = await handle
        assert other.result() == 2
        return info.world_size

    async def cancelled() -> None:
        x = ones()
        handle = cluster[0].all_reduce_async(x)
        if library == "trio":
            with trio.move_on_after(0.02) as scope:
                await handle
            assert scope.cancelled_caught
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(handle, 0.02)
        assert np.all(x == 1)
        reduce_once(cluster[1])
        assert (await handle).world_size == 2
        assert np.all(x == 2)

    async def main() -> None:
        for _ in range(20):
            assert await reduce() == 2
        await cancelled()

    if library == "trio":
        trio.run(main)
    else:
        asyncio.run(main())


# Where it lives.


def test_blocking_communicator_in_a_running_loop(cluster: Cluster) -> None:
    """As in a notebook, whose cells run in one."""
    cluster.join(1)

    async def main() -> None:
        with Communicator(cluster.address) as peer:
            assert peer.wait_for_peers(2, timeout=WAIT_S) == 2
            assert peer.all_reduce(ones()).world_size == 2

    other = Background(lambda: (cluster[0].wait_for_peers(2, timeout=WAIT_S), reduce_once(cluster[0])))
    asyncio.run(main())
    assert other.result() == (2, 2)


def test_call_from_another_library_is_refused(master: MasterNode) -> None:
    def refused(run: Callable[[], Any], text: str) -> None:
        with pytest.raises(PCCLError, match=text) as caught:
            run()
        assert caught.value.result is Result.INVALID_USAGE

    async def main() -> None:
        async with AsyncCommunicator(master.address) as peer:
            with pytest.raises(PCCLError, match="connected in a trio run and cannot be called from asyncio"):
                await trio.to_thread.run_sync(asyncio.run, peer.are_peers_pending())
            calls = [peer.are_peers_pending, partial(peer.all_reduce, ones()), peer.barrier]
            for call in calls:
                with pytest.raises(PCCLError, match="cannot be called from another one"):
                    await trio.to_thread.run_sync(trio.run, call)

    trio.run(main)
    peer = AsyncCommunicator(master.address)
    asyncio.run(peer.connect())
    refused(partial(trio.run, peer.are_peers_pending), "connected in asyncio and cannot be called from a trio run")
    refused(partial(peer.are_peers_pending().send, None), "trio or asyncio, but neither of them runs here; Commun")
    asyncio.run(peer.close())


def test_forgotten_async_communicator_leaves(cluster: Cluster) -> None:
    cluster.join(1)

    async def main() -> None:
        peer = AsyncCommunicator(cluster.address)
        admitting = asyncio.to_thread(partial(cluster[0].wait_for_peers, 2, timeout=WAIT_S))
        await asyncio.gather(peer.connect(), admitting)

    asyncio.run(main())
    gc.collect()
    until(lambda: cluster[0].world_size == 1, "it has left")


def test_pccl_does_not_import_asyncio() -> None:
    """It takes longer than the rest of pccl may."""
    code = "import sys, pccl; print('asyncio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout == "False\n"
