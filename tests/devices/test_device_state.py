"""Shared states of arrays on a device, with one whose copies come late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pccl import Communicator, ReduceOp, Result, SharedState, SharedStateSyncStrategy, TensorInfo
from pccl.devices.staging import helper_of
from pccl.devices.state_store import DeviceStore
from pccl.runtime.state import tensor_blocks
from pccl.runtime.state.tensor_blocks import StateTensor, fingerprint
from tests.support.cluster import Background, Cluster, refusal, until
from tests.support.fake_device import FakeArray, FakeDevice

BLOCK = 4096
COUNT = 10 * BLOCK // 4 + 33
BLOCKS = 11
LATE_S = 0.03
WORLD = 3


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_blocks, "BLOCK_BYTES", BLOCK)


def values(seed: int, count: int = COUNT) -> Any:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def state_of(array: Any, revision: int, **options: Any) -> SharedState:
    make = TensorInfo.from_numpy if isinstance(array, np.ndarray) else TensorInfo.from_torch
    state = SharedState([make(array, "x", **options)])
    state.revision = revision
    return state


def tensor_of(array: FakeArray) -> StateTensor:
    data = array.settled()
    return StateTensor("x", "FLOAT", array.shape, False, memoryview(b""), DeviceStore(array.device, array, data.nbytes))


@pytest.mark.parametrize("count", [1, BLOCK // 4, BLOCK // 4 + 1, COUNT])
def test_digests_of_device_and_cpu_agree(devices: list[FakeDevice], count: int) -> None:
    array = devices[0].array(values(0, count))
    host = StateTensor("x", "FLOAT", (count,), False, memoryview(values(0, count)).cast("B"))
    assert fingerprint([tensor_of(array)]) == fingerprint([host])
    assert devices[0].reads == host.block_count


def test_only_differing_blocks_are_copied(three_peers: Cluster, devices: list[FakeDevice]) -> None:
    arrays = [device.array(values(0)) for device in devices]
    spoilt = values(0)
    spoilt[2 * BLOCK // 4] += 1
    spoilt[-1] += 1
    arrays[2] = devices[2].array(spoilt)
    infos = three_peers.each(lambda peer, i: peer.sync_shared_state(state_of(arrays[i], 1)))
    assert [info.rx_bytes for info in infos] == [0, 0, BLOCK + 33 * 4]
    for array in arrays:
        np.testing.assert_array_equal(array.settled(), values(0))
    assert [device.writes for device in devices] == [0, 0, 2]
    assert sum(device.reads for device in devices) == 3 * BLOCKS + 2


def test_sync_is_ordered_with_streams(three_peers: Cluster, devices: list[FakeDevice]) -> None:
    revision = 2
    held = [device.array(np.zeros(COUNT, np.float32)) for device in devices]

    def sync(peer: Communicator, i: int) -> Any:
        devices[i].kernel_s = devices[i].write_s = LATE_S if i else 0.0
        if i == 0:
            devices[i].kernel_s = LATE_S
            held[i].set_later(values(7))
        with devices[i].stream(devices[i].new_stream()):
            peer.sync_shared_state(state_of(held[i], revision if i == 0 else 1))
        return held[i].get()

    for found in three_peers.each(sync):
        np.testing.assert_array_equal(found, values(7))


def share(peers: Cluster, offers: list[tuple[SharedState, SharedStateSyncStrategy]]) -> None:
    peers.each(lambda peer, i: peer.sync_shared_state(*offers[i]))


def test_devices_and_cpus_share_a_state(three_peers: Cluster, devices: list[FakeDevice]) -> None:
    held: list[Any] = [values(1), devices[1].array(values(2)), values(3)]
    for turn, newest in enumerate((1, 0)):
        if newest == 0:
            held[0][:] = values(4)
        states = [state_of(array, 3 + turn - (i != newest)) for i, array in enumerate(held)]
        strategies = [
            SharedStateSyncStrategy.SEND_ONLY if i == newest else SharedStateSyncStrategy.RECEIVE_ONLY
            for i in range(WORLD)
        ]
        share(three_peers, list(zip(states, strategies, strict=True)))
        expected = values(2) if newest else values(4)
        for array in held:
            np.testing.assert_array_equal(array.settled() if isinstance(array, FakeArray) else array, expected)


def test_loose_arrays(three_peers: Cluster, devices: list[FakeDevice]) -> None:
    held = [device.array(values(10 + i)) for i, device in enumerate(devices)]
    states = [state_of(array, 10 if i else 9, allow_content_inequality=True) for i, array in enumerate(held)]
    three_peers.each(lambda peer, i: peer.sync_shared_state(states[i]))
    np.testing.assert_array_equal(held[1].settled(), values(11))
    np.testing.assert_array_equal(held[2].settled(), values(12))
    assert any(np.array_equal(held[0].settled(), values(seed)) for seed in (11, 12))


def test_lost_donor_leaves_no_wrong_byte(cluster: Cluster, devices: list[FakeDevice]) -> None:
    cluster.join(2)
    held = [device.array(values(i)) for i, device in enumerate(devices[:2])]
    donor, device = cluster[0], devices[0]
    closing: list[Background] = []
    original = device.read

    def read(*args: Any) -> Any:
        if device.reads == BLOCKS + 3:  # after those for the digests
            device.reads_held.clear()
            closing.append(Background(donor.close))
        return original(*args)

    device.read = read  # type: ignore[method-assign]
    outcomes = cluster.outcomes(lambda peer, i: peer.sync_shared_state(state_of(held[i], 5 - i)))
    assert outcomes[0].result is Result.NOT_INITIALIZED
    assert "overwritten here at least partly: x" in str(outcomes[1])
    closing[0].result()
    device.reads_held.set()
    found = held[1].settled()
    whole = np.array_split(np.arange(COUNT), range(BLOCK // 4, COUNT, BLOCK // 4))
    for block in whole:
        assert any(np.array_equal(found[block], values(seed)[block]) for seed in (0, 1))


@pytest.mark.parametrize("when", ["hashing", "sending", "receiving"])
def test_device_failure_ends_peer(cluster: Cluster, devices: list[FakeDevice], when: str) -> None:
    cluster.join(WORLD)
    held = [device.array(values(min(i, 1))) for i, device in enumerate(devices)]
    states = [state_of(array, 1 if i == 0 else 2) for i, array in enumerate(held)]
    broken = 0 if when == "receiving" else 1
    if when == "receiving":
        devices[broken].fails_to_write = True
    else:
        devices[broken].fails_after_reads = BLOCKS if when == "sending" else 0
    found = cluster.outcomes(lambda peer, i: peer.sync_shared_state(states[i]))
    assert found[broken].result is Result.INTERNAL_ERROR
    assert "fake:0 failed: RuntimeError: the fake device is broken; this peer has left the run" in str(found[broken])
    assert refusal(lambda: cluster[broken].all_reduce(np.ones(1), op=ReduceOp.SUM)).result is Result.INTERNAL_ERROR
    survivors = [i for i in range(WORLD) if i != broken]
    del cluster.peers[broken]
    cluster.each(lambda peer, i: peer.sync_shared_state(states[survivors[i]]))
    for i in survivors:
        np.testing.assert_array_equal(held[i].settled(), values(1))


def test_host_memory_is_given_back(three_peers: Cluster, devices: list[FakeDevice]) -> None:
    held = [device.array(values(20 + i)) for i, device in enumerate(devices)]
    three_peers.each(lambda peer, i: peer.sync_shared_state(state_of(held[i], 30 - i)))
    for device in devices:
        pool = helper_of(device).pool
        until(lambda pool=pool: pool.idle_bytes == pool.pinned_bytes, "all blocks are free again")  # type: ignore[misc]
