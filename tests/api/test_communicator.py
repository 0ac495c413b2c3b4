"""The blocking communicator: joining and leaving, groups, peers that do different things, timeouts and signals.

Peers are threads of this process here; `tests/processes` has those that die.
"""

from __future__ import annotations

import gc
import itertools
import re
import socket
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from pccl import (
    AsyncReduceHandle,
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
from tests.api.descriptors import descriptors
from tests.support.cluster import (
    SUM,
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
from tests.support.interrupts import KINDS, interrupted_at


def attributes(peer: Communicator, _: int = 0) -> dict[str, int]:
    return {attribute.name: peer.get_attribute(attribute) for attribute in Attribute}


# Joining and leaving.


def test_first_peer_is_accepted_at_once(cluster: Cluster) -> None:
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


def test_newcomers_wait_for_update_topology(cluster: Cluster) -> None:
    cluster.join(2)
    newcomers = [cluster.new() for _ in range(2)]
    connecting = [Background(newcomer.connect) for newcomer in newcomers]
    until(lambda: any(cluster.each(lambda peer, _: peer.are_peers_pending())), "a newcomer waits")
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


def test_run_continues_after_leave_and_join(cluster: Cluster) -> None:
    cluster.join(3)
    cluster.close(cluster[1])
    assert cluster.each(reduce_once) == [2, 2]
    cluster.join()  # the same process rejoins, with a new communicator
    assert cluster.each(reduce_once) == [3] * 3
    cluster.close(cluster[0])  # the longest accepted
    assert cluster.each(reduce_once) == [2, 2]


def test_peer_groups(cluster: Cluster) -> None:
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
def test_master_address_by_name(host: str) -> None:
    if host == "[::1]" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with MasterNode(f"{host}:0") as master:
        cluster = Cluster(master.address)
        cluster.join(2)
        assert cluster.each(reduce_once) == [2, 2]
        cluster.close_all()


def test_advertise_and_listen(cluster: Cluster) -> None:
    cluster.join(1, listen="127.0.0.1:0", advertise="127.0.0.1", name="anna")
    cluster.join(1, listen="[::]:0", p2p_connection_pool_size=1)
    assert cluster.each(reduce_once) == [2, 2]


def test_addresses_from_the_environment(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_with_statement(master: MasterNode) -> None:
    with Communicator(master.address) as peer:
        assert peer.world_size == 1
    assert refusal(peer.update_topology).result is Result.NOT_INITIALIZED
    other = Communicator(master.address)
    other.connect()
    with other:  # connected already
        assert other.world_size == 1


def test_stats(cluster: Cluster) -> None:
    cluster.join(2)
    cluster.each(lambda peer, _: peer.all_reduce(np.zeros(1000, np.float32), op=SUM))
    stats = cluster[0].stats
    assert stats["tx_payload_bytes"] == 4000
    assert stats["rx_wire_bytes"] >= 4000
    # The verdict may reach the caller a moment before it reaches the engine.
    until(lambda: (cluster[0].stats["ops_open"], cluster[0].stats["scratch_bytes"]) == (0, 0), "the op is over")
    cluster.peers[1].close()
    assert cluster[0].stats["tx_payload_bytes"] == 4000


def test_forgotten_communicator_is_collected(cluster: Cluster) -> None:
    cluster.join(2)
    forgotten = weakref.ref(cluster.peers.pop())
    gc.collect()
    assert forgotten() is None
    until(lambda: cluster[0].world_size == 1, "it has left")


def test_communicator_is_freed_without_a_collection_after_a_failed_call(cluster: Cluster) -> None:
    cluster.join(1)
    gc.disable()
    try:
        with pytest.raises(PCCLError):
            cluster[0].wait_for_peers(2, timeout=0.01)
        forgotten = weakref.ref(cluster.peers.pop())
        until(lambda: forgotten() is None, "pccl's thread is done with the call")
    finally:
        gc.enable()


# What peers do differently.


def quantized(dtype: DataType) -> dict[str, Any]:
    return {"quantization_options": QuantizationOptions(dtype)}


@pytest.mark.parametrize(
    ("one", "other", "say"),
    [
        ((ones(8), SUM, {}), (ones(9), SUM, {}), ("8 x float32", "9 x float32")),
        ((ones(8), SUM, {}), (np.ones(8, np.int32), SUM, {}), ("8 x float32", "8 x int32")),
        ((ones(8), SUM, {}), (ones(8), ReduceOp.MAX, {}), ("SUM of", "MAX of")),
        ((ones(8), SUM, {}), (ones(8), SUM, quantized(DataType.UINT8)), ("x float32", "MIN_MAX to UINT8")),
        ((ones(0), SUM, {}), (ones(1), SUM, {}), ("0 x float32", "1 x float32")),
    ],
)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_mismatched_op_fails_on_all(three_peers: Cluster, one: Any, other: Any, say: tuple[str, str], odd: int) -> None:
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
def test_mismatch_names_peers(cluster: Cluster, algorithm: ReduceAlgorithm) -> None:
    cluster.join(4)
    errors = cluster.outcomes(lambda peer, i: peer.all_reduce(ones(11 + i), op=SUM, algorithm=algorithm))
    for error in errors:
        found = re.findall(r"peer (\d) \(\S+:\d+\) has \w+ of (\d+) x float32", str(error))
        assert len(found) == 2, error
        assert all(int(count) == 10 + int(peer) for peer, count in found), error


def test_deadlocked_group_calls_fail(cluster: Cluster) -> None:
    cluster.join(3)
    state = SharedState.from_numpy({"x": ones()})
    calls: list[Callable[[], Any]] = [
        cluster[0].update_topology,
        partial(cluster[1].sync_shared_state, state),
        cluster[2].optimize_topology,
    ]
    errors = outcomes(calls)
    assert results(errors) == [Result.INVALID_USAGE] * 3
    for peer, kind in ((1, "update_topology"), (2, "sync_shared_state"), (3, "optimize_topology")):
        assert all(re.search(rf"peer {peer} \(\S+\) in {kind}", str(error)) for error in errors)
    assert cluster.each(reduce_once) == [3] * 3


def test_deadlocked_op_and_group_call_fail(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.protocol.peer.ops.STALL_AFTER_S", 0.1)
    cluster.join(2)
    x = ones()
    errors = outcomes([partial(cluster[0].all_reduce, x, op=SUM, tag=6), cluster[1].update_topology])
    assert results(errors) == [Result.INVALID_USAGE] * 2
    assert all("peer 1 (" in str(error) and "in the op with tag 6, which" in str(error) for error in errors)
    assert all(re.search(r"peer 2 \(\S+\) in update_topology", str(error)) for error in errors)
    assert np.all(x == 1)
    both = cluster.each(lambda peer, _: peer.all_reduce(ones(), op=SUM, tag=6).world_size)
    assert both == [2, 2], "each has heard once what was wrong"


# Timeouts.


@pytest.mark.parametrize("name", ["are_peers_pending", "update_topology", "optimize_topology", "sync_shared_state"])
def test_timeout_withdraws_a_group_call(cluster: Cluster, name: str) -> None:
    cluster.join(2)
    arguments = [SharedState.from_numpy({"x": ones()})] if name == "sync_shared_state" else []

    def call(peer: Communicator, timeout: float | None) -> Any:
        return getattr(peer, name)(*arguments, timeout=timeout)

    error = refusal(partial(call, cluster[0], 0.05))
    assert (error.result, error.func_name, "0.05 s" in str(error)) == (Result.TIMEOUT, name, True)
    assert len(cluster.each(lambda peer, _: call(peer, 60))) == 2
    assert cluster.each(reduce_once) == [2, 2]


def test_timeout_withdraws_a_connect(cluster: Cluster) -> None:
    cluster.join(1)
    newcomer = cluster.new()
    error = refusal(partial(newcomer.connect, timeout=0.05))
    assert (error.result, error.func_name) == (Result.TIMEOUT, "connect")
    until(lambda: not cluster[0].are_peers_pending(), "it has withdrawn")
    cluster.admit([newcomer])
    assert cluster.each(reduce_once) == [2, 2]


def test_timeout_aborts_op_on_all_peers(cluster: Cluster) -> None:
    cluster.join(3)
    x = [np.full(100_000, i, np.float32) for i in range(3)]
    early = [Background(partial(peer.all_reduce, x[i], op=SUM)) for i, peer in enumerate(cluster.peers[:1])]
    error = refusal(partial(cluster[1].all_reduce, x[1], op=SUM, timeout=0.1))
    late = refusal(partial(cluster[2].all_reduce, x[2], op=SUM))
    for found in (error, late, early[0].outcome()):
        assert found.result is Result.TIMEOUT
        assert re.search(r"peer 2 \(.*:\d+\) gave up after 0.1 s: the op with tag 0 waited for peer", str(found))
    assert all(np.all(array == i) for i, array in enumerate(x))
    assert cluster.each(reduce_once) == [3] * 3


def test_timeout_of_many_ops(cluster: Cluster) -> None:
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


def test_timeout_of_the_communicator(cluster: Cluster) -> None:
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
@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_anywhere_in_all_reduce(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_multiple: bool, kind: str
) -> None:
    monkeypatch.setattr("pccl.handle.INTERRUPT_GRACE_S", 0.05)
    cluster.join(2)
    x = ones()

    def call() -> None:
        if is_multiple:
            op = ReduceOpDescriptor.from_numpy(x, x, ReduceDescriptor(8, SUM))
            cluster[0].all_reduce_multiple_with_retry([op])
        else:
            cluster[0].all_reduce(x, op=SUM)

    for step in itertools.count():
        has_slept = interrupted_at(step, call, KINDS[kind])
        until(lambda: cluster[0].stats["ops_open"] == 0, f"no op is in flight after step {step}")
        assert np.all(x == 1)
        if has_slept:
            assert step > 50
            return


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_in_wait_leaves_op_in_flight(cluster: Cluster, kind: str) -> None:
    """From where `wait` begins, its checks of the timeout included, to where it sleeps."""
    cluster.join(2)
    x = ones()

    def wait(handle: AsyncReduceHandle) -> None:
        handle.wait(60)

    for step in itertools.count(2):  # after the calls of these two functions
        handle = cluster[0].all_reduce_async(x, op=SUM)
        has_slept = interrupted_at(step, partial(wait, handle), KINDS[kind])
        assert not handle.done(), f"still in flight after step {step}"
        y = ones()
        cluster[1].all_reduce(y, op=SUM)
        assert np.all(y == 2)
        assert handle.wait()[0]
        assert np.all(x == 2)
        x[:] = 1
        if has_slept:
            assert step > 10
            return


# Errors as objects.


def _losses(peer: Communicator) -> dict[int, str]:
    return peer.losses


def test_reason_of_close_reaches_the_others() -> None:
    with run_of(3) as cluster:
        going = cluster.peers.pop()
        number = going.membership.peers[going.membership.rank]
        ops = [Background(partial(peer.all_reduce, ones(), op=SUM)) for peer in cluster.peers]
        until(lambda: all(peer.stats["ops_open"] for peer in cluster.peers), "both are in the op")
        going.close(reason="its disk is full")
        for op, peer in zip(ops, cluster.peers, strict=True):
            error = op.outcome()
            assert isinstance(error, PCCLError)
            assert error.result is Result.RANK_CONNECTION_LOST
            assert "its disk is full" in str(error)
            assert until(partial(_losses, peer), "the loss is known") == {number: "left: its disk is full"}


def test_founders_begin_in_one_view() -> None:
    with MasterNode("127.0.0.1:0", founders=3) as master:
        peers = [Communicator(master.address) for _ in range(3)]
        connecting = [Background(peer.connect) for peer in peers[:2]]
        for peer in peers[:2]:
            until(partial(waits_at_master, peer), "it waits")
        assert not any(each.is_over for each in connecting)
        peers[2].connect()
        for each in connecting:
            each.result()
        assert [peer.world_size for peer in peers] == [3, 3, 3]
        for peer in peers:
            peer.close()


READ_ONLY = np.zeros(8, np.float32)
READ_ONLY.flags.writeable = False
LONG = np.zeros(16, np.float32)


WRONG: list[tuple[Any, Any, dict[str, Any], str]] = [
    (np.zeros(8, complex), None, {}, "complex128"),
    (np.zeros(8, bool), None, {}, "bool"),
    (np.zeros(8, object), None, {}, "object"),
    (np.array(["a"]), None, {}, "cannot be reduced"),
    (np.zeros(8, ">f4"), None, {}, "byte-swapped"),
    ([1.0, 2.0], None, {}, "not list"),
    (None, None, {}, "not NoneType"),
    (np.zeros((4, 4), np.float32)[:, ::2], None, {}, "send is not contiguous; copy it with numpy.ascontiguousarray"),
    (np.zeros((4, 6), np.float32).T, None, {}, "not contiguous"),
    (ones(), np.zeros((4, 4), np.float32)[:, ::2], {}, "recv is not contiguous; copy it with numpy.ascontiguousarray"),
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
        "operand_descriptor has datatype DOUBLE, but the arrays are FLOAT",
    ),
    (np.zeros(8, np.int32), None, {"quantization_options": QuantizationOptions()}, "only float tensors"),
]


def test_wrong_arrays_of_a_reduce_are_refused(cluster: Cluster) -> None:
    (peer,) = cluster.join()
    for method in ("all_reduce", "all_reduce_async"):
        for send, recv, arguments, words in WRONG:
            with pytest.raises(PCCLError) as caught:
                getattr(peer, method)(send, recv, **{"op": SUM, **arguments})
            assert (caught.value.result, caught.value.func_name) == (Result.INVALID_ARGUMENT, method)
            assert words in str(caught.value)


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
def test_calls_after_a_lost_master(name: str) -> None:
    with MasterNode("127.0.0.1:0") as master:
        peer = Communicator(master.address)
        peer.connect()
    until(lambda: results(outcomes([partial(CALLS["get_attribute"], peer)])) != [Result.SUCCESS], "it is noticed")
    error = refusal(partial(CALLS[name], peer))
    assert (error.result, error.func_name) == (Result.MASTER_CONNECTION_FAILED, name)
    peer.close()


def test_rank_is_the_index_of_the_launch(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in (2, 0, 3, 1):
        monkeypatch.setenv("PCCL_LAUNCH_INDEX", str(index))
        cluster.join()
    assert [peer.rank for peer in cluster.peers] == [2, 0, 3, 1]
    assert [peer.rank for peer in cluster.peers] == [peer.membership.rank for peer in cluster.peers]
    cluster.peers.pop(1).close()
    until(lambda: {peer.world_size for peer in cluster.peers} == {3}, "the others have seen it")
    assert [peer.rank for peer in cluster.peers] == [1, 2, 0]
