"""all_reduce against NumPy: every dtype, op, size, world and segment size that Hypothesis thinks of.

Integers, MIN and MAX are exactly what NumPy says. Floats are bit-identical on all peers and within rounding of the
exact result. Quantized ones are bit-identical too, and off by no more than the ranges of the blocks allow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pccl import (
    Communicator,
    DataType,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceInfo,
    ReduceOp,
    ReduceOperandDescriptor,
)
from tests.api.conftest import ClusterOf
from tests.support.cluster import Cluster

Array = npt.NDArray[Any]

INTEGERS = [d for d in DataType if not d.is_float]
FLOATS = [DataType.FLOAT16, DataType.FLOAT, DataType.DOUBLE]
NUMPY_OPS: dict[ReduceOp, Callable[[Array, Array], Array]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
}
# A result is off by at most this share of the largest intermediate value for each rounding.
UNIT_ROUNDOFF = {
    DataType.FLOAT16: 2.0**-11,
    DataType.BFLOAT16: 2.0**-8,
    DataType.FLOAT: 2.0**-24,
    DataType.DOUBLE: 2.0**-53,
}
SMALLEST_NORMAL = {DataType.FLOAT16: 2.0**-14, DataType.BFLOAT16: 2.0**-126, DataType.FLOAT: 2.0**-126}

worlds = st.integers(2, 4)
# Small segments take small arrays through all that large ones meet: many frames, uneven last ones, one-element ones.
segments = st.sampled_from([8, 1000, 0])
counts = st.one_of(st.integers(0, 9), st.integers(10, 300), st.sampled_from([1023, 1024, 1025, 4099]))
seeds = st.integers(0, 2**32 - 1)


def reduced(
    cluster: Cluster, inputs: list[Array], in_place: bool, **arguments: Any
) -> tuple[list[Array], list[ReduceInfo]]:
    """Return what every peer holds after the reduce. Inputs of one that is out of place stay as they are."""
    sends = [x.copy() for x in inputs]
    recvs = sends if in_place else [np.full_like(x, 77) for x in inputs]

    def call(peer: Communicator, i: int) -> ReduceInfo:
        return peer.all_reduce(sends[i], None if in_place else recvs[i], **arguments)

    infos = cluster.each(call)
    assert [info.local_world_size for info in infos] == [len(inputs)] * len(inputs)
    assert [info.world_size for info in infos] == [len(inputs)] * len(inputs)
    assert [info.membership for info in infos] == [peer.membership for peer in cluster.peers]
    if not in_place:
        assert all(send.tobytes() == x.tobytes() for send, x in zip(sends, inputs, strict=True))
    assert all(recv.tobytes() == recvs[0].tobytes() for recv in recvs), "peers differ"
    return recvs, infos


@settings(max_examples=60)
@given(worlds, segments, counts, seeds, st.sampled_from(INTEGERS), st.sampled_from(ReduceOp), st.booleans())
@example(4, 0, 3, 1, DataType.INT8, ReduceOp.AVG, True).via("fewer elements than peers, rounded to minus infinity")
def test_integers_equal_numpy(
    cluster_of: ClusterOf,
    world: int,
    segment: int,
    count: int,
    seed: int,
    dtype: DataType,
    op: ReduceOp,
    in_place: bool,
) -> None:
    numpy_dtype = dtype.to_numpy_dtype()
    limits = np.iinfo(numpy_dtype)
    random = np.random.default_rng(seed)
    inputs = [
        random.integers(limits.min, limits.max, count, numpy_dtype, endpoint=True) for _ in range(world)
    ]  # sums and products wrap around, as NumPy's do
    expected = reduce(NUMPY_OPS[op], inputs)
    if op is ReduceOp.AVG:
        expected //= numpy_dtype.type(world)
    results, _ = reduced(cluster_of(world, segment), inputs, in_place, op=op)
    np.testing.assert_array_equal(results[0], expected)


@settings(max_examples=20)
@given(worlds, segments, counts, seeds, st.sampled_from(FLOATS), st.sampled_from([ReduceOp.MIN, ReduceOp.MAX]))
def test_float_min_max_equal_numpy(
    cluster_of: ClusterOf, world: int, segment: int, count: int, seed: int, dtype: DataType, op: ReduceOp
) -> None:
    random = np.random.default_rng(seed)
    special = np.array([np.nan, np.inf, -np.inf, 0.0], dtype.to_numpy_dtype())
    inputs = []
    for _ in range(world):
        values = random.normal(0, 100, count).astype(dtype.to_numpy_dtype())
        odd = random.random(count) < 0.1
        values[odd] = random.choice(special, int(odd.sum()))
        inputs.append(values)
    results, _ = reduced(cluster_of(world, segment), inputs, True, op=op)
    np.testing.assert_array_equal(results[0], reduce(NUMPY_OPS[op], inputs))


def exact(inputs: list[Array], op: ReduceOp) -> tuple[Array, Array]:
    """The result in the widest floats there are, and the largest magnitude that any order of reducing meets."""
    wide = [x.astype(np.longdouble) for x in inputs]
    result, magnitude = reduce(NUMPY_OPS[op], wide), reduce(NUMPY_OPS[op], [abs(x) for x in wide])
    return (result / len(wide), magnitude / len(wide)) if op is ReduceOp.AVG else (result, magnitude)


@settings(max_examples=30)
@given(
    *(worlds, segments, counts, seeds, st.sampled_from(FLOATS)),
    st.sampled_from([ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PROD]),
    st.booleans(),
)
def test_floats_are_within_rounding(
    cluster_of: ClusterOf,
    world: int,
    segment: int,
    count: int,
    seed: int,
    dtype: DataType,
    op: ReduceOp,
    in_place: bool,
) -> None:
    random = np.random.default_rng(seed)
    inputs = [random.normal(0, 4, count).astype(dtype.to_numpy_dtype()) for _ in range(world)]
    results, _ = reduced(cluster_of(world, segment), inputs, in_place, op=op)
    expected, magnitude = exact(inputs, op)
    unit = UNIT_ROUNDOFF[dtype]
    allowed = (world + 1) * unit * magnitude + world * unit * SMALLEST_NORMAL.get(dtype, 0.0)
    assert np.all(abs(results[0].astype(np.longdouble) - expected) <= allowed)


def widened(bits: Array) -> Array:
    """bfloat16, as its bits, to the float32 of equal value."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@settings(max_examples=30)
