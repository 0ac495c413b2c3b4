"""Reduces of arrays on a device, with one whose copies come late: what lacks a synchronization gives wrong numbers."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio

from pccl import (
    AsyncCommunicator,
    Communicator,
    ErrorFeedback,
    MasterNode,
    PCCLError,
    QuantizationOptions,
    ReduceAlgorithm,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    Result,
)
from pccl.devices import device as device_module
from pccl.devices.staging import helper_of
from tests.support.cluster import Background, Cluster, outcomes, reduce_once, results, until
from tests.support.fake_device import FakeArray, FakeDevice
from tests.support.interrupts import Interrupt, interrupted_at

SUM = ReduceOp.SUM
COUNT = 5197
BLOCK = 24576
"""Bytes of host memory that an array of COUNT floats takes."""
WORLD = 3
LATE_S = 0.03
"""Much more than the fake device's delays."""


def values(peer: int, count: int = COUNT, dtype: Any = np.float32) -> Any:
    return (np.random.default_rng(peer).integers(0, 100, count)).astype(dtype)


def total(count: int = COUNT, dtype: Any = np.float32, world: int = WORLD) -> Any:
    return sum((values(peer, count, dtype) for peer in range(world)), np.zeros(count, dtype))


def seen_in(array: Any) -> Any:
    return array.get() if isinstance(array, FakeArray) else array


def reduced(cluster: Cluster, held: list[Any], **options: Any) -> list[Any]:
    """Return what each peer finds in its array after a reduce in place."""

    def reduce(peer: Communicator, i: int) -> Any:
        peer.all_reduce(held[i], **{"op": SUM, **options})
        return seen_in(held[i])

    return cluster.each(reduce)


def arrays(devices: list[FakeDevice], count: int = COUNT) -> list[FakeArray]:
    return [device.array(np.zeros(count, np.float32)) for device in devices]


def test_order_with_streams_of_program(three_peers: Cluster, devices: list[FakeDevice]) -> None:
    held = arrays(devices)

    def reduce(peer: Communicator, i: int) -> Any:
        devices[i].kernel_s = LATE_S
        held[i].set_later(values(i))
        peer.all_reduce(held[i], op=SUM)
        return held[i].get()

    for found in three_peers.each(reduce):
        np.testing.assert_array_equal(found, total())


def test_out_of_place_leaves_input(three_peers: Cluster, devices: list[FakeDevice]) -> None:
    sent = [device.array(values(i)) for i, device in enumerate(devices)]
    received = arrays(devices)
    three_peers.each(lambda peer, i: peer.all_reduce(sent[i], received[i], op=SUM))
    for i in range(WORLD):
        np.testing.assert_array_equal(received[i].settled(), total())
        np.testing.assert_array_equal(sent[i].settled(), values(i))


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 3000])
def test_every_length(three_peers: Cluster, devices: list[FakeDevice], count: int) -> None:
    for found in reduced(three_peers, [device.array(values(i, count)) for i, device in enumerate(devices)]):
        np.testing.assert_array_equal(found, total(count))


@pytest.mark.parametrize("algorithm", ReduceAlgorithm)
@pytest.mark.parametrize("quantization", [None, QuantizationOptions()])
def test_all_peers_have_the_same_bits(
    three_peers: Cluster,
    devices: list[FakeDevice],
    algorithm: ReduceAlgorithm,
    quantization: QuantizationOptions | None,
) -> None:
    held = [device.array(np.random.default_rng(i).standard_normal(COUNT)) for i, device in enumerate(devices)]
    found = reduced(three_peers, held, op=ReduceOp.AVG, algorithm=algorithm, quantization_options=quantization)
    expected = np.mean([np.random.default_rng(i).standard_normal(COUNT) for i in range(WORLD)], axis=0)
    np.testing.assert_allclose(found[0], expected, atol=0.1 if quantization else 1e-9)
    for other in found[1:]:
        assert other.tobytes() == found[0].tobytes()


