"""What a first program leaves out, and what pccl's objects say of themselves."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

import pytest

from pccl import AsyncCommunicator, Communicator, MasterNode, Result
from tests.support.cluster import Cluster, ones, refusal

KINDS = [Communicator, AsyncCommunicator]


# The address of the master.


def test_address_from_the_environment(master: MasterNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_MASTER", master.address)
    with Communicator() as peer:
        assert (peer._inner.address, peer.world_size) == (master.address, 1)
    monkeypatch.setenv("PCCL_MASTER", "127.0.0.1:9")
    with Communicator(master.address) as peer:
        assert peer._inner.address == master.address


@pytest.mark.parametrize("value", [None, "", " "])
@pytest.mark.parametrize("kind", KINDS)
def test_missing_address_is_named(kind: Callable[[], Any], value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PCCL_MASTER", raising=False)
    if value is not None:
        monkeypatch.setenv("PCCL_MASTER", value)
    error = refusal(kind)
    assert error.result is Result.INVALID_ARGUMENT
    assert "PCCL_MASTER is not set" in str(error)
    assert "pccl launch" in str(error)


# Arguments that may be left out.


def test_default_op_is_sum(cluster: Cluster) -> None:
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
def test_both_communicators_have_the_same_signatures(name: str) -> None:
    blocking, awaited = getattr(Communicator, name), getattr(AsyncCommunicator, name)
    if not callable(blocking):
        assert isinstance(blocking, property)
        assert isinstance(awaited, property)
        return
    assert inspect.signature(blocking) == inspect.signature(awaited)
    for method in (blocking, awaited):
        assert "TypeVar" not in str(typing.get_type_hints(method))


# Signatures and wrong calls.


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: Communicator("127.0.0.1:9").all_reduce(), "Communicator.all_reduce()"),  # type: ignore[call-arg]
        (lambda: Communicator("127.0.0.1:9").broadcast(ones()), "Communicator.broadcast()"),  # type: ignore[call-arg]
        (lambda: Communicator(adress="127.0.0.1:9"), "CommunicatorOptions.__init__()"),
        (lambda: AsyncCommunicator("127.0.0.1:9").send().send(None), "Communicator.send()"),  # type: ignore
    ],
)
def test_wrong_call_is_named(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value).startswith(name)


# What things show of themselves.


def test_repr_of_a_communicator(master: MasterNode) -> None:
    peer = Communicator(master.address)
    assert repr(peer) == f"<Communicator {master.address}: not connected>"
    assert repr(AsyncCommunicator("h:1")) == "<AsyncCommunicator h:1: not connected>"
    peer.connect()
    assert repr(peer) == f"<Communicator {master.address}: rank 0 of 1 in group 0, peer 1>"
    peer.close()
    assert repr(peer) == f"<Communicator {master.address}: closed>"
