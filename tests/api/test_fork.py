"""A forked child holds nothing of the run, whatever its parent is in the middle of."""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from pccl import AsyncCommunicator, Communicator, MasterNode, PCCLError, ReduceOp, Result, SharedState, TensorInfo
from pccl.runtime.state import transfer
from tests.support import fake_device
from tests.support.cluster import WAIT_S, Background, Cluster, refusal, until, waits_at_master

SUM = ReduceOp.SUM

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to see what is open")
pytestmark = needs_proc


def open_files() -> set[str]:
    """Return what the descriptors of this process stand for, one name for each socket."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # the listing's own
    return found


def sockets() -> set[str]:
    return {name for name in open_files() if name.startswith("socket:")}


@contextmanager
def forking() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of processes with threads
        yield


def in_child(call: Callable[[], str]) -> str:
    """Return what `call` returns in a forked child that ends at once."""
    reading, writing = os.pipe()
    with forking():
        child = os.fork()
    if child == 0:
        try:
            said = call()
        except BaseException as error:
            said = repr(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        said = stream.read()
    os.waitpid(child, 0)
    return said


def test_a_child_keeps_no_socket_whatever_is_under_way(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.join(1)
    going, leaving = trio.Event(), trio.Event()
    program: list[trio.lowlevel.TrioToken] = []

    async def main() -> None:
        program.append(trio.lowlevel.current_trio_token())
        await going.wait()
        async with AsyncCommunicator(other_master.address):
            program.append(program[0])
            await leaving.wait()

    with MasterNode("127.0.0.1:0") as other_master:
        trio_program = Background(partial(trio.run, main))
        until(lambda: program, "trio runs")
        before = sockets()  # with those by which trio wakes itself
        program[0].run_sync_soon(going.set)
        until(lambda: len(program) == 2, "it is connected")
        cluster.join(1)
        cluster.join(2, peer_group=1)
        op = cluster[2].all_reduce_async(np.ones(8), op=SUM)
        # A state transfer that does not move,
        moving, may_move = threading.Event(), trio.Event()

        async def send(*arguments: Any) -> None:
            moving.set()
            await may_move.wait()
            await original(*arguments)

        original = transfer._send
        monkeypatch.setattr(transfer, "_send", send)
        states = [SharedState.from_numpy({"x": np.full(1000, i)}) for i in range(2)]
        syncing = [Background(partial(cluster[i].sync_shared_state, states[i])) for i in range(2)]
        assert moving.wait(WAIT_S)
        # a newcomer that waits, and strangers at both doors.
        newcomer = cluster.new()
        connecting = Background(newcomer.connect)
        until(lambda: waits_at_master(newcomer), "it waits")
        session = cluster[1]._inner._session
        assert session is not None
        host, _, port = cluster.address.rpartition(":")
        ports = [int(port), session._listener.getsockname()[1]]
        strangers = [socket.create_connection((host, port)) for port in ports]
        until(lambda: len(session._inbound.unauthenticated) == 1, "it is connected")
        ours = {os.readlink(f"/proc/self/fd/{stranger.fileno()}") for stranger in strangers}
        of_pccl = sockets() - before - ours
        assert len(of_pccl) > 20
        left = in_child(lambda: ",".join(sockets() & of_pccl))
        for stranger in strangers:
            stranger.close()
        program[0].run_sync_soon(leaving.set)
        trio_program.result()
    assert left == ""
    newcomer.close()
    assert isinstance(connecting.outcome(), PCCLError)
    session.ops._token.run_sync_soon(may_move.set)
    assert [call.result().revision for call in syncing] == [0, 0]
    cluster[3].all_reduce(np.ones(8), op=SUM)
    assert op.wait(WAIT_S)[0]


def test_a_child_may_connect_the_communicator_that_it_has_inherited(cluster: Cluster) -> None:
    (peer,) = cluster.join(1)

    def child() -> str:
        with MasterNode("127.0.0.1:0") as own:
            inherited = Communicator(own.address)  # as a trainer that reads its address anew
            inherited.connect(timeout=WAIT_S)
            peer._inner._masters = inherited._inner._masters
            waiting = Background(partial(peer.connect, timeout=WAIT_S))
            while inherited.world_size < 2:
                inherited.update_topology(timeout=WAIT_S)
            waiting.result()
            grandchild = in_child(lambda: refused(peer))
            peer.close()
            inherited.close()
            return grandchild

    assert in_child(child) == Result.NOT_INITIALIZED.name
    assert peer.world_size == 1


def refused(peer: Communicator) -> str:
    try:
        peer.update_topology()
    except PCCLError as error:
        return error.result.name
    return "not refused"


def test_forks_in_one_thread_while_others_launch(cluster: Cluster) -> None:
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


def test_dataloaders_that_fork_share_arrays_with_a_trainer(cluster: Cluster) -> None:
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


def test_a_child_of_a_peer_with_a_device_asks_nothing_of_it(cluster: Cluster) -> None:
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
