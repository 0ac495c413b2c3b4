"""all_to_all, gather, scatter and reduce with arrays on a device, and with arrays of several kinds at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pccl import Communicator, ReduceOp, Result
from tests.support.cluster import Cluster, outcomes, results
from tests.support.fake_device import FakeArray, FakeDevice

WORLD = 3
ROWS = 2000
ROOT = 1
LATE_S = 0.03
KINDS = ("all_to_all", "unequal", "gather", "scatter", "reduce")
COUNTS = [[rank + to for to in range(WORLD)] for rank in range(WORLD)]
every_kind = pytest.mark.parametrize("kind", KINDS)


def values(kind: str, rank: int) -> Any:
    rows = sum(COUNTS[rank]) if kind == "unequal" else WORLD * ROWS
    return np.random.default_rng(rank).integers(0, 100, (rows, 2)).astype(np.float32)


def expected(kind: str, rank: int) -> Any:
    given = [values(kind, each) for each in range(WORLD)]
    if kind == "all_to_all":
        return np.concatenate([np.split(each, WORLD)[rank] for each in given])
    if kind == "unequal":
        return np.concatenate([np.split(x, np.cumsum(row))[rank] for x, row in zip(given, COUNTS, strict=True)])
    if kind == "scatter":
        return np.split(given[ROOT], WORLD)[rank]
    if rank != ROOT:
        return None
    return np.stack(given) if kind == "gather" else sum(given)


def call(kind: str, peer: Communicator, array: Any, part: Any) -> Any:
    rank = peer.membership.rank
    if kind == "all_to_all":
        return peer.all_to_all(array)
    if kind == "unequal":
        return peer.all_to_all(array, send_counts=COUNTS[rank], recv_counts=[row[rank] for row in COUNTS])
    if kind == "gather":
        return peer.gather(array, root=ROOT)
    if kind == "scatter":
        return peer.scatter(array if rank == ROOT else None, part, root=ROOT)
    return peer.reduce(array, op=ReduceOp.SUM, root=ROOT)


def seen(array: Any) -> Any:
    return array.get() if isinstance(array, FakeArray) else array


@every_kind
@pytest.mark.parametrize("on_device", [(0, 1, 2), (0,), (1, 2)])
def test_devices_and_cpus_share_exchanges(
    three_peers: Cluster, devices: list[FakeDevice], kind: str, on_device: tuple[int, ...]
) -> None:
    def run(peer: Communicator, i: int) -> None:
        rank, device = peer.membership.rank, devices[i]
        device.kernel_s = device.write_s = LATE_S
        array, part = values(kind, rank), np.zeros((ROWS, 2), np.float32)
        if rank in on_device:
            array = device.array(np.zeros_like(array)).set_later(array)
            part = device.array(part)
        info = call(kind, peer, array, part)
        want = expected(kind, rank)
        assert (info.array is None) == (want is None)
        if want is not None:
            assert isinstance(info.array, FakeArray) == (rank in on_device)
            np.testing.assert_array_equal(seen(info.array), want)
        np.testing.assert_array_equal(seen(array), values(kind, rank))

    three_peers.each(run)


@every_kind
def test_wrong_size_fails_for_all(three_peers: Cluster, devices: list[FakeDevice], kind: str) -> None:
    """Rank 1 has a row too many, or too few."""

    def run(peer: Communicator, i: int) -> None:
        rank = peer.membership.rank
        array = values(kind, rank)[: -1 if rank == 1 and kind != "unequal" else None]
        part = devices[i].array(np.zeros((ROWS, 2), np.float32))
        if kind == "unequal" and rank == 1:
            gives = [COUNTS[1][0] + 1, *COUNTS[1][1:-1], COUNTS[1][-1] - 1]
            peer.all_to_all(devices[i].array(array), send_counts=gives, recv_counts=[row[1] for row in COUNTS])
        call(kind, peer, devices[i].array(array), part)

    found = outcomes([lambda i=i, peer=peer: run(peer, i) for i, peer in enumerate(three_peers.peers)])  # type: ignore[misc]
    assert results(found) == [Result.INVALID_ARGUMENT] * WORLD
