"""The raw ring of the benchmark, and its arithmetic."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pccl.tools.bench.plan import (
    format_bytes,
    parse_bytes,
)
from pccl.tools.bench.raw_ring import RawRing, join_ring
from pccl.tools.bench.report import timing


@contextmanager
def _rings(world_size: int, segment_bytes: int) -> Iterator[list[RawRing]]:
    """A ring of socket pairs in one process."""
    pairs = [socket.socketpair() for _ in range(world_size)]  # pair r leads from rank r to rank r + 1
    rings = [
        RawRing(rank, world_size, pairs[rank - 1][1], pairs[rank][0], segment_bytes=segment_bytes)
        for rank in range(world_size)
    ]
    try:
        yield rings
    finally:
        for ring in rings:
            ring.close()


def _all_reduce(rings: list[RawRing], arrays: list[NDArray[Any]]) -> None:
    with ThreadPoolExecutor(len(rings)) as pool:
        list(pool.map(lambda ring, array: ring.all_reduce(array)(), rings, arrays))


@settings(deadline=None, max_examples=60)
@given(
    world_size=st.integers(2, 5),
    count=st.integers(0, 300),
    segment_bytes=st.sampled_from([1, 7, 64, 4096]),
    dtype=st.sampled_from(["uint8", "int16", "float32", "float64"]),
)
def test_all_reduce(world_size: int, count: int, segment_bytes: int, dtype: str) -> None:
    # Small integers: exact in every type, so the order of additions does not show.
    arrays = [((np.arange(count) * 3 + rank) % 11).astype(dtype) for rank in range(world_size)]
    expected = np.sum(arrays, axis=0).astype(dtype)
    with _rings(world_size, segment_bytes) as rings:
        _all_reduce(rings, arrays)
    for array in arrays:
        np.testing.assert_array_equal(array, expected)


@settings(deadline=None, max_examples=30)
@given(world_size=st.integers(2, 5), count=st.integers(1, 100), segment_bytes=st.sampled_from([1, 7, 4096]))
def test_other_collectives(world_size: int, count: int, segment_bytes: int) -> None:
    ranks = range(world_size)
    gathered = [np.zeros((world_size, count), np.int32) for _ in ranks]
    for rank, array in enumerate(gathered):
        array[rank] = np.arange(count) + rank
    sends = [np.arange(world_size * count, dtype=np.int32) * (rank + 1) for rank in ranks]
    casts = [np.full(count, rank, np.int32) for rank in ranks]
    with _rings(world_size, segment_bytes) as rings, ThreadPoolExecutor(world_size) as pool:
        list(pool.map(lambda rank: rings[rank].all_gather(gathered[rank][rank], gathered[rank])(), ranks))
        scattered = [ring.reduce_scatter(send, np.empty(0)) for ring, send in zip(rings, sends, strict=True)]
        list(pool.map(lambda rank: scattered[rank][0](), ranks))
        list(pool.map(lambda rank: rings[rank].broadcast(casts[rank])(), ranks))
    for rank in ranks:
        np.testing.assert_array_equal(gathered[rank], np.arange(count) + np.arange(world_size)[:, None])
        first = rank * count
        factor = world_size * (world_size + 1) // 2
        np.testing.assert_array_equal(scattered[rank][1], np.arange(first, first + count) * factor)
        assert not casts[rank].any()


def test_large_arrays() -> None:
    arrays = [np.full(1 << 20, rank + 1.0, np.float32) for rank in range(3)]
    with _rings(3, 1 << 18) as rings:
        _all_reduce(rings, arrays)
    for array in arrays:
        assert (array == 6.0).all()


def test_tcp() -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [listener.getsockname() for listener in listeners]
    with ThreadPoolExecutor(2) as pool:
        rings = list(pool.map(lambda rank: join_ring(rank, addresses, listeners[rank]), range(2)))
        list(pool.map(RawRing.barrier, rings))
    arrays = [np.arange(1000.0), np.ones(1000)]
    _all_reduce(rings, arrays)
    for ring in rings:
        ring.close()
    np.testing.assert_array_equal(arrays[0], np.arange(1000.0) + 1)


def test_bandwidths() -> None:
    # Two iterations of two ranks: the slower rank counts.
    result = timing([2.0, 3.0], 1000, 4)
    assert result.median_s == 2.5
    assert result.p95_s == pytest.approx(2.95)
    assert result.algorithm_bytes_per_s == 400.0
    assert result.bus_bytes_per_s == 600.0


@pytest.mark.parametrize(
    ("text", "count"), [("4096", 4096), ("4KiB", 4096), ("1.5 MiB", 3 << 19), ("64mib", 64 << 20), ("2KB", 2000)]
)
def test_parse_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "4 parsecs", "-1", "0", "0.3B"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse_bytes(text)


@given(st.integers(1, 1 << 40))
def test_format_bytes(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == count
