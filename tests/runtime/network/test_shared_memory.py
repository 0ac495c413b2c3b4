"""Memory that carries the bytes between peers of one host, and what takes its place where there is none."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from pccl import Communicator, MasterNode, ReduceOp
from pccl.runtime.data_plane.engine import Engine
from pccl.runtime.network import shared_memory
from pccl.runtime.network.shared_memory import OFFER_BYTES, SharedMemory
from tests.support.cluster import Cluster, until

COUNT = 300_000
TOKEN = "a token of these tests"

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="there is no shared memory on this system")


@pytest.fixture
def payloads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The types of what connections are given to engines with."""
    found: list[Any] = []
    link_add = Engine.link_add

    def note(engine: Engine, link: int, index: int, fd: int, payload: Any = None) -> None:
        found.append(type(payload))
        link_add(engine, link, index, fd, payload)

    monkeypatch.setattr(Engine, "link_add", note)
    return found


def check_sums(cluster: Cluster) -> None:
    """All-reduce an element, and many, among all peers."""
    world = len(cluster.peers)
    for count in (1, COUNT):
        arrays = [np.arange(count, dtype=np.float32) for _ in range(world)]

        def reduce(peer: Communicator, i: int, arrays: list[Any] = arrays) -> None:
            peer.all_reduce(arrays[i], op=ReduceOp.SUM)

        cluster.each(reduce)
        for array in arrays:
            np.testing.assert_array_equal(array, world * np.arange(count, dtype=np.float32))


def reduce_among(world: int, **options: Any) -> None:
    with MasterNode("127.0.0.1:0", token=options.get("token")) as master:
        cluster = Cluster(master.address, **options)
        cluster.join(world)
        try:
            check_sums(cluster)
        finally:
            cluster.close_all()


@pytest.mark.parametrize("world", [2, 3])
def test_peers_of_one_host_share_memory(world: int, payloads: list[Any]) -> None:
    reduce_among(world)
    assert set(payloads) == {SharedMemory}


def test_without_the_variable_they_use_tcp(payloads: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_SHM", "0")
    reduce_among(2)
    assert set(payloads) == {type(None)}


def test_memory_that_cannot_be_opened_leaves_them_on_tcp(payloads: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(offer: bytes) -> SharedMemory:
        assert len(offer) == OFFER_BYTES
        raise OSError("another container")

    monkeypatch.setattr(shared_memory, "open_offered", deny)
    reduce_among(2)
    assert set(payloads) == {type(None)}


def test_memory_that_cannot_be_made_leaves_them_on_tcp(payloads: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def deny() -> SharedMemory:
        raise OSError("no memory")

    monkeypatch.setattr(shared_memory, "create", deny)
    reduce_among(2)
    assert set(payloads) == {type(None)}


def test_encrypted_connections_stay_on_tcp(payloads: list[Any]) -> None:
    reduce_among(2, token=TOKEN, encrypt=True)
    assert set(payloads) == {tuple}


def test_nothing_is_left_of_it() -> None:
    def held() -> set[str]:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return {line for line in maps if "memfd:pccl" in line}

    before = held()
    reduce_among(2)
    until(lambda: held() <= before, "all memory is unmapped")


def test_offers_are_checked() -> None:
    memory = shared_memory.create()
    assert len(memory.offer) == OFFER_BYTES
    shared_memory.open_offered(memory.offer).close()
    for offer in (b"", memory.offer[:-1], memory.offer[:-1] + bytes([memory.offer[-1] ^ 1]), bytes(OFFER_BYTES)):
        with pytest.raises(OSError, match=r"offer|Invalid argument|No such file"):
            shared_memory.open_offered(offer)
    memory.close()
    with pytest.raises(OSError, match=r"No such file|Invalid argument"):  # another file may have the number by now
        shared_memory.open_offered(memory.offer)
