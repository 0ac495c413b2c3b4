"""Wrong use of the blocking communicator: arguments, calls before connect and after close, closing in others' calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from pccl import (
    Attribute,
    Communicator,
    DataType,
    MasterNode,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    Result,
    SharedState,
)
from tests.api.descriptors import descriptors
from tests.support.cluster import SUM, Background, Cluster, ones, outcomes, refusal, results, until

READ_ONLY = np.zeros(8, np.float32)
READ_ONLY.flags.writeable = False
LONG = np.zeros(16, np.float32)


@pytest.mark.parametrize(
    ("send", "recv", "arguments", "says"),
    [
        (np.zeros(8, complex), None, {}, "complex128"),
        (np.zeros(8, bool), None, {}, "bool"),
        (np.zeros(8, object), None, {}, "object"),
        (np.array(["a"]), None, {}, "cannot be reduced"),
        (np.zeros(8, ">f4"), None, {}, "byte-swapped"),
        ([1.0, 2.0], None, {}, "not list"),
        (None, None, {}, "not NoneType"),
        (np.zeros((4, 4), np.float32)[:, ::2], None, {}, "numpy.ascontiguousarray(send)"),
        (np.zeros((4, 6), np.float32).T, None, {}, "not contiguous"),
        (ones(), np.zeros((4, 4), np.float32)[:, ::2], {}, "numpy.ascontiguousarray(recv)"),
        (ones(8), ones(9), {}, "send has 8 elements but recv has 9"),
        (ones(), np.zeros(8, np.float64), {}, "send is FLOAT but recv is DOUBLE"),
        (READ_ONLY, None, {}, "send is read-only"),
        (ones(), READ_ONLY, {}, "recv is read-only"),
        (LONG[:8], LONG[4:12], {}, "overlap"),
        (ones(), None, {"op": "SUM"}, "ReduceOp"),
        (ones(), None, {"op": 0}, "ReduceOp"),
        (ones(), None, {"tag": -1}, "tag -1"),
        (ones(), None, {"tag": 2**63}, "tag"),
        (ones(), None, {"tag": 1.5}, "tag 1.5"),
        (ones(), None, {"tag": True}, "tag True"),
        (
            ones(),
            None,
            {"operand_descriptor": ReduceOperandDescriptor(DataType.DOUBLE)},
            "operand_descriptor says DOUBLE but the arrays are FLOAT",
        ),
        (np.zeros(8, np.int32), None, {"quantization_options": QuantizationOptions()}, "only float tensors"),
    ],
)
@pytest.mark.parametrize("method", ["all_reduce", "all_reduce_async"])
def test_wrong_arguments_of_a_reduce(
    alone: Communicator, method: str, send: Any, recv: Any, arguments: dict[str, Any], says: str
) -> None:
    error = refusal(lambda: getattr(alone, method)(send, recv, **{"op": SUM, **arguments}))
    assert error.result is Result.INVALID_ARGUMENT
    assert error.func_name == method
    assert says in str(error)


@pytest.fixture(scope="module")
def alone() -> Any:
    with MasterNode("127.0.0.1:0") as master, Communicator(master.address) as peer:
        yield peer


def test_halves_of_one_array_may_be_send_and_recv(cluster: Cluster) -> None:
    cluster.join(2)
    wholes = [np.arange(16, dtype=np.int32) for _ in cluster.peers]
    cluster.each(lambda peer, i: peer.all_reduce(wholes[i][:8], wholes[i][8:], op=SUM))
    assert wholes[0].tolist() == [*range(8), *range(0, 16, 2)]


@pytest.mark.parametrize("count", [-1, 9])
def test_a_descriptor_whose_count_does_not_fit(count: int) -> None:
    error = refusal(lambda: ReduceOpDescriptor.from_numpy(ones(8), ones(8), ReduceDescriptor(count, SUM)))
    assert (error.result, error.func_name) == (Result.INVALID_ARGUMENT, "ReduceOpDescriptor.from_numpy")


def test_a_count_below_the_size_leaves_the_rest_alone(cluster: Cluster) -> None:
    cluster.join(2)
    arrays = [ones(8) for _ in cluster.peers]
    cluster.each(
        lambda peer, i: peer.all_reduce_multiple_with_retry(
            [ReduceOpDescriptor.from_numpy(arrays[i], arrays[i], ReduceDescriptor(5, SUM))]
        )
    )
    assert [x.tolist() for x in arrays] == [[2.0] * 5 + [1.0] * 3] * 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"address": "nowhere:port"}, "'port' is not a port"),
        ({"address": ":48148"}, "the host is missing"),
        ({"address": "host:65536"}, "not a port"),
        ({"address": "[::1"}, "[::1]:48148"),
        ({"listen": "127.0.0.1:http"}, "not a port"),
        ({"advertise": ":1"}, "the host is missing"),
        ({"peer_group": -1}, "peer_group -1"),
        ({"peer_group": 2**32}, "peer_group"),
        ({"p2p_connection_pool_size": 65}, "p2p_connection_pool_size 65"),
        ({"p2p_connection_pool_size": -1}, "p2p_connection_pool_size"),
        ({"segment_bytes": -1}, "segment_bytes"),
        ({"segment_bytes": 2**32}, "segment_bytes"),
    ],
)
def test_wrong_arguments_of_a_communicator(arguments: dict[str, Any], says: str) -> None:
    error = refusal(lambda: Communicator(**{"address": "127.0.0.1:1", **arguments}))
    assert error.result is Result.INVALID_ARGUMENT
    assert says in str(error)


CALLS: dict[str, Callable[[Communicator], Any]] = {
    "get_attribute": lambda peer: peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE),
    "are_peers_pending": lambda peer: peer.are_peers_pending(),
    "update_topology": lambda peer: peer.update_topology(),
    "optimize_topology": lambda peer: peer.optimize_topology(),
    "sync_shared_state": lambda peer: peer.sync_shared_state(SharedState.from_numpy({"x": ones()})),
    "all_reduce": lambda peer: peer.all_reduce(ones(), op=SUM),
    "all_reduce_async": lambda peer: peer.all_reduce_async(ones(), op=SUM),
    "all_reduce_multiple_with_retry": lambda peer: peer.all_reduce_multiple_with_retry(descriptors(3, [0])[1]),
    "stats": lambda peer: peer.stats,
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_before_connect_and_after_close(master: MasterNode, name: str) -> None:
    peer = Communicator(master.address)
    error = refusal(partial(CALLS[name], peer))
    assert (error.result, error.func_name, error.message) == (Result.NOT_INITIALIZED, name, "call connect() first")
    peer.connect()
    peer.close()
    error = refusal(partial(CALLS[name], peer))
    assert (error.result, error.func_name, "closed" in error.message) == (Result.NOT_INITIALIZED, name, True)


@pytest.mark.parametrize("name", CALLS)
def test_calls_after_the_master_is_lost(name: str) -> None:
    with MasterNode("127.0.0.1:0") as master:
        peer = Communicator(master.address)
        peer.connect()
    until(lambda: results(outcomes([partial(CALLS["get_attribute"], peer)])) != [Result.SUCCESS], "it is noticed")
    error = refusal(partial(CALLS[name], peer))
    assert (error.result, error.func_name) == (Result.MASTER_CONNECTION_FAILED, name)
    peer.close()


def test_connecting_twice_and_closing_twice(master: MasterNode) -> None:
    peer = Communicator(master.address)
    peer.connect()
    assert refusal(peer.connect).result is Result.INVALID_USAGE
    peer.close()
    peer.close()
    assert refusal(peer.connect).result is Result.NOT_INITIALIZED
    never = Communicator(master.address)
    never.close()
    assert refusal(never.connect).result is Result.NOT_INITIALIZED


def test_closing_fails_the_calls_that_wait_in_other_threads(cluster: Cluster) -> None:
    cluster.join(2)
    x = ones(1000)
    pending = [
        Background(partial(cluster[0].all_reduce, x, op=SUM)),
        Background(cluster[0].are_peers_pending),
        Background(cluster[0].all_reduce_async(ones(), op=SUM, tag=1).result),
    ]
    until(lambda: cluster[0].stats["ops_open"] == 2, "they wait")
    cluster.close(cluster[0])
    assert results([call.outcome() for call in pending]) == [Result.NOT_INITIALIZED] * 3
    assert np.all(x == 1)


def test_closing_ends_a_connect_that_waits(cluster: Cluster) -> None:
    cluster.join(1)
    newcomer = cluster.new()
    connecting = Background(newcomer.connect)
    until(lambda: cluster[0].are_peers_pending(), "it waits")
    newcomer.close()
    assert connecting.outcome().result is Result.NOT_INITIALIZED
    until(lambda: not cluster[0].are_peers_pending(), "it has withdrawn")
