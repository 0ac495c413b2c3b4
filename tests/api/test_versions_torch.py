"""Results in torch tensors are changes in place to autograd: calls count up the versions of what they write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from pccl import (
    Communicator,
    PCCLError,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    SharedState,
)
from tests.support.cluster import Background, Cluster, run_of

torch = pytest.importorskip("torch")

WORLD = 2
WIDTH = 4
Tensors = tuple[list[Any], list[Any]]
"""The tensors that a call writes on one peer, and those that it only reads."""
Call = Callable[[Communicator, int], Tensors]


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with run_of(WORLD) as cluster:
        yield cluster


def new(width: int = WIDTH) -> Any:
    return torch.ones(width)


def out_of_place(call: Callable[..., Any], sent: int = WIDTH, received: int = WIDTH) -> Call:
    """Return a call that reads one tensor and writes another on each peer."""

    def made(peer: Communicator, number: int) -> Tensors:
        given, result = new(sent), new(received)
        call(peer, given, result)
        return [result], [given]

    return made


def to_root(call: Callable[..., Any], received: int = WIDTH) -> Call:
    """Return a call that writes on the root alone."""

    def made(peer: Communicator, number: int) -> Tensors:
        given, result = new(), new(received)
        call(peer, given, result)
        return ([result], [given]) if number == 0 else ([], [given, result])

    return made


def all_reduce(peer: Communicator, _: int) -> Tensors:
    tensor = new()
    peer.all_reduce(tensor)
    return [tensor], []


def all_reduce_multiple(peer: Communicator, _: int) -> Tensors:
    tensors = [new(), new()]
    peer.all_reduce_multiple_with_retry(
        [
            ReduceOpDescriptor.from_torch(each, each, ReduceDescriptor(WIDTH, ReduceOp.SUM, tag))
            for tag, each in enumerate(tensors)
        ]
    )
    return tensors, []


def broadcast(peer: Communicator, number: int) -> Tensors:
    tensor = new()
    peer.broadcast(tensor, root=0)
    return ([], [tensor]) if number == 0 else ([tensor], [])


def scatter(peer: Communicator, number: int) -> Tensors:
    given, result = new(WORLD * WIDTH), new()
    peer.scatter(given if number == 0 else None, result, root=0)
    return [result], [given]


def send_recv(peer: Communicator, number: int) -> Tensors:
    tensor = new()
    if number == 0:
        peer.send(tensor, dst=1)
        return [], [tensor]
    peer.recv(tensor, src=0)
    return [tensor], []


def sync_shared_state(peer: Communicator, number: int) -> Tensors:
    same, other = new(), torch.full((WIDTH,), float(number))
    state = SharedState.from_torch({"same": same, "other": other})
    state.revision = 2 - number
    peer.sync_shared_state(state)
    return ([], [same, other]) if number == 0 else ([other], [same])


WHOLE = WORLD * WIDTH
CALLS: dict[str, Call] = {
    "all_reduce": all_reduce,
    "all_reduce out of place": out_of_place(lambda peer, x, y: peer.all_reduce(x, y)),
    "all_reduce_async": out_of_place(lambda peer, x, y: peer.all_reduce_async(x, y).wait()),
    "all_reduce large": out_of_place(lambda peer, x, y: peer.all_reduce(x, y), 1 << 20, 1 << 20),
    "all_reduce_multiple": all_reduce_multiple,
    "all_gather": out_of_place(lambda peer, x, y: peer.all_gather(x, y), WIDTH, WHOLE),
    "reduce_scatter": out_of_place(lambda peer, x, y: peer.reduce_scatter(x, y), WHOLE, WIDTH),
    "all_to_all": out_of_place(lambda peer, x, y: peer.all_to_all(x, y), WHOLE, WHOLE),
    "reduce": to_root(lambda peer, x, y: peer.reduce(x, y, root=0)),
    "gather": to_root(lambda peer, x, y: peer.gather(x, y, root=0), WHOLE),
    "broadcast": broadcast,
    "scatter": scatter,
    "send and recv": send_recv,
    "sync_shared_state": sync_shared_state,
}


@pytest.mark.parametrize("name", CALLS)
def test_results_count_up_tensor_versions(pair: Cluster, name: str) -> None:
    for written, read in pair.each(CALLS[name]):
        assert 0 not in [each._version for each in written]
        assert not any(each._version for each in read)


def test_backward_through_an_overwritten_tensor_raises(pair: Cluster) -> None:
    def overwrite(peer: Communicator, _: int) -> None:
        weights, saved = torch.ones(WIDTH, requires_grad=True), new()
        product = (weights * saved).sum()
        peer.all_reduce(saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()

    pair.each(overwrite)


def test_wait_timeout_keeps_the_version(pair: Cluster) -> None:
    first, second = pair.peers
    tensor = new()
    handle = first.all_reduce_async(tensor, tag=77)
    assert not handle.wait(timeout=0.01)[0]
    assert tensor._version == 0
    other = Background(partial(second.all_reduce, new(), tag=77))
    assert handle.wait()[0]
    other.result()
    assert tensor._version > 0


def test_failed_op_keeps_the_version(pair: Cluster) -> None:
    first, _ = pair.peers
    tensor = new()
    with pytest.raises(PCCLError):
        first.all_reduce(tensor, tag=78, timeout=0.05)
    assert tensor._version == 0
