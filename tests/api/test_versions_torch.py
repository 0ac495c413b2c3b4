"""Results in torch tensors are changes in place to autograd: calls count up the versions of what they write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import trio

from pccl import (
    AsyncCommunicator,
    Communicator,
    MasterNode,
    PCCLError,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    SharedState,
)
from tests.support.cluster import Background, Cluster, run_of, together, until

torch = pytest.importorskip("torch")

WORLD = 2
WIDTH = 4
Tensors = tuple[list[Any], list[Any]]
"""What a call writes on one peer, and what it only reads."""


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with run_of(WORLD) as cluster:
        yield cluster


def new(width: int = WIDTH) -> Any:
    return torch.ones(width)


def all_reduce(peer: Communicator, _: int) -> Tensors:
    tensor = new()
    peer.all_reduce(tensor)
    return [tensor], []


def all_reduce_out_of_place(peer: Communicator, _: int) -> Tensors:
    given, result = new(), new()
    peer.all_reduce(given, result)
    return [result], [given]


def all_reduce_async(peer: Communicator, _: int) -> Tensors:
    given, result = new(), new()
    handle = peer.all_reduce_async(given, result)
    until(handle.done, "the op is over")
    return [result], [given]


def all_reduce_large(peer: Communicator, _: int) -> Tensors:
    given, result = new(1 << 20), new(1 << 20)
    peer.all_reduce(given, result)
    return [result], [given]


def all_reduce_multiple(peer: Communicator, _: int) -> Tensors:
    tensors = [new(), new()]
    peer.all_reduce_multiple_with_retry(
        [
            ReduceOpDescriptor.from_torch(each, each, ReduceDescriptor(WIDTH, ReduceOp.SUM, tag))
            for tag, each in enumerate(tensors)
        ]
    )
    return tensors, []


def all_gather(peer: Communicator, _: int) -> Tensors:
    given, result = new(), new(WORLD * WIDTH)
    peer.all_gather(given, result)
    return [result], [given]


def all_gather_async(peer: Communicator, _: int) -> Tensors:
    given, result = new(), new(WORLD * WIDTH)
    peer.launch.all_gather(given, result).wait()
    return [result], [given]


def reduce_scatter(peer: Communicator, _: int) -> Tensors:
    given, result = new(WORLD * WIDTH), new()
    peer.reduce_scatter(given, result)
    return [result], [given]


def reduce(peer: Communicator, number: int) -> Tensors:
    given, result = new(), new()
    peer.reduce(given, result, root=0)
    return ([result], [given]) if number == 0 else ([], [given, result])


def broadcast(peer: Communicator, number: int) -> Tensors:
    tensor = new()
    peer.broadcast(tensor, root=0)
    return ([], [tensor]) if number == 0 else ([tensor], [])


def gather(peer: Communicator, number: int) -> Tensors:
    given, result = new(), new(WORLD * WIDTH)
    peer.gather(given, result, root=0)
    return ([result], [given]) if number == 0 else ([], [given, result])


def scatter(peer: Communicator, number: int) -> Tensors:
    given, result = new(WORLD * WIDTH), new()
    peer.scatter(given if number == 0 else None, result, root=0)
    return [result], [given]


def all_to_all(peer: Communicator, _: int) -> Tensors:
    given, result = new(WORLD * WIDTH), new(WORLD * WIDTH)
    peer.all_to_all(given, result)
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


CALLS = [
    *(all_reduce, all_reduce_out_of_place, all_reduce_async, all_reduce_large, all_reduce_multiple, all_gather),
    *(all_gather_async, reduce_scatter, reduce, broadcast, gather, scatter, all_to_all, send_recv, sync_shared_state),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_calls_count_up_the_versions_of_what_they_write_alone(
    pair: Cluster, call: Callable[[Communicator, int], Tensors]
) -> None:
    for written, read in pair.each(call):
        assert 0 not in [each._version for each in written]
        assert not any(each._version for each in read)


def test_a_backward_pass_that_has_saved_what_is_overwritten_raises(pair: Cluster) -> None:
    def overwrite(peer: Communicator, _: int) -> None:
        weights, saved = torch.ones(WIDTH, requires_grad=True), new()
        product = (weights * saved).sum()
        peer.all_reduce(saved)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()

    pair.each(overwrite)


def test_coroutines_count_up_versions(master: MasterNode) -> None:
    assert 0 not in together([partial(coroutine_version, master.address) for _ in range(WORLD)])


def coroutine_version(address: str) -> int:
    async def call() -> int:
        async with AsyncCommunicator(address) as peer:
            while peer.world_size < WORLD:
                await peer.update_topology()
            tensor = new()
            await peer.all_reduce(tensor)
            return int(tensor._version)

    return trio.run(call)


def test_wait_timeout_leaves_the_version_and_the_result_counts_it_up(pair: Cluster) -> None:
    first, second = pair.peers
    tensor = new()
    handle = first.all_reduce_async(tensor, tag=77)
    assert not handle.wait(timeout=0.01)[0]
    assert tensor._version == 0
    other = Background(partial(second.all_reduce, new(), tag=77))
    assert handle.wait()[0]
    other.result()
    assert tensor._version > 0


def test_a_failed_op_leaves_the_version(pair: Cluster) -> None:
    first, _ = pair.peers
    tensor = new()
    with pytest.raises(PCCLError):
        first.all_reduce(tensor, tag=78, timeout=0.05)
    assert tensor._version == 0
