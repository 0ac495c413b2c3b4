"""The blocking communicator: joining and leaving, groups, peers that do different things, timeouts and signals.

Peers are threads of this process here; `tests/processes` has those that die.
"""

from __future__ import annotations

import gc
import itertools
import pickle
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
    Result,
    SharedState,
)
from pccl.status import run_status
from tests.api.descriptors import descriptors
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
from tests.support.interrupts import KINDS, interrupted_at


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
    for peer, kind in ((1, "update_topology"), (2, "sync_shared_state"), (3, "optimize_topology")):
        assert all(re.search(rf"peer {peer} \(\S+\) in {kind}", str(error)) for error in errors)
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


def test_an_op_and_a_group_call_that_wait_for_each_other_fail(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccl.protocol.peer.ops.STALL_AFTER_S", 0.1)
    cluster.join(2)
    x = ones()
    errors = outcomes([partial(cluster[0].all_reduce, x, op=SUM, tag=6), cluster[1].update_topology])
    assert results(errors) == [Result.INVALID_USAGE] * 2
    assert all("peers [1] wait in the op with tag 6" in str(error) for error in errors)
    assert all(re.search(r"peer 2 \(\S+\) in update_topology", str(error)) for error in errors)
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
def test_a_group_call_that_times_out_is_withdrawn(cluster: Cluster, name: str) -> None:
    cluster.join(2)
    arguments = [SharedState.from_numpy({"x": ones()})] if name == "sync_shared_state" else []

    def call(peer: Communicator, timeout: float | None) -> Any:
        return getattr(peer, name)(*arguments, timeout=timeout)

    error = refusal(partial(call, cluster[0], 0.05))
    assert (error.result, error.func_name, "0.05 s" in str(error)) == (Result.TIMEOUT, name, True)
    assert len(cluster.each(lambda peer, _: call(peer, 60))) == 2
    assert cluster.each(reduce_once) == [2, 2]


def test_a_group_call_that_times_out_has_not_taken_effect_for_anybody(cluster: Cluster) -> None:
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
        assert re.search(r"peer 2 \(.*:\d+\) gave up after 0.1 s: the op with tag 0 waited for peer", str(found))
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
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_anywhere_in_a_reduce_leaves_nothing_in_flight(
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
        until(lambda: cluster[0].stats["ops_open"] == 0, f"nothing is in flight after step {step}")
        assert np.all(x == 1)
        if has_slept:
            assert step > 50
            return


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_wait_leaves_op_in_flight(cluster: Cluster, kind: str) -> None:
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


def test_an_error_survives_pickling() -> None:
    error = PCCLError(Result.TIMEOUT, "all_reduce", "too late")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.result, copy.func_name, copy.message, str(copy)) == (
        Result.TIMEOUT,
        "all_reduce",
        "too late",
        "all_reduce: TIMEOUT: too late",
    )
