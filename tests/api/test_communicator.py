"""The blocking communicator: joining and leaving, groups, ops in flight together, and what it says to wrong use.

Peers are threads of this process here; `tests/processes` has those that die.
"""

from __future__ import annotations

import gc
import itertools
import pickle
import random
import re
import socket
import weakref
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
    PCCLError,
    QuantizationOptions,
    ReduceAlgorithm,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    Result,
    SharedState,
)
from pccl.status import run_status
from tests.support.cluster import (
    SUM,
    WAIT_S,
    Background,
    Cluster,
    ones,
    outcomes,
    reduce_once,
    refusal,
    results,
    run_of,
    together,
    until,
    waits_at_master,
)
from tests.support.interrupts import interrupted_at


def attributes(peer: Communicator, _: int = 0) -> dict[str, int]:
    return {attribute.name: peer.get_attribute(attribute) for attribute in Attribute}


# Joining and leaving.


def test_the_first_peer_is_accepted_at_once(cluster: Cluster) -> None:
    (peer,) = cluster.join()
    assert attributes(peer) == {
        "GLOBAL_WORLD_SIZE": 1,
        "LOCAL_WORLD_SIZE": 1,
        "NUM_DISTINCT_PEER_GROUPS": 1,
        "LARGEST_PEER_GROUP_WORLD_SIZE": 1,
    }
    assert peer.world_size == 1
    assert peer.are_peers_pending() is False
    peer.update_topology()
    peer.optimize_topology()


def test_newcomers_wait_and_one_update_admits_all_of_them(cluster: Cluster) -> None:
    cluster.join(2)
    newcomers = [cluster.new() for _ in range(2)]
    connecting = [Background(newcomer.connect) for newcomer in newcomers]
    until(lambda: any(cluster.each(lambda peer, _: peer.are_peers_pending())), "somebody waits")
    assert cluster.each(lambda peer, _: peer.are_peers_pending()) == [True, True]
    assert not any(thread.is_over for thread in connecting)
    # Both must be waiting before the update that shall admit both.
    until(lambda: all(map(waits_at_master, newcomers)), "both wait")
    cluster.each(lambda peer, _: peer.update_topology())
    for thread in connecting:
        thread.result()
    cluster.peers += newcomers
    assert cluster.each(lambda peer, _: peer.world_size) == [4] * 4
    assert cluster.each(reduce_once) == [4] * 4
    assert cluster.each(lambda peer, _: peer.are_peers_pending()) == [False] * 4


def test_a_run_goes_on_when_a_peer_closes_and_another_one_joins(cluster: Cluster) -> None:
    cluster.join(3)
    cluster.close(cluster[1])
    assert cluster.each(reduce_once) == [2, 2]
    cluster.join()  # the same process rejoins, with a new communicator
    assert cluster.each(reduce_once) == [3] * 3
    cluster.close(cluster[0])  # the longest accepted
    assert cluster.each(reduce_once) == [2, 2]


def test_a_run_that_all_have_left_begins_anew(cluster: Cluster) -> None:
    for _ in range(2):
        cluster.join(2)
        assert cluster.each(reduce_once) == [2, 2]
        cluster.close_all()


def test_two_runs_in_one_process_do_not_meet() -> None:
    with run_of(2) as one, run_of(3) as other:
        found = together([partial(reduce_once, peer) for peer in one.peers + other.peers])
    assert found == [2, 2, 3, 3, 3]