def test_concurrent_ops_do_not_share_host_memory(three_peers: Cluster, devices: list[FakeDevice]) -> None:
    ops = 6

    def rounds(peer: Communicator, i: int) -> None:
        held = [devices[i].array(np.zeros(COUNT, np.float32)) for _ in range(ops)]
        for turn in range(3):
            for tag, array in enumerate(held):
                array.set_later(values(i) + tag + turn)
            handles = [peer.all_reduce_async(array, op=SUM, tag=tag) for tag, array in enumerate(held)]
            for tag in reversed(range(ops)):
                assert handles[tag].wait()[0]
                np.testing.assert_array_equal(held[tag].get(), total() + WORLD * (tag + turn))

    three_peers.each(rounds)
    pool = helper_of(devices[0]).pool
    assert pool.pinned_bytes <= 2 * ops * BLOCK
    assert sum(devices[0].pinned_allocated) == pool.pinned_bytes
    gc.collect()
    until(lambda: pool.idle_bytes == pool.pinned_bytes, "all blocks are free again")


def test_descriptors_with_retry(three_peers: Cluster, devices: list[FakeDevice]) -> None:
    held = [[device.array(values(i)) for _ in range(7)] for i, device in enumerate(devices)]
    three_peers.each(
        lambda peer, i: peer.all_reduce_multiple_with_retry(
            [
                ReduceOpDescriptor(array, array, ReduceDescriptor(COUNT, SUM, tag), "test")
                for tag, array in enumerate(held[i])
            ],
            max_in_flight=3,
        )
    )
    for mine in held:
        for array in mine:
            np.testing.assert_array_equal(array.settled(), total())


def test_only_a_part_of_the_arrays(three_peers: Cluster, devices: list[FakeDevice]) -> None:
    held = [device.array(values(i)) for i, device in enumerate(devices)]
    descriptor = ReduceDescriptor(COUNT - 100, SUM)
    three_peers.each(
        lambda peer, i: peer.all_reduce_multiple_with_retry([ReduceOpDescriptor(held[i], held[i], descriptor, "test")])
    )
    for i, array in enumerate(held):
        np.testing.assert_array_equal(array.settled(), np.append(total()[:-100], values(i)[-100:]))


@pytest.mark.parametrize("quantization", [None, QuantizationOptions()])
def test_separate_arrays(
    three_peers: Cluster, devices: list[FakeDevice], quantization: QuantizationOptions | None
) -> None:
    send, recv = mixed(devices, [0]), [np.zeros(COUNT, np.float32) for _ in range(WORLD)]

    def reduce(peer: Communicator, i: int) -> Any:
        target = None if i == 0 else recv[i]
        peer.all_reduce(send[i], target, op=SUM, quantization_options=quantization)
        return seen_in(send[i]) if i == 0 else target

    first, *others = three_peers.each(reduce)
    for found in others:
        np.testing.assert_array_equal(found, first)
    np.testing.assert_allclose(first, total(), atol=0 if quantization is None else 5)
    np.testing.assert_array_equal(send[1], values(1))


def test_error_feedback(three_peers: Cluster, devices: list[FakeDevice]) -> None:
    found = []
    for on_device in ([], [0, 1]):
        feedback = [ErrorFeedback() for _ in range(WORLD)]
        for _ in range(3):
            held = mixed(devices, on_device)

            def reduce(peer: Communicator, i: int, held: Any = held, feedback: Any = feedback) -> Any:
                peer.all_reduce(held[i], op=SUM, quantization=QuantizationOptions(bits=4), feedback=feedback[i])
                return seen_in(held[i])

            results = three_peers.each(reduce)
        found += results
    for each in found:
        np.testing.assert_array_equal(each, found[0])


def mixed(devices: list[FakeDevice], on_device: Sequence[int], world: int = WORLD) -> list[Any]:
    return [devices[i % WORLD].array(values(i)) if i in on_device else values(i) for i in range(world)]


