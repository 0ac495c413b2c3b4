"""What a first program leaves out, and what pccl's objects say of themselves."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import pccl
from pccl import AsyncCommunicator, CollectiveInfo, Communicator, MasterNode, ReduceInfo, Result
from tests.support.cluster import Cluster, ones, refusal, until

KINDS = [Communicator, AsyncCommunicator]


# The address of the master.


def test_the_address_comes_from_the_environment(master: MasterNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_MASTER", master.address)
    with Communicator() as peer:
        assert (peer._inner.address, peer.world_size) == (master.address, 1)
    monkeypatch.setenv("PCCL_MASTER", "127.0.0.1:9")
    with Communicator(master.address) as peer:
        assert peer._inner.address == master.address


@pytest.mark.parametrize("value", [None, "", " "])
@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_address_is_told_with_what_to_do(
    kind: Callable[[], Any], value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PCCL_MASTER", raising=False)
    if value is not None:
        monkeypatch.setenv("PCCL_MASTER", value)
    error = refusal(kind)
    assert error.result is Result.INVALID_ARGUMENT
    assert "PCCL_MASTER is not set" in str(error)
    assert "pccl launch" in str(error)


# Arguments that may be left out.


def test_reductions_are_sums_if_nothing_is_said(cluster: Cluster) -> None:
    cluster.join(2)
    arrays = [ones(), ones()]
    cluster.each(lambda peer, i: peer.all_reduce(arrays[i]))
    handles = [peer.all_reduce_async(array) for peer, array in zip(cluster.peers, arrays, strict=True)]
    for handle in handles:
        assert handle.wait()[0]
    assert [list(array) for array in arrays] == [[4.0] * 8] * 2
    parts = cluster.each(lambda peer, _: peer.reduce_scatter(ones()).array)
    parts += [handle.result().array for handle in [peer.launch.reduce_scatter(ones()) for peer in cluster.peers]]
    assert [list(part) for part in parts] == [[2.0] * 4] * 4


# What is on both communicators.


def test_both_communicators_have_the_same_attributes() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(Communicator) == public(AsyncCommunicator)


@pytest.mark.parametrize("name", [name for name in dir(Communicator) if not name.startswith("_")])
def test_their_methods_take_the_same_arguments_and_say_what_they_return(name: str) -> None:
    blocking, awaited = getattr(Communicator, name), getattr(AsyncCommunicator, name)
    if not callable(blocking):
        assert isinstance(blocking, property)
        assert isinstance(awaited, property)
        return
    assert inspect.signature(blocking) == inspect.signature(awaited)
    for method in (blocking, awaited):
        assert "TypeVar" not in str(typing.get_type_hints(method))


def test_a_timeout_may_be_read_and_set() -> None:
    peer = Communicator("127.0.0.1:9", timeout=3)
    assert (peer.timeout, peer.is_connected) == (3, False)
    peer.timeout = None
    assert peer.timeout is None
    assert refusal(lambda: setattr(peer, "timeout", "soon")).result is Result.INVALID_ARGUMENT


# Signatures and wrong calls.


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: Communicator("127.0.0.1:9").all_reduce(), "Communicator.all_reduce()"),  # type: ignore[call-arg]
        (lambda: Communicator("127.0.0.1:9").broadcast(ones()), "Communicator.broadcast()"),  # type: ignore[call-arg]
        (lambda: Communicator(adress="127.0.0.1:9"), "CommunicatorOptions.__init__()"),
        (lambda: AsyncCommunicator("127.0.0.1:9").send().send(None), "AsyncCommunicator.send()"),  # type: ignore
    ],
)
def test_a_wrong_call_is_named_as_it_was_made(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value).startswith(name)


# What things show of themselves.


def test_what_a_communicator_shows_of_itself(master: MasterNode) -> None:
    peer = Communicator(master.address)
    assert repr(peer) == f"<Communicator {master.address}: not connected>"
    assert repr(AsyncCommunicator("h:1")) == "<AsyncCommunicator h:1: not connected>"
    peer.connect()
    assert repr(peer) == f"<Communicator {master.address}: rank 0 of 1 in group 0, peer 1>"
    peer.close()
    assert repr(peer) == f"<Communicator {master.address}: closed>"


def test_a_communicator_whose_master_is_gone_shows_that() -> None:
    with MasterNode("127.0.0.1:0") as master:
        peer = Communicator(master.address, master_timeout=0)
        peer.connect()
    until(lambda: "MASTER_CONNECTION_FAILED" in repr(peer), "it has noticed")
    peer.close()


def test_what_handles_and_results_show_of_themselves(cluster: Cluster) -> None:
    cluster.join(2)
    handle = cluster[0].all_reduce_async(ones(), tag=3)
    assert repr(handle) == "<AsyncReduceHandle with tag 3: in flight>"
    cluster[1].all_reduce(ones(), tag=3)
    handle.wait()
    assert repr(handle) == "<AsyncReduceHandle with tag 3: done by 2 peers>"
    handle = cluster[0].all_reduce_async(ones(4), tag=4)
    refusal(partial(cluster[1].all_reduce, ones(5), tag=4))
    handle.wait()
    assert repr(handle).startswith("<AsyncReduceHandle with tag 4: failed, INVALID_ARGUMENT: ")
    (info, _) = cluster.each(lambda peer, _: peer.all_gather(np.zeros((100, 3), np.float32)))
    assert isinstance(info, CollectiveInfo)
    assert repr(info).endswith("array=<ndarray float32 [2, 100, 3]>)")
    assert "Membership(rank=0, peers=(1, 2))" in repr(info)
    (info, _) = cluster.each(lambda peer, _: peer.all_reduce(ones()))
    assert isinstance(info, ReduceInfo)
    assert repr(info) == f"ReduceInfo(local_world_size=2, tx_bytes=32, rx_bytes=32, membership={info.membership!r})"
    assert repr(replace(info, array=np.zeros(3))).endswith(", array=<ndarray float64 [3]>)")
    assert repr(CollectiveInfo(info.membership, 1, 1, b"bytes")).endswith("array=<bytes of 5>)")


def test_what_a_master_shows_of_itself() -> None:
    master = MasterNode("127.0.0.1:0", http="127.0.0.1:0")
    assert repr(master) == "<MasterNode 127.0.0.1:0, shown at http://127.0.0.1:0: not running>"
    with master:
        assert repr(master) == f"<MasterNode {master.address}, shown at http://{master.http_address}: running>"
    assert repr(master).endswith(": stopped>")


def test_every_public_class_says_what_it_is() -> None:
    for name in pccl.__all__:
        thing = getattr(pccl, name)
        if isinstance(thing, type):
            assert inspect.getdoc(thing), name