def test_all_groups_are_told_apart_and_joined_together(cluster: Cluster) -> None:
    cluster.join(3, peer_group=7)
    cluster.join(2, peer_group=2**32 - 1)
    cluster.join(1)
    common = {"GLOBAL_WORLD_SIZE": 6, "NUM_DISTINCT_PEER_GROUPS": 3, "LARGEST_PEER_GROUP_WORLD_SIZE": 3}
    assert cluster.each(attributes) == [{**common, "LOCAL_WORLD_SIZE": size} for size in (3, 3, 3, 2, 2, 1)]
    assert results(cluster.outcomes(reduce_once)) == [Result.SUCCESS] * 5 + [Result.TOO_FEW_PEERS]
    # What one group does neither waits for nor disturbs another.
    assert together([partial(reduce_once, peer) for peer in cluster.peers[3:5]]) == [2, 2]
    cluster.close(cluster[3])
    assert [attributes(peer)["LOCAL_WORLD_SIZE"] for peer in cluster.peers] == [3, 3, 3, 1, 1]
    assert cluster.each(lambda peer, _: peer.update_topology()) == [None] * 5


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_a_master_is_reached_by_any_kind_of_name(host: str) -> None:
    if host == "[::1]" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with MasterNode(f"{host}:0") as master:
        cluster = Cluster(master.address)
        cluster.join(2)
        assert cluster.each(reduce_once) == [2, 2]
        cluster.close_all()


def test_peers_may_reach_the_master_by_different_addresses() -> None:
    with MasterNode("0.0.0.0:0") as master:
        port = master.address.rpartition(":")[2]
        cluster = Cluster("")
        for host in ("127.0.0.1", "localhost", "127.0.0.2"):
            cluster.address = f"{host}:{port}"
            cluster.join()
        assert cluster.each(reduce_once) == [3] * 3
        cluster.close_all()


def test_an_advertised_address_and_a_listening_port_are_used(cluster: Cluster) -> None:
    cluster.join(1, listen="127.0.0.1:0", advertise="127.0.0.1", name="anna")
    cluster.join(1, listen="[::]:0", p2p_connection_pool_size=1)
    assert cluster.each(reduce_once) == [2, 2]