@pytest.mark.parametrize("on_device", [(0,), (1,), (0, 2)])
@pytest.mark.parametrize("algorithm", ReduceAlgorithm)
def test_devices_and_cpus_share_ops_of_any_size(
    three_peers: Cluster, devices: list[FakeDevice], on_device: tuple[int, ...], algorithm: ReduceAlgorithm
) -> None:
    for _ in range(3):
        for found in reduced(three_peers, mixed(devices, on_device), algorithm=algorithm):
            np.testing.assert_array_equal(found, total())
    assert three_peers.each(reduce_once) == [WORLD] * WORLD


def test_mismatch_between_device_and_cpu(three_peers: Cluster, devices: list[FakeDevice]) -> None:
    held: list[Any] = [devices[0].array(values(0)), values(1, 20), devices[2].array(values(2))]
    failed = three_peers.outcomes(lambda peer, i: peer.all_reduce(held[i], op=SUM))
    assert results(failed) == [Result.INVALID_ARGUMENT] * WORLD
    assert "20 x float32" in str(failed[0])
    assert f"{COUNT} x float32" in str(failed[0])
    np.testing.assert_array_equal(held[1], values(1, 20))
    calls = [partial(three_peers[0].all_reduce, held[0], op=SUM), *(peer.all_gather for peer in three_peers.peers[1:])]
    failed = outcomes([calls[0], *(partial(call, values(1)) for call in calls[1:])])
    assert results(failed) == [Result.INVALID_USAGE] * WORLD
    np.testing.assert_array_equal(held[0].settled(), values(0))


def test_device_failure_leaves_cpu_arrays_unchanged(cluster: Cluster, devices: list[FakeDevice]) -> None:
    cluster.join(WORLD)
    devices[0].fails_after_reads = 0
    held = mixed(devices, [0])
    failed = cluster.outcomes(lambda peer, i: peer.all_reduce(held[i], op=SUM))
    assert results(failed) == [Result.INTERNAL_ERROR] * WORLD
    for i in (1, 2):
        np.testing.assert_array_equal(held[i], values(i))
    devices[0].fails_after_reads = None
    for found in reduced(cluster, held):
        np.testing.assert_array_equal(found, total())
    until(lambda: all(peer.stats["ops_open"] == 0 for peer in cluster.peers), "no op is left")


def test_result_is_visible_in_waiting_thread(three_peers: Cluster, devices: list[FakeDevice]) -> None:
    held = [device.array(values(i)) for i, device in enumerate(devices)]

    def wait(handle: Any, array: FakeArray) -> Any:
        handle.wait()
        return array.get()

    def reduce(peer: Communicator, i: int) -> None:
        handle = peer.all_reduce_async(held[i], op=SUM)
        for found in outcomes([partial(wait, handle, held[i]) for _ in range(3)]):
            np.testing.assert_array_equal(found, total())

    three_peers.each(reduce)


def test_dropped_handle_warns(three_peers: Cluster, devices: list[FakeDevice]) -> None:
    held = [device.array(values(i)) for i, device in enumerate(devices)]
    dropped, *handles = three_peers.each(lambda peer, i: peer.all_reduce_async(held[i], op=SUM))
    assert [handle.wait()[0] for handle in handles] == [True, True]
    until(dropped.done, "there is a result")
    with pytest.warns(ResourceWarning, match="was never waited for"):
        del dropped
    np.testing.assert_array_equal(held[0].settled(), values(0))
    np.testing.assert_array_equal(held[1].settled(), total())


