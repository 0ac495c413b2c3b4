"""Ops on arrays of as many elements in different shapes fail on all peers, whichever way they take."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl import (
    Communicator,
    ReduceAlgorithm,
    ReduceDescriptor,
    ReduceOpDescriptor,
    Result,
    SharedState,
)
from pccl.runtime.data_plane.op_request import DIGEST_FLAG, dimensions_of, number_of
from tests.support.cluster import SUM, Cluster, reduce_once, results
from tests.support.fake_device import FakeDevice

Shape = tuple[int, ...]
Array = npt.NDArray[Any]
Call = Callable[[Communicator, Array], Any]

WIDE, TALL = (2, 4), (4, 2)


def retry(peer: Communicator, x: Array) -> Any:
    descriptor = ReduceDescriptor(count=x.size, op=SUM, tag=3)
    return peer.all_reduce_multiple_with_retry([ReduceOpDescriptor.from_numpy(x, x, descriptor)])


EVERY: dict[str, Call] = {
    "all_reduce": lambda peer, x: peer.all_reduce(x, op=SUM),
    "ring": lambda peer, x: peer.all_reduce(x, op=SUM, algorithm=ReduceAlgorithm.RING),
    "direct": lambda peer, x: peer.all_reduce(x, op=SUM, algorithm=ReduceAlgorithm.DIRECT),
    "out of place": lambda peer, x: peer.all_reduce(x, np.empty(x.size, x.dtype), op=SUM),
    "async": lambda peer, x: peer.all_reduce_async(x, op=SUM).result(),
    "retry": retry,
    "all_gather": lambda peer, x: peer.all_gather(x),
    "all_gather_async": lambda peer, x: peer.launch.all_gather(x).result(),
    "all_gather bytes": lambda peer, x: peer.all_gather(x.astype(np.complex64)),
    "reduce_scatter": lambda peer, x: peer.reduce_scatter(x, op=SUM),
    "broadcast": lambda peer, x: peer.broadcast(x, root=0),
    "broadcast bytes": lambda peer, x: peer.broadcast(x.astype(bool), root=2),
}


def fails_for_all(cluster: Cluster, call: Call, shapes: list[Shape]) -> list[str]:
    arrays = [np.full(shape, i, np.float32) for i, shape in enumerate(shapes)]
    found = cluster.outcomes(lambda peer, i: call(peer, arrays[i]))
    assert results(found) == [Result.INVALID_ARGUMENT] * len(shapes), found
    assert all(np.all(x == i) for i, x in enumerate(arrays))
    return [str(error) for error in found]


@pytest.mark.parametrize("name", EVERY)
def test_mismatched_shapes_fail_on_all(three_peers: Cluster, name: str) -> None:
    call = EVERY[name]
    for _ in range(2):  # the second time a small op goes past the trio thread
        three_peers.each(lambda peer, _: call(peer, np.ones(WIDE, np.float32)))
        for odd in range(3):
            texts = fails_for_all(three_peers, call, [WIDE if i == odd else TALL for i in range(3)])
            for text in texts:
                found = re.findall(r"peer (\d) \([^()]*\) has [^()]* of shape (\(\d, \d\))", text)
                assert len(found) == 2, text
                assert {peer: shape == str(WIDE) for peer, shape in found} == {
                    peer: int(peer) == odd + 1 for peer, _ in found
                }
                assert len({shape for _, shape in found}) == 2
        three_peers.each(lambda peer, _: call(peer, np.ones(TALL, np.float32)))


@pytest.mark.parametrize(
    "shapes", [((8,), WIDE), ((), (1,)), ((1,), (1, 1)), ((0, 4), (4, 0)), ((8,), (1, 8)), ((0,), (0, 0))]
)
def test_unequal_shapes(three_peers: Cluster, shapes: tuple[Shape, Shape]) -> None:
    mine, theirs = shapes
    for call in EVERY["all_reduce"], EVERY["all_gather"], EVERY["broadcast"]:
        for text in fails_for_all(three_peers, call, [mine, theirs, theirs]):
            assert f"of shape {mine}" in text
            assert f"of shape {theirs}" in text
    assert three_peers.each(reduce_once) == [3] * 3


@pytest.mark.parametrize("call", [EVERY["all_gather"], EVERY["broadcast"]])
@pytest.mark.parametrize(
    ("mine", "theirs"), [([("a", "f4"), ("b", "i4")], [("b", "i4"), ("a", "f4")]), ("c8", "M8[s]"), ("S3", "V3")]
)
def test_bytes_of_another_dtype_are_no_match(three_peers: Cluster, call: Call, mine: Any, theirs: Any) -> None:
    for _ in range(2):
        for odd in range(3):
            dtypes = [np.dtype(mine if i == odd else theirs) for i in range(3)]
            found = three_peers.outcomes(lambda peer, i, dtypes=dtypes: call(peer, np.zeros(4, dtypes[i])))  # type: ignore[misc]
            assert results(found) == [Result.INVALID_ARGUMENT] * 3, found
            assert all(f"of shape (4,) of {dtype}" in str(error) for error in found for dtype in dtypes), found
        three_peers.each(lambda peer, _: call(peer, np.zeros(4, mine)))


def test_shapes_too_large_to_be_told(three_peers: Cluster) -> None:
    """All shapes in one process are known; those of another one are not."""
    mine, theirs = (1,) * 12 + (2, 3), (1,) * 12 + (3, 2)
    for text in fails_for_all(three_peers, EVERY["all_reduce"], [mine, theirs, theirs]):
        assert f"of shape {mine}" in text
    assert three_peers.each(lambda peer, _: peer.all_reduce(np.ones(mine), op=SUM).world_size) == [3] * 3


def test_all_gather_into_another_shape(three_peers: Cluster) -> None:
    def call(peer: Communicator, i: int) -> Any:
        gathered = np.empty([24, (3, 8), (3, *WIDE)][i])  # type: ignore[arg-type]
        peer.all_gather(np.ones(WIDE), gathered)
        return np.all(gathered == 1)

    assert all(three_peers.each(call))


@pytest.mark.parametrize("on_device", [(0, 1, 2), (0,), (0, 2)])
def test_shapes_with_device_arrays(three_peers: Cluster, devices: list[FakeDevice], on_device: tuple[int, ...]) -> None:
    rows = 384
    one, other = (rows, 8), (8, rows)

    def reduce_here(peer: Communicator, i: int, shape: Shape) -> Any:
        x = np.ones(shape, np.float32)
        return peer.all_reduce(devices[i].array(x) if i in on_device else x, op=SUM)

    for odd in range(3):
        three_peers.each(partial(reduce_here, shape=one))
        shapes = [one if i == odd else other for i in range(3)]
        found = three_peers.outcomes(lambda peer, i, shapes=shapes: reduce_here(peer, i, shapes[i]))  # type: ignore[misc]
        assert results(found) == [Result.INVALID_ARGUMENT] * 3, found
        for error in found:
            assert f"of shape {one}" in str(error), error
            assert f"of shape {other}" in str(error), error


def test_shared_states_of_other_shapes_fail(three_peers: Cluster) -> None:
    for text in map(
        str,
        three_peers.outcomes(
            lambda peer, i: peer.sync_shared_state(SharedState.from_numpy({"w": np.ones(TALL if i == 1 else WIDE)}))
        ),
    ):
        assert "'w'" in text
        assert "[2, 4]" in text
        assert "[4, 2]" in text


dimensions = st.integers(0, 2**62) | st.integers(0, 5)
shapes = st.lists(dimensions, max_size=12).map(tuple)


@given(shapes, shapes)
def test_number_of_a_shape_is_unique(one: Shape, other: Shape) -> None:
    assert 0 < number_of(one) < 2**64
    assert (number_of(one) == number_of(other)) == (one == other)
    assert dimensions_of(number_of(one)) == one


@given(st.integers(0, 2**64 - 1))
def test_any_number_can_be_asked_for_its_shape(number: int) -> None:
    found = dimensions_of(number)
    assert found is None or all(0 <= dimension < 2**63 for dimension in found)


@pytest.mark.parametrize("shape", [(), (1 << 40,), (151936, 8192), (512, 512, 3, 3), (2, 3, 5, 7, 11, 13)])
def test_the_shapes_of_common_tensors_are_told(shape: Shape) -> None:
    assert number_of(shape) < DIGEST_FLAG


def test_no_array_has_no_shape() -> None:
    assert number_of(None) == 0
    assert dimensions_of(0) is None