@given(worlds, segments, counts, seeds, st.sampled_from(ReduceOp))
def test_bfloat16(cluster_of: ClusterOf, world: int, segment: int, count: int, seed: int, op: ReduceOp) -> None:
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(seed)
    bits = [
        (random.normal(0, 4, count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for _ in range(world)
    ]
    tensors = [torch.from_numpy(x.copy()).view(torch.bfloat16) for x in bits]
    cluster_of(world, segment).each(lambda peer, i: peer.all_reduce(tensors[i], op=op))
    results = [tensor.view(torch.uint16).numpy() for tensor in tensors]
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    expected, magnitude = exact([widened(x) for x in bits], op)
    exactly = op in (ReduceOp.MIN, ReduceOp.MAX)
    allowed = 0.0 if exactly else (world + 1) * UNIT_ROUNDOFF[DataType.BFLOAT16] * magnitude + 2.0**-130
    assert np.all(abs(widened(results[0]).astype(np.longdouble) - expected) <= allowed)


@pytest.mark.parametrize("dtype", FLOATS)
def test_infinity_and_nan_equal_numpy(cluster_of: ClusterOf, dtype: DataType) -> None:
    inputs = [
        np.array(x, dtype.to_numpy_dtype())
        for x in ([np.inf, np.inf, np.nan, 1, 0], [1, -np.inf, 1, np.nan, 0], [1, 1, 1, np.inf, 0])
    ]
    with np.errstate(invalid="ignore"):
        expected = reduce(np.add, inputs)
    results, _ = reduced(cluster_of(3, 0), inputs, True, op=ReduceOp.SUM)
    np.testing.assert_array_equal(results[0], expected)


@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 7), (0,), (4, 0, 2)])
def test_any_shape(cluster_of: ClusterOf, shape: tuple[int, ...]) -> None:
    inputs = [np.full(shape, i, np.int32) for i in range(3)]
    results, infos = reduced(cluster_of(3, 0), inputs, True, op=ReduceOp.SUM)
    np.testing.assert_array_equal(results[0], np.full(shape, 3, np.int32))
    assert (infos[0].tx_bytes == 0) == (inputs[0].size == 0)


def test_recv_of_another_shape(cluster_of: ClusterOf) -> None:
    sends = [np.ones((2, 6), np.float32)] * 2
    recvs = [np.zeros(12, np.float32), np.zeros((3, 4), np.float32)]
    cluster_of(2, 0).each(lambda peer, i: peer.all_reduce(sends[i], recvs[i], op=ReduceOp.SUM))
    assert all(np.all(recv == 2) for recv in recvs)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bytes_sent(cluster_of: ClusterOf, world: int) -> None:
    inputs = [np.zeros(60_000, np.float32) for _ in range(world)]
    _, infos = reduced(cluster_of(world, 0), inputs, True, op=ReduceOp.SUM)
    each = 2 * (world - 1) * inputs[0].nbytes // world
    assert [(info.tx_bytes, info.rx_bytes) for info in infos] == [(each, each)] * world