def test_async_communicator(devices: list[FakeDevice]) -> None:
    async def main(address: str) -> None:
        peers = [AsyncCommunicator(address) for _ in range(2)]
        held = [devices[0].array(values(i)) for i in range(2)]

        async def run(i: int) -> None:
            await peers[i].connect()
            while peers[i].get_attribute(attribute) < 2:
                await peers[i].update_topology()
            await peers[i].all_reduce(held[i], op=SUM)
            handle = peers[i].all_reduce_async(held[i], op=SUM)
            assert (await handle).world_size
            await peers[i].close()

        async with trio.open_nursery() as nursery:
            for i in range(2):
                nursery.start_soon(run, i)
        for array in held:
            np.testing.assert_array_equal(array.settled(), 2 * total(world=2))

    from pccl import Attribute

    attribute = Attribute.GLOBAL_WORLD_SIZE
    with MasterNode("127.0.0.1:0") as master:
        trio.run(main, master.address)


# Failure.


@pytest.mark.parametrize("on_device", [(0, 1, 2), (0, 2), (2,)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_loss_at_any_moment_has_one_outcome(
    cluster: Cluster, devices: list[FakeDevice], seed: int, on_device: tuple[int, ...]
) -> None:
    random = np.random.default_rng(seed)
    cluster.join(WORLD)
    lost, ops = cluster.peers.pop(), 3
    leave_after_reads = int(random.integers(1, 3 * ops))
    original, closing = devices[2].read, list[Background]()

    def read(*args: Any) -> Any:
        if devices[2].reads == leave_after_reads:
            closing.append(Background(lost.close))
        return original(*args)

    devices[2].read = read  # type: ignore[method-assign]

    def rounds(peer: Communicator, i: int) -> list[tuple[int, int, int]]:
        """Return the number of contributions to each result. The losses that peers see depend on when they call."""
        seen = []
        for turn in range(6):
            given = {tag: values(i) + 1000 * tag for tag in range(ops)}
            held = {tag: devices[i].array(array) if i in on_device else array for tag, array in given.items()}
            while held:
                try:
                    handles = {tag: peer.all_reduce_async(array, op=SUM, tag=tag) for tag, array in held.items()}
                except PCCLError:
                    assert i == 2
                    return seen
                for tag, handle in handles.items():
                    is_success, status, info = handle.wait()
                    world = info.world_size if info is not None else 0
                    if is_success:
                        seen.append((turn, tag, world))
                        expected = total(world=world) + 1000 * tag * world
                        np.testing.assert_array_equal(seen_in(held.pop(tag)), expected)
                    elif i < 2:
                        assert status is Result.RANK_CONNECTION_LOST
                        np.testing.assert_array_equal(seen_in(held[tag]), values(i) + 1000 * tag)
        return seen

    everybody = [*cluster.peers, lost]
    found = outcomes([partial(rounds, peer, i) for i, peer in enumerate(everybody)])
    assert found[0] == found[1], f"seed {seed}"
    assert closing, f"seed {seed}: nobody left"
    closing[0].result()


def test_timeout_before_the_copy_from_the_device(cluster: Cluster, devices: list[FakeDevice]) -> None:
    cluster.join(2)
    held = [device.array(values(i)) for i, device in enumerate(devices[:2])]
    for device in devices:
        device.reads_held.clear()
    other = Background(lambda: cluster[1].all_reduce(held[1], op=SUM))
    with pytest.raises(PCCLError) as caught:
        cluster[0].all_reduce(held[0], op=SUM, timeout=0.2)
    assert caught.value.result is Result.TIMEOUT
    assert other.outcome().result is Result.TIMEOUT
    for device in devices:
        device.reads_held.set()
    for found in reduced(cluster, held):
        np.testing.assert_array_equal(found, total(world=2))


@pytest.mark.parametrize("breaks_late", [False, True])
def test_device_failure_fails_op_on_all_peers(cluster: Cluster, devices: list[FakeDevice], breaks_late: bool) -> None:
    cluster.join(2)
    held = [device.array(values(i)) for i, device in enumerate(devices[:2])]
    devices[0].fails_after_reads = 0
    devices[0].breaks_late = breaks_late
    failed = cluster.outcomes(lambda peer, i: peer.all_reduce(held[i], op=SUM))
    assert results(failed) == [Result.INTERNAL_ERROR] * 2
    assert "the fake device is broken" in str(failed[1])
    devices[0].fails_after_reads = None
    for found in reduced(cluster, held):
        np.testing.assert_array_equal(found, total(world=2))


def test_failed_copy_of_result_fails_own_caller(cluster: Cluster, devices: list[FakeDevice]) -> None:
    cluster.join(2)
    held = [device.array(values(i)) for i, device in enumerate(devices[:2])]
    devices[0].fails_to_write = True
    failed = cluster.outcomes(lambda peer, i: peer.all_reduce(held[i], op=SUM))
    assert results(failed) == [Result.INTERNAL_ERROR, Result.SUCCESS]
    assert "all peers have the result, but it could not be copied to the device here" in str(failed[0])
    assert "the fake device is broken" in str(failed[0])
    np.testing.assert_array_equal(held[1].settled(), total(world=2))


def test_interrupt_leaves_no_op_in_flight(
    cluster: Cluster, devices: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccl.handle.INTERRUPT_GRACE_S", 0.05)
    cluster.join(2)
    held = devices[0].array(values(0)).set_later(values(0))  # so that its stream is there already
    for step in itertools.count():
        has_slept = interrupted_at(step, lambda: cluster[0].all_reduce(held, op=SUM), Interrupt)
        until(lambda: cluster[0].stats["ops_open"] == 0, f"nothing is in flight after step {step}")
        if has_slept:
            break
    assert step > 50
    np.testing.assert_array_equal(held.settled(), values(0))
    pool = helper_of(devices[0]).pool
    until(lambda: pool.idle_bytes == pool.pinned_bytes, "all blocks are free again")


def test_close_during_op(cluster: Cluster, devices: list[FakeDevice]) -> None:
    cluster.join(2)
    held = [device.array(values(i)) for i, device in enumerate(devices[:2])]
    devices[0].reads_held.clear()
    handles = cluster.each(lambda peer, i: peer.all_reduce_async(held[i], op=SUM))
    cluster[0].close()
    assert handles[0].wait()[1] is Result.NOT_INITIALIZED
    assert handles[1].wait()[1] is not Result.SUCCESS
    devices[0].reads_held.set()
    for i, array in enumerate(held):
        np.testing.assert_array_equal(array.settled(), values(i))


# Host memory.


def test_pinned_memory_is_bounded(
    three_peers: Cluster, devices: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "PINNED_BYTES_MAX", BLOCK)
    held = [[device.array(values(i)) for _ in range(2)] for i, device in enumerate(devices)]

    def reduce(peer: Communicator, i: int) -> None:
        handles = [peer.all_reduce_async(array, op=SUM, tag=tag) for tag, array in enumerate(held[i])]
        assert all(handle.wait()[0] for handle in handles)

    three_peers.each(reduce)
    for array in itertools.chain(*held):
        np.testing.assert_array_equal(array.settled(), total())
    assert sum(devices[0].pinned_allocated) == BLOCK
    assert devices[0].unpinned_allocated


def test_unpinnable_memory_is_ordinary(three_peers: Cluster, devices: list[FakeDevice]) -> None:
    devices[0].can_pin = False
    held = [device.array(values(i)) for i, device in enumerate(devices)]
    for found in reduced(three_peers, held):
        np.testing.assert_array_equal(found, total())
    assert not devices[0].pinned_allocated


def test_idle_memory_is_bounded(
    three_peers: Cluster, devices: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "IDLE_BYTES_MAX", 4096)
    held = [device.array(values(i)) for i, device in enumerate(devices)]
    three_peers.each(lambda peer, i: peer.all_reduce(held[i], op=SUM))
    pool = helper_of(devices[0]).pool
    until(lambda: pool.pinned_bytes <= 4096, "the rest is freed")