def test_addresses_come_from_the_environment_unless_given(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PCCL_LISTEN", f"127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setenv("PCCL_ADVERTISE", "localhost")
        with pytest.raises(PCCLError, match="in use"):
            cluster.join(1)
        cluster.join(1, listen="127.0.0.1:0")
    cluster.join(1)  # the port is free again
    assert cluster.each(reduce_once) == [2, 2]
    status = run_status(cluster.address)
    assert [member.address.rpartition(":")[0] for member in status.members] == ["localhost"] * 2


def test_the_with_statement_connects_and_closes(master: MasterNode) -> None:
    with Communicator(master.address) as peer:
        assert peer.world_size == 1
    assert refusal(peer.update_topology).result is Result.NOT_INITIALIZED
    other = Communicator(master.address)
    other.connect()
    with other:  # connected already
        assert other.world_size == 1


def test_optimize_topology_keeps_the_run_working(cluster: Cluster) -> None:
    cluster.join(4)
    cluster.join(1, peer_group=1)
    cluster.each(lambda peer, _: peer.optimize_topology())
    assert [reduced for reduced in cluster.outcomes(reduce_once) if not isinstance(reduced, PCCLError)] == [4] * 4


def test_counters_tell_what_was_moved(cluster: Cluster) -> None:
    cluster.join(2)
    cluster.each(lambda peer, _: peer.all_reduce(np.zeros(1000, np.float32), op=SUM))
    stats = cluster[0].stats
    assert stats["tx_payload_bytes"] == 4000
    assert stats["rx_wire_bytes"] >= 4000
    # The verdict may reach the caller a moment before it reaches the engine.
    until(lambda: (cluster[0].stats["ops_open"], cluster[0].stats["scratch_bytes"]) == (0, 0), "the op is over")
    cluster.peers[1].close()
    assert cluster[0].stats["tx_payload_bytes"] == 4000


def test_a_forgotten_communicator_is_collected(cluster: Cluster) -> None:
    cluster.join(2)
    forgotten = weakref.ref(cluster.peers.pop())
    gc.collect()
    assert forgotten() is None
    until(lambda: cluster[0].world_size == 1, "it has left")


# Ops in flight together.


def test_tags_launched_in_any_order_from_several_threads(cluster: Cluster) -> None:
    cluster.join(3, segment_bytes=256)
    tags = range(60)

    def work(peer: Communicator, index: int, lane: int) -> None:
        order = [tag for tag in tags if tag % 3 == lane]
        random.Random(f"{index} {lane}").shuffle(order)
        arrays = {tag: np.full(tag * 7, tag + index, np.int64) for tag in order}
        handles = {tag: peer.all_reduce_async(arrays[tag], op=SUM, tag=tag) for tag in order}
        random.Random(f"{lane} {index}").shuffle(order)
        for tag in order:
            is_success, status, info = handles[tag].wait(WAIT_S)
            assert (is_success, status) == (True, Result.SUCCESS)
            assert info is not None
            assert info.world_size == 3
            assert np.all(arrays[tag] == 3 * tag + 3)

    together([partial(work, peer, i, lane) for i, peer in enumerate(cluster.peers) for lane in range(3)])
    until(lambda: cluster[0].stats["ops_open"] == 0, "its engine has let go of all ops")


def test_a_tag_is_free_again_when_its_op_has_ended(cluster: Cluster) -> None:
    cluster.join(2)

    def many(peer: Communicator, _: int) -> None:
        for _ in range(200):
            reduce_once(peer)

    cluster.each(many)


def test_a_large_op_does_not_hold_up_small_ones(cluster: Cluster) -> None:
    cluster.join(2)
    large = [np.ones(2**20, np.float32) for _ in cluster.peers]
    first = cluster[0].all_reduce_async(large[0], op=SUM, tag=1)  # its partner does not come for long
    for _ in range(20):
        assert cluster.each(reduce_once) == [2, 2]
    assert not first.done()
    second = cluster[1].all_reduce_async(large[1], op=SUM, tag=1)
    assert first.result(WAIT_S) == second.result(WAIT_S)


def test_peers_pending_may_be_asked_while_ops_are_in_flight(cluster: Cluster) -> None:
    cluster.join(2)
    handle = cluster[0].all_reduce_async(ones(), op=SUM)
    assert cluster.each(lambda peer, _: peer.are_peers_pending()) == [False, False]
    assert not handle.done()
    reduce_once(cluster[1])
    assert handle.wait(WAIT_S)[0]


def test_a_handle_can_be_waited_for_again_and_from_other_threads(cluster: Cluster) -> None:
    cluster.join(2)
    x = ones()
    handle = cluster[0].all_reduce_async(x, op=SUM, tag=4)
    waiting = [Background(handle.wait) for _ in range(3)]
    assert refusal(partial(handle.wait, 0.01)).result is Result.TIMEOUT
    assert (handle.done(), handle.tag) == (False, 4)
    cluster[1].all_reduce(ones(), op=SUM, tag=4)
    found = [thread.result() for thread in waiting]
    assert found == [handle.wait()] * 3 == [(True, Result.SUCCESS, handle.result())] * 3
    assert np.all(x == 2)


def test_a_failed_handle_says_why_as_often_as_it_is_asked(cluster: Cluster) -> None:
    cluster.join(2)
    handle = cluster[0].all_reduce_async(ones(), op=SUM)
    cluster.close(cluster[1])
    for _ in range(2):
        assert handle.wait() == (False, Result.RANK_CONNECTION_LOST, None)
        assert refusal(handle.result).result is Result.RANK_CONNECTION_LOST


def descriptors(count: int, tags: list[int]) -> tuple[list[Any], list[ReduceOpDescriptor]]:
    arrays = [np.full(count, tag, np.float64) for tag in tags]
    return arrays, [
        ReduceOpDescriptor.from_numpy(x, x, ReduceDescriptor(x.size, SUM, tag))
        for x, tag in zip(arrays, tags, strict=True)
    ]


@pytest.mark.parametrize("max_in_flight", [1, 4, 100])
def test_many_ops_at_once_listed_in_different_orders(cluster: Cluster, max_in_flight: int) -> None:
    cluster.join(3)

    def work(peer: Communicator, index: int) -> None:
        tags = list(range(20))
        random.Random(index).shuffle(tags)
        arrays, ops = descriptors(50, tags)
        info = peer.all_reduce_multiple_with_retry(ops, max_in_flight=max_in_flight)
        assert info.world_size == 3
        assert info.tx_bytes > 0
        assert all(np.all(x == 3 * tag) for x, tag in zip(arrays, tags, strict=True))

    cluster.each(work)


def test_ops_that_a_loss_aborts_are_tried_again(cluster: Cluster) -> None:
    cluster.join(3)
    arrays = [descriptors(50, list(range(6))) for _ in range(2)]
    calls = [
        Background(partial(peer.all_reduce_multiple_with_retry, ops))
        for peer, (_, ops) in zip(cluster.peers, arrays, strict=False)
    ]
    until(lambda: cluster[0].stats["ops_open"] == 4, "they wait for the third peer")
    cluster[2].all_reduce(np.full(50, 0.0), op=SUM, tag=0)  # committed, so not tried again
    cluster.peers.pop().close()
    assert [call.result().world_size for call in calls] == [2, 2]
    for found, _ in arrays:
        assert [x[0] for x in found] == [0, 2, 4, 6, 8, 10]


def test_many_ops_end_with_too_few_peers(cluster: Cluster) -> None:
    cluster.join(2)
    arrays, ops = descriptors(50, [0, 1])
    call = Background(partial(cluster[0].all_reduce_multiple_with_retry, ops))
    until(lambda: cluster[0].stats["ops_open"] == 2, "they are in flight")
    cluster.peers.pop().close()
    assert call.outcome().result is Result.TOO_FEW_PEERS
    assert [x[0] for x in arrays] == [0, 1]


def test_many_ops_do_not_wait_for_what_others_never_launch(cluster: Cluster) -> None:
    """One of them fails for good: the others are given up, with the same reason for everybody."""
    cluster.join(2)
    arrays, ops = descriptors(50, [0, 1, 2])
    call = Background(partial(cluster[0].all_reduce_multiple_with_retry, ops))
    until(lambda: cluster[0].stats["ops_open"] == 3, "they are in flight")
    differing = refusal(partial(cluster[1].all_reduce, np.zeros(50), op=ReduceOp.MAX, tag=0))
    assert call.outcome().result is differing.result is Result.INVALID_ARGUMENT
    assert [x[0] for x in arrays] == [0, 1, 2]
    late = refusal(partial(cluster[1].all_reduce, np.zeros(50), op=SUM, tag=1))
    assert (late.result, late.message) == (Result.INVALID_ARGUMENT, differing.message)


def test_many_ops_notice_that_one_is_given_up_although_an_older_one_was_never_launched(cluster: Cluster) -> None:
    cluster.join(3)
    arrays, ops = descriptors(50, [0, 1, 2])
    call = Background(partial(cluster[0].all_reduce_multiple_with_retry, ops))
    until(lambda: cluster[0].stats["ops_open"] == 3, "they are in flight")
    given_up = refusal(partial(cluster[1].all_reduce, np.zeros(50), op=SUM, tag=2, timeout=0.05))
    assert call.outcome().result is given_up.result is Result.TIMEOUT
    assert "peer 2 gave up" in str(call.outcome())
    assert [x[0] for x in arrays] == [0, 1, 2]


@pytest.mark.parametrize(("tags", "max_in_flight"), [([], 4), ([1, 2, 1], 4), ([1, 2], 0)])
def test_many_ops_with_wrong_arguments(cluster: Cluster, tags: list[int], max_in_flight: int) -> None:
    (peer,) = cluster.join()
    call = partial(peer.all_reduce_multiple_with_retry, descriptors(5, tags)[1], max_in_flight=max_in_flight)
    assert refusal(call).result is Result.INVALID_ARGUMENT


def test_a_tag_in_flight_is_refused_at_once(cluster: Cluster) -> None:
    cluster.join(2)
    handle = cluster[0].all_reduce_async(ones(), op=SUM, tag=3)
    for call in (cluster[0].all_reduce, cluster[0].all_reduce_async):
        error = refusal(partial(call, ones(), op=SUM, tag=3))
        assert (error.result, "tag 3 is in flight" in str(error)) == (Result.INVALID_USAGE, True)
    cluster[1].all_reduce(ones(), op=SUM, tag=3)
    assert handle.wait()[0], "the first of them is not disturbed"


@pytest.mark.parametrize("kind", ["update_topology", "optimize_topology", "sync_shared_state"])
def test_own_ops_in_flight_exclude_some_joint_calls(cluster: Cluster, kind: str) -> None:
    cluster.join(2)
    handle = cluster[0].all_reduce_async(ones(), op=SUM, tag=9)
    arguments = [SharedState.from_numpy({"x": ones()})] if kind == "sync_shared_state" else []
    error = refusal(lambda: getattr(cluster[0], kind)(*arguments))
    assert (error.result, "tags [9]" in str(error)) == (Result.PENDING_ASYNC_OPS, True)
    cluster[1].all_reduce(ones(), op=SUM, tag=9)
    assert handle.wait()[0]
    assert cluster.each(lambda peer, _: getattr(peer, kind)(*arguments) is not error) == [True, True]


# Wrong arguments.


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


# What peers do differently.


def quantized(dtype: DataType) -> dict[str, Any]:
    return {"quantization_options": QuantizationOptions(dtype)}


@pytest.mark.parametrize(
    ("one", "other", "say"),
    [
        ((ones(8), SUM, {}), (ones(9), SUM, {}), ("8 x FLOAT", "9 x FLOAT")),
        ((ones(8), SUM, {}), (np.ones(8, np.int32), SUM, {}), ("8 x FLOAT", "8 x INT32")),
        ((ones(8), SUM, {}), (ones(8), ReduceOp.MAX, {}), ("SUM of", "MAX of")),
        ((ones(8), SUM, {}), (ones(8), SUM, quantized(DataType.UINT8)), ("x FLOAT (", "MIN_MAX to UINT8")),
        ((ones(0), SUM, {}), (ones(1), SUM, {}), ("0 x FLOAT", "1 x FLOAT")),
    ],
)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_an_op_that_differs_between_peers_fails_on_all_and_the_run_goes_on(
    three_peers: Cluster, one: Any, other: Any, say: tuple[str, str], odd: int
) -> None:
    def call(peer: Communicator, index: int) -> Any:
        array, op, options = other if index == odd else one
        array = array.copy()
        try:
            return peer.all_reduce(array, op=op, **options)
        finally:
            assert np.all(array == 1)

    errors = three_peers.outcomes(call)
    assert results(errors) == [Result.INVALID_ARGUMENT] * 3
    assert all(all(part in str(error) for part in say) for error in errors), errors[0]
    assert three_peers.each(reduce_once) == [3] * 3


@pytest.mark.parametrize("algorithm", ReduceAlgorithm)
def test_who_has_what_is_told_where_ops_differ(cluster: Cluster, algorithm: ReduceAlgorithm) -> None:
    cluster.join(4)
    errors = cluster.outcomes(lambda peer, i: peer.all_reduce(ones(11 + i), op=SUM, algorithm=algorithm))
    for error in errors:
        found = re.findall(r"peer (\d) has \w+ of (\d+) x FLOAT", str(error))
        assert len(found) == 2, error
        assert all(int(count) == 10 + int(peer) for peer, count in found), error


def test_calls_that_can_never_meet_fail_and_say_who_waits_in_what(cluster: Cluster) -> None:
    cluster.join(3)
    state = SharedState.from_numpy({"x": ones()})
    calls: list[Callable[[], Any]] = [
        cluster[0].update_topology,
        partial(cluster[1].sync_shared_state, state),
        cluster[2].optimize_topology,
    ]
    errors = outcomes(calls)
    assert results(errors) == [Result.INVALID_USAGE] * 3
    for part in ("peer 1 in update_topology", "peer 2 in sync_shared_state", "peer 3 in optimize_topology"):
        assert all(part in str(error) for error in errors)
    assert cluster.each(reduce_once) == [3] * 3


def test_who_asks_for_pending_peers_while_the_others_are_past_that_is_told_no(cluster: Cluster) -> None:
    """So a newcomer may enter the usual loop at its top while the others go on from update_topology."""
    cluster.join(3)
    states = [SharedState.from_numpy({"x": ones()}) for _ in cluster.peers]
    syncing = [Background(partial(cluster[i].sync_shared_state, states[i])) for i in range(2)]
    assert cluster[2].are_peers_pending() is False
    cluster[2].sync_shared_state(states[2])
    for call in syncing:
        call.result()


def test_an_op_and_a_joint_call_that_wait_for_each_other_fail(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccl.protocol.peer.ops.STALL_AFTER_S", 0.1)
    cluster.join(2)
    x = ones()
    errors = outcomes([partial(cluster[0].all_reduce, x, op=SUM, tag=6), cluster[1].update_topology])
    assert results(errors) == [Result.INVALID_USAGE] * 2
    assert all("peers [1] wait in the op with tag 6" in str(error) for error in errors)
    assert all("peer 2 in update_topology" in str(error) for error in errors)
    assert np.all(x == 1)
    both = cluster.each(lambda peer, _: peer.all_reduce(ones(), op=SUM, tag=6).world_size)
    assert both == [2, 2], "each has heard once what was wrong"


def test_a_group_waits_for_another_one_that_is_busy(cluster: Cluster) -> None:
    cluster.join(2)
    cluster.join(1, peer_group=1)
    waiting = Background(cluster[2].update_topology)
    for _ in range(3):
        assert together([partial(reduce_once, peer) for peer in cluster.peers[:2]]) == [2, 2]
    assert not waiting.is_over
    together([peer.update_topology for peer in cluster.peers[:2]])
    waiting.result()


# Timeouts.


@pytest.mark.parametrize("name", ["are_peers_pending", "update_topology", "optimize_topology", "sync_shared_state"])
def test_a_joint_call_that_times_out_is_withdrawn(cluster: Cluster, name: str) -> None:
    cluster.join(2)
    arguments = [SharedState.from_numpy({"x": ones()})] if name == "sync_shared_state" else []

    def call(peer: Communicator, timeout: float | None) -> Any:
        return getattr(peer, name)(*arguments, timeout=timeout)

    error = refusal(partial(call, cluster[0], 0.05))
    assert (error.result, error.func_name, "0.05 s" in str(error)) == (Result.TIMEOUT, name, True)
    assert len(cluster.each(lambda peer, _: call(peer, 60))) == 2
    assert cluster.each(reduce_once) == [2, 2]


def test_a_joint_call_that_times_out_has_not_taken_effect_for_anybody(cluster: Cluster) -> None:
    """Whenever the time passes: either it returns for all, or it can be made again by the one that gave up."""
    cluster.join(2)
    for i in range(150):
        waiting = Background(cluster[1].update_topology)
        (found,) = outcomes([partial(cluster[0].update_topology, timeout=i * 1e-5)])
        if found is not None:
            assert found.result is Result.TIMEOUT
            cluster[0].update_topology(timeout=WAIT_S)
        waiting.result()


def test_a_reduce_that_times_out_does_so_for_all_whenever_that_is(cluster: Cluster) -> None:
    cluster.join(2)
    x = [np.zeros(1000, np.float32) for _ in cluster.peers]
    for i in range(150):
        x[0][:] = x[1][:] = i
        calls = [
            partial(cluster[0].all_reduce, x[0], op=SUM, timeout=i * 1e-5),
            partial(cluster[1].all_reduce, x[1], op=SUM),
        ]
        found = results(outcomes(calls))
        assert found in ([Result.SUCCESS] * 2, [Result.TIMEOUT] * 2)
        assert np.all(x[0] == x[1])
        assert x[0][0] == (2 * i if found[0] is Result.SUCCESS else i)


def test_a_connect_that_times_out_is_withdrawn(cluster: Cluster) -> None:
    cluster.join(1)
    newcomer = cluster.new()
    error = refusal(partial(newcomer.connect, timeout=0.05))
    assert (error.result, error.func_name) == (Result.TIMEOUT, "connect")
    until(lambda: not cluster[0].are_peers_pending(), "it has withdrawn")
    cluster.admit([newcomer])
    assert cluster.each(reduce_once) == [2, 2]


def test_a_connect_that_times_out_says_what_was_in_the_way(cluster: Cluster) -> None:
    def says(peer: Communicator, text: str) -> bool:
        error = refusal(partial(peer.connect, timeout=0.2))
        return error.result is Result.TIMEOUT and text in str(error)

    cluster.join(1)
    newcomer = cluster.new()
    until(lambda: says(newcomer, "have yet to let this one in; they do so by calling update_topology"), "it is there")
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
    until(lambda: says(Communicator(address), f"cannot reach a master at {address}"), "there is none")


def test_a_reduce_that_times_out_is_aborted_for_all_and_all_go_on(cluster: Cluster) -> None:
    cluster.join(3)
    x = [np.full(100_000, i, np.float32) for i in range(3)]
    early = [Background(partial(peer.all_reduce, x[i], op=SUM)) for i, peer in enumerate(cluster.peers[:1])]
    error = refusal(partial(cluster[1].all_reduce, x[1], op=SUM, timeout=0.1))
    late = refusal(partial(cluster[2].all_reduce, x[2], op=SUM))
    for found in (error, late, early[0].outcome()):
        assert found.result is Result.TIMEOUT
        assert "peer 2 gave up after 0.1 s" in str(found)
    assert all(np.all(array == i) for i, array in enumerate(x))
    assert cluster.each(reduce_once) == [3] * 3


def test_many_ops_that_time_out(cluster: Cluster) -> None:
    cluster.join(2)
    arrays, ops = descriptors(5, [0, 1, 2])
    error = refusal(partial(cluster[0].all_reduce_multiple_with_retry, ops, timeout=0.05))
    assert (error.result, error.func_name) == (Result.TIMEOUT, "all_reduce_multiple_with_retry")
    assert [x[0] for x in arrays] == [0, 1, 2]
    assert (
        refusal(partial(cluster[1].all_reduce_multiple_with_retry, descriptors(5, [0, 1, 2])[1])).result
        is Result.TIMEOUT
    )
    assert cluster.each(
        lambda peer, _: peer.all_reduce_multiple_with_retry(descriptors(5, [0, 1, 2])[1]).world_size
    ) == [
        2,
        2,
    ]


def test_a_communicator_has_a_timeout_of_its_own(cluster: Cluster) -> None:
    (patient,) = cluster.join(1)
    hasty = cluster.new(timeout=0.05)
    connecting = Background(partial(hasty.connect, timeout=None))
    while patient.world_size < 2:
        patient.update_topology()
    connecting.result()
    cluster.peers.append(hasty)
    for call in (hasty.update_topology, partial(hasty.all_reduce, ones(), op=SUM)):
        assert refusal(call).result is Result.TIMEOUT
    waiting = Background(partial(hasty.update_topology, timeout=None))
    assert refusal(hasty.are_peers_pending).result is Result.TIMEOUT  # it queues behind
    assert not waiting.is_over
    patient.update_topology()
    waiting.result()


# Signals.


@pytest.mark.parametrize("is_multiple", [False, True])
def test_an_interrupt_anywhere_in_a_reduce_leaves_nothing_in_flight(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_multiple: bool
) -> None:
    monkeypatch.setattr("pccl.communicator.INTERRUPT_GRACE_S", 0.05)
    cluster.join(2)
    x = ones()

    def call() -> None:
        if is_multiple:
            op = ReduceOpDescriptor.from_numpy(x, x, ReduceDescriptor(8, SUM))
            cluster[0].all_reduce_multiple_with_retry([op])
        else:
            cluster[0].all_reduce(x, op=SUM)

    for step in itertools.count():
        has_slept = interrupted_at(step, call)
        until(lambda: cluster[0].stats["ops_open"] == 0, f"nothing is in flight after step {step}")
        assert np.all(x == 1)
        if has_slept:
            assert step > 50
            return


# Errors as objects.


def test_an_error_survives_pickling() -> None:
    error = PCCLError(Result.TIMEOUT, "all_reduce", "too late")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.result, copy.func_name, copy.message, str(copy)) == (
        Result.TIMEOUT,
        "all_reduce",
        "too late",
        "all_reduce: TIMEOUT: too late",
    )