def test_a_descriptor_that_says_what_the_arrays_are_changes_nothing(cluster_of: ClusterOf) -> None:
    inputs = [np.arange(10, dtype=np.float32)] * 2
    results, _ = reduced(
        cluster_of(2, 0),
        inputs,
        False,
        op=ReduceOp.SUM,
        tag=5,
        operand_descriptor=ReduceOperandDescriptor(DataType.FLOAT),
    )
    np.testing.assert_array_equal(results[0], inputs[0] * 2)


# Quantized.

quantizations = st.builds(
    QuantizationOptions,
    quantized_datatype=st.sampled_from([DataType.UINT8, DataType.INT8, DataType.UINT16, DataType.INT16]),
    algorithm=st.sampled_from([QuantizationAlgorithm.MIN_MAX, QuantizationAlgorithm.ZERO_POINT_SCALE]),
    block_size=st.sampled_from([8, 64, 256]),
)


def block_ranges(values: Array, quantization: QuantizationOptions) -> Array:
    """Return the widest range that a block with an element can have, for every element."""
    reach = quantization.block_size - 1
    around = np.lib.stride_tricks.sliding_window_view(np.pad(values, reach, mode="edge"), 2 * reach + 1)
    least, greatest = around.min(axis=1), around.max(axis=1)
    if quantization.algorithm is QuantizationAlgorithm.ZERO_POINT_SCALE:
        least, greatest = np.minimum(least, 0), np.maximum(greatest, 0)
    ranges: Array = greatest - least
    return ranges


@settings(max_examples=30)
@given(
    *(worlds, st.sampled_from([64, 4000, 0]), st.integers(1, 1500), seeds, st.sampled_from(FLOATS), quantizations),
    *(st.sampled_from([ReduceOp.SUM, ReduceOp.AVG]), st.booleans()),
)
def test_quantized_error_is_bounded(
    cluster_of: ClusterOf,
    world: int,
    segment: int,
    count: int,
    seed: int,
    dtype: DataType,
    quantization: QuantizationOptions,
    op: ReduceOp,
    in_place: bool,
) -> None:
    random = np.random.default_rng(seed)
    inputs = [random.normal(0, 1, count).astype(dtype.to_numpy_dtype()) for _ in range(world)]
    inputs[0][random.integers(count)] = 1000  # must spoil its own block only
    results, _ = reduced(cluster_of(world, segment), inputs, in_place, op=op, quantization_options=quantization)
    expected, magnitude = exact(inputs, op)
    steps = 2 ** (8 * quantization.quantized_datatype.itemsize) - 1
    # Every hop quantizes a partial sum, whose blocks are no wider than those of all peers together.
    scale = sum(block_ranges(x.astype(np.float64), quantization) for x in inputs) / steps
    if op is ReduceOp.AVG:
        scale = scale / world
    rounding = (2 * world + 1) * max(UNIT_ROUNDOFF[dtype], UNIT_ROUNDOFF[DataType.FLOAT])
    largest = np.max(magnitude)
    allowed = world * 0.55 * scale + rounding * largest
    error = abs(results[0].astype(np.longdouble) - expected)
    assert np.all(error <= allowed), f"off by {np.max(error - allowed)} more than allowed"


@pytest.mark.parametrize(("quantized", "shrinks_to"), [(DataType.UINT8, 0.27), (DataType.INT16, 0.52)])
def test_quantized_bytes_are_fewer(cluster_of: ClusterOf, quantized: DataType, shrinks_to: float) -> None:
    cluster = cluster_of(2, 0)
    inputs = [np.random.default_rng(i).normal(0, 1, 100_000).astype(np.float32) for i in range(2)]

    def wire_bytes() -> int:
        return cluster[0].stats["tx_wire_bytes"]

    before = wire_bytes()
    _, (plain, _) = reduced(cluster, inputs, True, op=ReduceOp.SUM)
    between = wire_bytes()
    _, (packed, _) = reduced(
        cluster, inputs, True, op=ReduceOp.SUM, quantization_options=QuantizationOptions(quantized, block_size=512)
    )
    assert packed.tx_bytes <= shrinks_to * plain.tx_bytes
    assert wire_bytes() - between <= 1.05 * shrinks_to * (between - before)


def test_no_algorithm_means_no_quantization(cluster_of: ClusterOf) -> None:
    inputs = [np.array([1.0, 1e9, -3.5], np.float32)] * 2
    off = QuantizationOptions(algorithm=QuantizationAlgorithm.NONE)
    results, _ = reduced(cluster_of(2, 0), inputs, True, op=ReduceOp.SUM, quantization_options=off)
    np.testing.assert_array_equal(results[0], inputs[0] * 2)
