"""The C kernels against NumPy, through the binding. native/tests/test_kernels.c tests them from inside."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl import _native

ffi, lib = _native.ffi, _native.lib

COUNTS = [0, 1, 2, 7, *range(63, 66), 127, 255, 256, 257, 1000, 1023, 1024, 1025]

INTEGERS = {
    lib.PCCL_UINT8: np.uint8,
    lib.PCCL_INT8: np.int8,
    lib.PCCL_UINT16: np.uint16,
    lib.PCCL_INT16: np.int16,
    lib.PCCL_UINT32: np.uint32,
    lib.PCCL_INT32: np.int32,
    lib.PCCL_UINT64: np.uint64,
    lib.PCCL_INT64: np.int64,
}
# bfloat16 is held in uint16.
FLOATS = {
    lib.PCCL_FLOAT16: np.float16,
    lib.PCCL_BFLOAT16: np.uint16,
    lib.PCCL_FLOAT32: np.float32,
    lib.PCCL_FLOAT64: np.float64,
}
DTYPES = INTEGERS | FLOATS
OPS = {
    lib.PCCL_SUM: np.add,
    lib.PCCL_AVG: np.add,
    lib.PCCL_PROD: np.multiply,
    lib.PCCL_MAX: np.maximum,
    lib.PCCL_MIN: np.minimum,
}
NAMES = {dtype: np.dtype(kind).name for dtype, kind in DTYPES.items()} | {lib.PCCL_BFLOAT16: "bfloat16"}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
ops = pytest.mark.parametrize("op", OPS, ids=["sum", "avg", "prod", "max", "min"])


def bfloat16_to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bfloat16_from_float32(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_float64(dtype: int, values: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        if dtype == lib.PCCL_BFLOAT16:
            return bfloat16_from_float32(values.astype(np.float32))
        return values.astype(FLOATS[dtype])


def to_float64(dtype: int, values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signaling NaNs
        return (bfloat16_to_float32(values) if dtype == lib.PCCL_BFLOAT16 else values).astype(np.float64)


def pointer(array: np.ndarray):
    return ffi.cast("void *", array.ctypes.data)


def reduced(dtype: int, op: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    destination = np.empty_like(a)
    lib.pccl_kernel_reduce(dtype, op, pointer(destination), pointer(a), pointer(b), a.size)
    return destination


def expected_reduction(dtype: int, op: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        if dtype == lib.PCCL_BFLOAT16:
            return bfloat16_from_float32(OPS[op](bfloat16_to_float32(a), bfloat16_to_float32(b)))
        if dtype == lib.PCCL_FLOAT16:
            return OPS[op](a.astype(np.float32), b.astype(np.float32)).astype(np.float16)
        return OPS[op](a, b)


def assert_same(dtype: int, got: np.ndarray, expected: np.ndarray, signs_of_zeros: bool = True) -> None:
    """Equal element by element, NaN to NaN, and zeros in sign too."""
    if dtype in FLOATS:
        got, expected = to_float64(dtype, got), to_float64(dtype, expected)
        numbers = ~np.isnan(expected) & ((expected != 0) | signs_of_zeros)
        np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(expected[numbers]))
    np.testing.assert_array_equal(got, expected)


def special_values(dtype: int) -> np.ndarray:
    if dtype in INTEGERS:
        info = np.iinfo(DTYPES[dtype])
        middle = [info.min, info.min + 1, 0, 1, 2, info.max // 2, info.max - 1, info.max]
        return np.array(middle, DTYPES[dtype])
    tiny, largest = {
        lib.PCCL_FLOAT16: (2.0**-24, 65504.0),
        lib.PCCL_BFLOAT16: (2.0**-133, 3.3895313892515355e38),
        lib.PCCL_FLOAT32: (2.0**-149, float(np.finfo(np.float32).max)),
        lib.PCCL_FLOAT64: (5e-324, float(np.finfo(np.float64).max)),
    }[dtype]
    positive = np.array([0.0, tiny, 3 * tiny, 1e-3, 1.0, 1.0009765625, 3.14159, largest, np.inf, np.nan])
    return from_float64(dtype, np.concatenate([positive, -positive]))


def random_values(dtype: int, count: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = np.frombuffer(random.bytes(count * np.dtype(DTYPES[dtype]).itemsize), DTYPES[dtype]).copy()
    if dtype in FLOATS and count:
        moderate = random.random(count) < 0.7
        values[moderate] = from_float64(dtype, random.normal(size=count))[moderate]
    return values


@dtypes
@ops
def test_reduce_special_values(dtype: int, op: int) -> None:
    values = special_values(dtype)
    a = np.repeat(values, values.size)
    b = np.tile(values, values.size)
    # Which of 0 and -0 is the greater one NumPy leaves to its vector instructions.
    signs_of_zeros = OPS[op] not in (np.maximum, np.minimum)
    assert_same(dtype, reduced(dtype, op, a, b), expected_reduction(dtype, op, a, b), signs_of_zeros)


@dtypes
@ops
def test_reduce_counts(dtype: int, op: int) -> None:
    for count in COUNTS:
        a, b = random_values(dtype, count + 1, count)[1:], random_values(dtype, count, count + 1)
        expected = expected_reduction(dtype, op, a, b)
        assert_same(dtype, reduced(dtype, op, a, b), expected)
        lib.pccl_kernel_reduce(dtype, op, pointer(a), pointer(a), pointer(b), count)
        assert_same(dtype, a, expected)


@settings(deadline=None)
@given(st.data())
def test_reduce_any_bits(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(DTYPES)))
    op = data.draw(st.sampled_from(sorted(OPS)))
    size = np.dtype(DTYPES[dtype]).itemsize
    raw = data.draw(st.binary(max_size=80 * 2 * size))
    count = len(raw) // (2 * size)
    a, b = np.frombuffer(raw, DTYPES[dtype], 2 * count).reshape(2, count).copy()
    signs_of_zeros = OPS[op] not in (np.maximum, np.minimum)
    assert_same(dtype, reduced(dtype, op, a, b), expected_reduction(dtype, op, a, b), signs_of_zeros)


@pytest.mark.parametrize("op", [lib.PCCL_SUM, lib.PCCL_PROD])
def test_arithmetic_nan_is_canonical(op: int) -> None:
    payloads = [
        (lib.PCCL_FLOAT32, np.array([0xFFC12345, 0x7F800001], np.uint32), 0x7FC00000),
        (lib.PCCL_FLOAT64, np.array([0xFFF8000000012345, 0x7FF0000000000001], np.uint64), 0x7FF8000000000000),
        (lib.PCCL_FLOAT16, np.array([0xFE12, 0x7C01], np.uint16), 0x7E00),
        (lib.PCCL_BFLOAT16, np.array([0xFFC1, 0x7F81], np.uint16), 0x7FC0),
    ]
    for dtype, values, canonical in payloads:
        a = np.tile(values, 40)
        assert (reduced(dtype, op, a, a[::-1].copy()) == canonical).all()


@dtypes
@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 16, 100])
def test_average(dtype: int, world_size: int) -> None:
    values = np.concatenate([special_values(dtype), random_values(dtype, 1025, world_size)])
    with np.errstate(all="ignore"):
        if dtype in INTEGERS:
            expected = values // DTYPES[dtype](world_size)
        elif dtype == lib.PCCL_FLOAT64:
            expected = values / np.float64(world_size)
        else:
            wide = to_float64(dtype, values).astype(np.float32) / np.float32(world_size)
            expected = from_float64(dtype, wide)
    lib.pccl_kernel_average(dtype, pointer(values), values.size, world_size)
    assert_same(dtype, values, expected)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), st.integers(1, 2**31 - 1))
def test_average_floors(numbers: list[int], world_size: int) -> None:
    values = np.array(numbers, np.int64)
    lib.pccl_kernel_average(lib.PCCL_INT64, pointer(values), values.size, world_size)
    assert values.tolist() == [number // world_size for number in numbers]


# Quantization

QUANTIZATIONS = [lib.PCCL_QUANT_MIN_MAX, lib.PCCL_QUANT_ZERO_POINT_SCALE]
CODES = {dtype: INTEGERS[dtype] for dtype in (lib.PCCL_UINT8, lib.PCCL_INT8, lib.PCCL_UINT16, lib.PCCL_INT16)}
quantizations = pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=["min_max", "zero_point_scale"])
codes = pytest.mark.parametrize("code", CODES, ids=NAMES.get)


def make_shape(dtype: int, quantization: int, code: int, block: int):
    return ffi.new(
        "pccl_op_shape *",
        {
            "dtype": dtype,
            "quantization": quantization,
            "quantized_dtype": code,
            "quantization_block": block,
        },
    )


def quantized(shape, values: np.ndarray) -> np.ndarray:
    wire = np.empty(lib.pccl_quantized_bytes(shape, values.size), np.uint8)
    lib.pccl_kernel_quantize(shape, pointer(values), values.size, pointer(wire))
    return wire


def dequantized(shape, wire: np.ndarray, count: int) -> np.ndarray:
    values = np.empty(count, FLOATS[shape.dtype])
    lib.pccl_kernel_dequantize(shape, pointer(wire), count, pointer(values))
    return values


def round_trip(shape, values: np.ndarray) -> np.ndarray:
    return dequantized(shape, quantized(shape, values), values.size)


def error_bound(shape, values: np.ndarray) -> np.ndarray:
    """Per element, from what quant_format.h promises."""
    numbers = to_float64(shape.dtype, values)
    steps = 2.0 ** (8 * np.dtype(CODES[shape.quantized_dtype]).itemsize) - 1
    rounding, smallest = {
        lib.PCCL_FLOAT16: (2.0**-11, 2.0**-25),
        lib.PCCL_BFLOAT16: (2.0**-8, 2.0**-134),
    }.get(shape.dtype, (2.0**-23, 2.0**-149))
    bounds = np.empty(values.size)
    for start in range(0, values.size, shape.quantization_block):
        block = slice(start, start + shape.quantization_block)
        low, high = numbers[block].min(), numbers[block].max()
        if shape.quantization == lib.PCCL_QUANT_ZERO_POINT_SCALE:
            low, high = min(low, 0.0), max(high, 0.0)
        step = (high - low) / steps * (1 + 2.0**-22) + 2.0**-149
        bounds[block] = step * (0.501 if steps < 256 else 0.52) + rounding * max(-low, high) * 1.01 + smallest
    return bounds


def reference_block(quantization: int, code: int, values: np.ndarray) -> bytes:
    """One block of moderate float32 values by the formulas of quant_format.h, step by step."""
    info = np.iinfo(CODES[code])
    steps_max = info.max - info.min
    low, high = float(values.min()), float(values.max())
    base = np.float32(low)
    if quantization == lib.PCCL_QUANT_ZERO_POINT_SCALE:
        low, high, base = min(low, 0.0), max(high, 0.0), np.float32(0)
    exact = (high - low) / steps_max
    scale = np.float32(exact)
    if float(scale) < exact:
        scale = np.nextafter(scale, np.float32(np.inf))
    inverse = np.float32(1.0 / float(scale))
    zero = 0
    if quantization == lib.PCCL_QUANT_ZERO_POINT_SCALE:
        zero = int(np.rint(np.float32(-low) * inverse))
    steps = np.rint(np.minimum((values - base) * inverse, np.float32(steps_max - zero))).astype(np.int64) + zero
    second = base.tobytes()
    if quantization == lib.PCCL_QUANT_ZERO_POINT_SCALE:
        second = np.int32(zero + info.min).tobytes()
    return scale.tobytes() + second + (steps + info.min).astype(CODES[code]).tobytes()


@quantizations
@codes
@pytest.mark.parametrize("block", [3, 16, 100, 256, 1024, 2000])
def test_wire_follows_the_documented_formulas(quantization: int, code: int, block: int) -> None:
    random = np.random.default_rng(block)
    values = random.normal(loc=random.normal(), size=2502).astype(np.float32)
    shape = make_shape(lib.PCCL_FLOAT32, quantization, code, block)
    starts = range(0, values.size, block)
    expected = b"".join(reference_block(quantization, code, values[at : at + block]) for at in starts)
    assert quantized(shape, values).tobytes() == expected


@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
@quantizations
@codes
def test_quantization_error_counts(dtype: int, quantization: int, code: int) -> None:
    shape = make_shape(dtype, quantization, code, 64)
    for count in (0, 1, 2, 7, 63, 64, 65, 1025):
        values = from_float64(dtype, np.random.default_rng(count).normal(size=count))
        difference = np.abs(to_float64(dtype, round_trip(shape, values)) - to_float64(dtype, values))
        assert (difference <= error_bound(shape, values)).all()


@settings(deadline=None)
@given(st.data())
def test_quantization_error_any_finite_values(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(FLOATS)))
    shape = make_shape(
        dtype,
        data.draw(st.sampled_from(QUANTIZATIONS)),
        data.draw(st.sampled_from(sorted(CODES))),
        data.draw(st.integers(1, 12)),
    )
    width = {lib.PCCL_FLOAT16: 16}.get(dtype, 32)
    limit = 3.3895313892515355e38 if dtype == lib.PCCL_BFLOAT16 else None
    number = st.floats(-limit if limit else None, limit, width=width, allow_nan=False, allow_infinity=False)
    values = from_float64(dtype, np.array(data.draw(st.lists(number, max_size=60)), np.float64))
    got = to_float64(dtype, round_trip(shape, values))
    assert np.isfinite(got).all()
    assert (np.abs(got - to_float64(dtype, values)) <= error_bound(shape, values)).all()


@quantizations
@codes
def test_blocks_with_nan_or_infinity_arrive_as_nan(quantization: int, code: int) -> None:
    shape = make_shape(lib.PCCL_FLOAT32, quantization, code, 10)
    for poison in (np.nan, -np.nan, np.inf, -np.inf):
        values = np.arange(30, dtype=np.float32)
        values[14] = poison
        got = round_trip(shape, values)
        assert np.isnan(got[10:20]).all()
        assert np.isfinite(got[:10]).all()
        assert np.isfinite(got[20:]).all()


@quantizations
@codes
@pytest.mark.parametrize("constant", [0.0, -0.0, 1.5, -0.1, 1e-44, -3.4e38])
def test_constant_blocks_are_exact(quantization: int, code: int, constant: float) -> None:
    values = np.full(100, constant, np.float32)
    np.testing.assert_array_equal(round_trip(make_shape(lib.PCCL_FLOAT32, quantization, code, 32), values), values)


@quantizations
def test_normal_distribution_keeps_its_energy(quantization: int) -> None:
    values = np.random.default_rng(0).normal(size=1 << 16).astype(np.float32)
    shape = make_shape(lib.PCCL_FLOAT32, quantization, lib.PCCL_UINT8, 256)
    error = round_trip(shape, values) - values
    assert 3e-5 < float((error**2).mean() / (values**2).mean()) < 5e-5
    assert abs(float(error.mean())) < 1e-4


def test_quantized_bytes() -> None:
    shape = make_shape(lib.PCCL_FLOAT32, lib.PCCL_QUANT_MIN_MAX, lib.PCCL_UINT16, 100)
    assert [lib.pccl_quantized_bytes(shape, count) for count in (0, 1, 100, 101)] == [0, 10, 208, 218]
    shape.quantization = lib.PCCL_QUANT_NONE
    assert lib.pccl_quantized_bytes(shape, 101) == 404
