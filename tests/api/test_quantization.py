"""The promises of `QuantizationOptions`: which options exist, the bytes they make, and the error of sums. The kernels
are those of the engine; the sums over peers are simulated with them."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl import DataType, PCCLError, QuantizationAlgorithm, QuantizationOptions, ReduceOp, Result
from pccl._native import ffi, lib
from pccl.runtime.data_plane.op_request import SHORT_CODES, code_type
from tests.support.cluster import Cluster, run_of

MIN_MAX = QuantizationAlgorithm.MIN_MAX
ZERO_POINT_SCALE = QuantizationAlgorithm.ZERO_POINT_SCALE
CAST = QuantizationAlgorithm.CAST
LLOYD_MAX = QuantizationAlgorithm.LLOYD_MAX
SIGN = QuantizationAlgorithm.SIGN

EIGHT_BITS = QuantizationOptions()
FOUR_BITS = QuantizationOptions(bits=4)
CODES = [
    QuantizationOptions(datatype, algorithm, bits=bits)
    for algorithm in (MIN_MAX, ZERO_POINT_SCALE)
    for datatype, bits in [
        (DataType.UINT8, 4),
        (DataType.INT8, 4),
        (DataType.UINT8, 8),
        (DataType.INT8, 8),
        (DataType.UINT16, 16),
        (DataType.INT16, 16),
    ]
]
LEVELS = [QuantizationOptions(algorithm=LLOYD_MAX), QuantizationOptions(algorithm=SIGN)]
CASTS = [QuantizationOptions(datatype, CAST) for datatype in (DataType.FLOAT16, DataType.BFLOAT16)]


def name_of(options: QuantizationOptions) -> str:
    return f"{options.algorithm.name}-{options.quantized_datatype.name}-{options.bits}"


def shape_of(options: QuantizationOptions, dtype: DataType = DataType.FLOAT):
    return ffi.new(
        "pccl_op_shape *",
        {
            "dtype": dtype,
            "reduce_op": lib.PCCL_SUM,
            "quantization": options.algorithm,
            "quantized_dtype": code_type(options),
            "quantization_block": options.block_size,
        },
    )


def pointer(array: np.ndarray):
    return ffi.cast("void *", array.ctypes.data)


def encode(options: QuantizationOptions, values: np.ndarray, stream: int = 0, first: int = 0) -> np.ndarray:
    shape = shape_of(options)
    wire = np.empty(lib.pccl_quantized_bytes(shape, values.size), np.uint8)
    if options.stochastic:
        lib.pccl_kernel_quantize_stochastic(shape, stream, first, pointer(values), values.size, pointer(wire))
    else:
        lib.pccl_kernel_quantize(shape, pointer(values), values.size, pointer(wire))
    return wire


def decode(options: QuantizationOptions, wire: np.ndarray, count: int) -> np.ndarray:
    values = np.empty(count, np.float32)
    lib.pccl_kernel_dequantize(shape_of(options), pointer(wire), count, pointer(values))
    return values


def there_and_back(options: QuantizationOptions, values: np.ndarray, stream: int = 0) -> np.ndarray:
    return decode(options, encode(options, values, stream), values.size)


def direct_sum(options: QuantizationOptions, parts: list[np.ndarray]) -> np.ndarray:
    """Return what the owner of a chunk sends to all: parts of others came quantized, the sum is quantized once more."""
    own, *others = parts
    total = own.copy()
    for rank, part in enumerate(others, 1):
        total += there_and_back(options, part, stream=1000 * rank)
    return there_and_back(options, total, stream=1)


def ring_sum(options: QuantizationOptions, parts: list[np.ndarray]) -> np.ndarray:
    """Every peer adds its part to what came, and quantizes that."""
    total = parts[0]
    for part in parts[1:]:
        total = there_and_back(options, total) + part
    return there_and_back(options, total)


def relative_error(got: np.ndarray, parts: list[np.ndarray]) -> float:
    """The normalized mean square error."""
    exact = np.sum([part.astype(np.float64) for part in parts], axis=0)
    return float(((got - exact) ** 2).mean() / (exact**2).mean())


def normal_parts(peers: int, count: int = 1 << 17) -> list[np.ndarray]:
    random = np.random.default_rng(peers)
    return [random.normal(size=count).astype(np.float32) for _ in range(peers)]


# Options


def test_defaults() -> None:
    assert QuantizationOptions() == QuantizationOptions(DataType.UINT8, MIN_MAX, 256, 8)
    assert QuantizationOptions(DataType.INT16).block_size == 256
    assert QuantizationOptions(DataType.INT8, ZERO_POINT_SCALE, bits=4).block_size == 64
    assert QuantizationOptions(DataType.BFLOAT16, CAST).bits == 16
    assert QuantizationOptions(DataType.BFLOAT16, CAST).block_size == 0
    assert not QuantizationOptions().stochastic


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quantized_datatype": DataType.FLOAT16}, "must be one of UINT8, INT8, UINT16, INT16 for MIN_MAX"),
        ({"quantized_datatype": DataType.UINT32}, "must be one of"),
        ({"algorithm": CAST}, "must be one of FLOAT16, BFLOAT16 for CAST"),
        ({"algorithm": CAST, "quantized_datatype": DataType.FLOAT}, "must be one of FLOAT16, BFLOAT16"),
        ({"algorithm": CAST, "quantized_datatype": DataType.FLOAT16, "block_size": 64}, "CAST has no blocks"),
        ({"algorithm": CAST, "quantized_datatype": DataType.FLOAT16, "bits": 4}, "must be 16 for FLOAT16"),
        ({"bits": 16}, "must be 8 or 4 for UINT8"),
        ({"bits": 5}, "must be 8 or 4"),
        ({"quantized_datatype": DataType.INT16, "bits": 4}, "must be 16 for INT16"),
        ({"block_size": 7}, "from 8 to 65536"),
        ({"block_size": -1}, "from 8 to 65536"),
        ({"block_size": 65537}, "from 8 to 65536"),
        ({"bits": 4, "block_size": 33}, "must be even"),
        ({"algorithm": LLOYD_MAX, "bits": 4}, "LLOYD_MAX has codes of 2 bits"),
        ({"algorithm": SIGN, "stochastic": True}, "SIGN has codes of 1 bits that are rounded to nearest"),
        ({"algorithm": SIGN, "quantized_datatype": DataType.INT8}, "must be one of UINT8 for SIGN"),
        ({"algorithm": SIGN, "block_size": 12}, "must be a multiple of 8 up to 1024, not 12, for SIGN"),
        ({"algorithm": LLOYD_MAX, "block_size": 1032}, "must be a multiple of 8 up to 1024"),
        ({"seed": -1}, "seed must be .*, not -1"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_wrong_options(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizationOptions(**arguments)


@pytest.mark.parametrize("algorithm", [MIN_MAX, ZERO_POINT_SCALE, CAST, LLOYD_MAX, SIGN])
def test_options_and_engine_agree_on_what_exists(algorithm: QuantizationAlgorithm) -> None:
    for datatype, bits, block_size in itertools.product(DataType, (1, 2, 4, 8, 16, 32), (0, 8, 9, 4096)):
        wanted = block_size or {1: 64, 2: 64, 4: 64}.get(bits, 256) * (algorithm is not CAST)
        for dtype in DataType:
            try:
                options = QuantizationOptions(datatype, algorithm, block_size, bits)
                options.check_tensor(dtype)
                shape = shape_of(options, dtype)
                exists = True
                assert options.block_size == wanted
            except ValueError:
                exists = False
                code = SHORT_CODES.get((bits, datatype))
                if code is None and bits != 8 * datatype.itemsize:
                    continue
                shape = ffi.new(
                    "pccl_op_shape *",
                    {
                        "dtype": dtype,
                        "quantization": algorithm,
                        "quantized_dtype": datatype if code is None else code,
                        "quantization_block": wanted,
                    },
                )
            assert (lib.pccl_quantized_bytes(shape, 100) > 0) == exists, (datatype, bits, block_size, dtype)


def test_tensors_that_cannot_be_quantized() -> None:
    with pytest.raises(ValueError, match="only float tensors can be quantized, not INT32"):
        EIGHT_BITS.check_tensor(DataType.INT32)
    for dtype in (DataType.FLOAT16, DataType.BFLOAT16):
        with pytest.raises(ValueError, match=f"a CAST of {dtype.name} to BFLOAT16 does not make it smaller"):
            QuantizationOptions(DataType.BFLOAT16, CAST).check_tensor(dtype)
        EIGHT_BITS.check_tensor(dtype)
    QuantizationOptions(algorithm=QuantizationAlgorithm.NONE).check_tensor(DataType.INT32)


# Format: these bytes are the protocol.


def test_golden_bytes() -> None:
    values = np.array([-4, 11, 0, 0.5, 1.5, 7, np.inf, 1, 2], np.float32)
    four = shape_of(FOUR_BITS)
    four.quantization_block = 6
    wire = np.empty(lib.pccl_quantized_bytes(four, 9), np.uint8)
    lib.pccl_kernel_quantize(four, pointer(values), 9, pointer(wire))
    # bfloat16 scale and minimum, six codes in three bytes; then a block with an infinity, which is marked
    assert wire.tobytes().hex(" ") == "80 3f 80 c0 f0 44 b6 c0 7f 00 00 00 00"
    eight = QuantizationOptions(DataType.INT8, ZERO_POINT_SCALE, block_size=8)
    values = np.array([-64, 0, 0.5, 1.5, 191, -1, -1, 7], np.float32)
    assert encode(eight, values).tobytes().hex(" ") == "00 00 80 3f c0 ff ff ff 80 c0 c0 c2 7f bf bf c7"
    half = QuantizationOptions(DataType.BFLOAT16, CAST)
    values = np.array([1, -2, np.nan, np.inf, 3.4e38, 1.00390625], np.float32)
    assert encode(half, values).tobytes().hex(" ") == "80 3f 00 c0 c0 7f 80 7f 80 7f 80 3f"


def bfloat16_up(value: float) -> float:
    """Return the least bfloat16 that is not less."""
    bits = int(np.float32(value).view(np.uint32))
    if value > 0:
        bits += 0xFFFF
    return float(np.uint32(bits & 0xFFFF0000).view(np.float32))


def four_bit_block(options: QuantizationOptions, values: np.ndarray) -> bytes:
    """One block of moderate values by the formulas of quant_format.h."""
    low, high, base, zero = float(values.min()), float(values.max()), np.float32(0), 0
    if options.algorithm is MIN_MAX:
        base = np.float32(-bfloat16_up(-low))
        low = float(base)
    else:
        low, high = min(low, 0.0), max(high, 0.0)
    exact = (high - low) / 15
    scale = np.float32(exact)
    if float(scale) < exact:
        scale = np.nextafter(scale, np.float32(np.inf))
    scale = np.float32(bfloat16_up(float(scale)))
    inverse = np.float32(1 / float(scale))
    if options.algorithm is ZERO_POINT_SCALE:
        zero = int(np.rint(np.float32(-low) * inverse))
    steps = np.rint(np.minimum((values - base) * inverse, np.float32(15 - zero))).astype(int) + zero
    first = -8 if options.quantized_datatype is DataType.INT8 else 0
    codes = np.pad((steps + first) & 15, (0, len(steps) % 2))
    second = base.tobytes()[2:] if options.algorithm is MIN_MAX else struct.pack("<h", zero + first)
    return scale.tobytes()[2:] + second + (codes[::2] | codes[1::2] << 4).astype(np.uint8).tobytes()


@pytest.mark.parametrize("options", [o for o in CODES if o.bits == 4], ids=name_of)
@pytest.mark.parametrize("offset", [-3.0, 0.0, 0.1, 50.0])
def test_four_bit_codes_follow_the_documentation(options: QuantizationOptions, offset: float) -> None:
    values = np.random.default_rng(1).normal(offset, size=64 * 9 + 7).astype(np.float32)
    blocks = [four_bit_block(options, values[at : at + 64]) for at in range(0, values.size, 64)]
    assert encode(options, values).tobytes() == b"".join(blocks)


def dither_unit(stream: int, indices: np.ndarray) -> np.ndarray:
    """dither.h, in NumPy."""
    x = (indices + (stream & 0xFFFFFFFF)).astype(np.uint64) & np.uint64(0xFFFFFFFF)
    x = (x ^ x >> np.uint64(16)) * np.uint64(0x7FEB352D) & np.uint64(0xFFFFFFFF)
    x ^= np.uint64(stream >> 32)
    x = (x ^ x >> np.uint64(15)) * np.uint64(0x846CA68B) & np.uint64(0xFFFFFFFF)
    x ^= x >> np.uint64(16)
    return (x >> np.uint64(8)).astype(np.float32) * np.float32(2**-24) - np.float32(0.5)


def test_stochastic_codes_follow_the_documentation() -> None:
    values = np.random.default_rng(2).normal(size=256).astype(np.float32)
    stream, first = 0xFEDCBA9876543210, 2**32 - 100
    options = QuantizationOptions(stochastic=True)
    wire = encode(options, values, stream, first).tobytes()
    scale, base = (np.float32(x) for x in struct.unpack("<ff", wire[:8]))
    steps = (values - base) * np.float32(1 / float(scale))
    steps += dither_unit(stream, np.arange(first, first + 256, dtype=np.uint64))
    assert wire[8:] == np.rint(np.clip(steps, np.float32(0), np.float32(255))).astype(np.uint8).tobytes()


# Error of one quantization


def documented_bound(options: QuantizationOptions, values: np.ndarray) -> np.ndarray:
    """Return the bound of each element's error, as the docstring of `QuantizationOptions` tells it."""
    numbers = np.abs(values.astype(np.float64))
    if options.algorithm is CAST:
        precision, least = {DataType.FLOAT16: (2.0**-11, 2.0**-25)}.get(
            options.quantized_datatype, (2.0**-8, 2.0**-134)
        )
        return np.maximum(numbers * precision, least) * (2 if options.stochastic else 1)
    bound = np.empty(values.size)
    part = {4: 1 / 30, 8: 1.002 / 510, 16: 1 / 126000}[options.bits] * (2 if options.stochastic else 1)
    if options.stochastic and options.algorithm is ZERO_POINT_SCALE:
        part *= 15 / 14 if options.bits == 4 else 255 / 254
    for start in range(0, values.size, options.block_size):
        block = slice(start, start + options.block_size)
        low, high = float(values[block].min()), float(values[block].max())
        if options.algorithm is ZERO_POINT_SCALE:
            low, high = min(low, 0.0), max(high, 0.0)
        extent = high - low
        if options.bits == 4:
            extent = (extent + abs(low) / 128 * (options.algorithm is MIN_MAX)) * (1 + 1 / 128)
        bound[block] = extent * part + max(-low, high) * 2.0**-23 + (2.0**-149 if options.bits > 4 else 2.0**-132)
    return bound


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_error_of_any_finite_values(data: st.DataObject) -> None:
    options = data.draw(st.sampled_from(CODES + CASTS))
    stochastic = data.draw(st.booleans())
    block_size = 0 if options.algorithm is CAST else data.draw(st.sampled_from([8, 10, 16]))
    options = QuantizationOptions(
        options.quantized_datatype, options.algorithm, block_size, options.bits, stochastic=stochastic
    )
    limit = 65504.0 if options.quantized_datatype is DataType.FLOAT16 else float(np.float32(3.38e38))
    numbers = st.floats(-limit, limit, width=32)
    values = np.array(data.draw(st.lists(numbers, max_size=60)), np.float32)
    got = there_and_back(options, values, stream=data.draw(st.integers(0, 2**64 - 1)))
    assert np.isfinite(got).all()
    assert (np.abs(got.astype(np.float64) - values) <= documented_bound(options, values)).all()


@pytest.mark.parametrize("options", CODES + LEVELS, ids=name_of)
def test_nan_and_infinity_stay_in_their_block(options: QuantizationOptions) -> None:
    for poison in (np.nan, np.inf, -np.inf):
        values = np.ones(options.block_size * 3, np.float32)
        values[options.block_size + 5] = poison
        got = there_and_back(options, values).reshape(3, -1)
        assert np.isnan(got[1]).all()
        assert np.isfinite(got[::2]).all()


@pytest.mark.parametrize("options", CASTS, ids=name_of)
@pytest.mark.parametrize("stochastic", [False, True])
def test_cast_keeps_nan_and_infinity(options: QuantizationOptions, stochastic: bool) -> None:
    options = QuantizationOptions(options.quantized_datatype, CAST, stochastic=stochastic)
    values = np.array([np.nan, np.inf, -np.inf, 1, 0, -0.0], np.float32)
    got = there_and_back(options, values)
    np.testing.assert_array_equal(got, values)
    assert np.signbit(got[5])
    # Loud instead of plausible: no value that fits is made of one that does not.
    beyond = np.array([1e5, -1e5] if options.quantized_datatype is DataType.FLOAT16 else [3.4e38, -3.4e38], np.float32)
    np.testing.assert_array_equal(there_and_back(options, beyond), [np.inf, -np.inf])


def test_bytes_on_the_wire() -> None:
    """They are as the docstring's table says, for a million elements."""
    bits = {
        name_of(options): 8 * lib.pccl_quantized_bytes(shape_of(options), 1 << 20) / 2**20 for options in CODES + CASTS
    }
    assert {value for name, value in bits.items() if name.endswith("-4")} == {4.5}
    assert {value for name, value in bits.items() if name.endswith("-8")} == {8.25}
    assert {value for name, value in bits.items() if name.endswith("-16") and "CAST" not in name} == {16.25}
    assert {value for name, value in bits.items() if "CAST" in name} == {16}


# Codes of 2 bits and 1 bit


def leveled(options: QuantizationOptions, values: np.ndarray) -> np.ndarray:
    """Return decoded values by the formulas of quant_format.h."""
    blocks = values.reshape(-1, options.block_size).astype(np.float64)
    magnitudes = np.abs(blocks)
    if options.algorithm is SIGN:
        scales = magnitudes.mean(axis=1, keepdims=True)
    else:
        scales = np.sqrt((blocks**2).mean(axis=1, keepdims=True))
    scales = 2 ** (np.round(4 * np.log2(scales)) / 4)
    levels = scales if options.algorithm is SIGN else np.where(magnitudes >= 0.9816 * scales, 1.510, 0.4528) * scales
    return np.copysign(levels, blocks).ravel()


@pytest.mark.parametrize("options", LEVELS, ids=name_of)
def test_levels_follow_the_documentation(options: QuantizationOptions) -> None:
    values = np.random.default_rng(4).normal(size=64 * 500).astype(np.float32) * 1e-3
    np.testing.assert_allclose(there_and_back(options, values), leveled(options, values), rtol=1e-6)
    bits = 8 * encode(options, values).size / values.size
    assert bits == {2: 2.125, 1: 1.125}[options.bits]


@pytest.mark.parametrize(("options", "error"), [(LEVELS[0], 0.118), (LEVELS[1], 0.365)], ids=["LLOYD_MAX", "SIGN"])
def test_error_of_levels(options: QuantizationOptions, error: float) -> None:
    part = normal_parts(1)[0]
    assert relative_error(there_and_back(options, part), [part]) < error


@pytest.mark.parametrize("options", LEVELS, ids=name_of)
def test_levels_are_equal_on_all_peers(cluster: Cluster, options: QuantizationOptions) -> None:
    tensors = normal_parts(3, 50_003)
    expected = np.sum(tensors, axis=0, dtype=np.float64)
    cluster.each(lambda peer, i: peer.all_reduce(tensors[i], op=ReduceOp.SUM, quantization=options))
    assert all(tensor.tobytes() == tensors[0].tobytes() for tensor in tensors)
    assert np.corrcoef(tensors[0], expected)[0, 1] > 0.7
    with pytest.raises(PCCLError, match="encodes FLOAT tensors, not DOUBLE"):
        cluster[0].all_reduce(np.ones(64), op=ReduceOp.SUM, quantization=options)


# Error of sums


@pytest.mark.parametrize("peers", [2, 4, 8])
@pytest.mark.parametrize("algorithm", [MIN_MAX, ZERO_POINT_SCALE])
def test_direct_sum_of_normal_values(algorithm: QuantizationAlgorithm, peers: int) -> None:
    parts = normal_parts(peers)
    eight = relative_error(direct_sum(QuantizationOptions(algorithm=algorithm), parts), parts)
    four = relative_error(direct_sum(QuantizationOptions(algorithm=algorithm, bits=4), parts), parts)
    assert eight < 8e-5
    assert four < 1.6e-2


@pytest.mark.parametrize("options", [*CODES, *CASTS], ids=name_of)
def test_direct_sum_error_is_independent_of_world(options: QuantizationOptions) -> None:
    once = relative_error(there_and_back(options, normal_parts(1)[0]), normal_parts(1))
    for peers in (2, 8, 32):
        parts = normal_parts(peers, 1 << 14)
        assert relative_error(direct_sum(options, parts), parts) < 2.1 * once


@pytest.mark.parametrize("peers", [2, 4, 8])
@pytest.mark.parametrize("options", [EIGHT_BITS, FOUR_BITS], ids=name_of)
def test_ring_sum_error_grows_with_world(options: QuantizationOptions, peers: int) -> None:
    once = relative_error(there_and_back(options, normal_parts(1)[0]), normal_parts(1))
    parts = normal_parts(peers)
    assert relative_error(ring_sum(options, parts), parts) == pytest.approx((peers + 1) / 2 * once, rel=0.1)


# Stochastic rounding


@pytest.mark.parametrize("options", CODES + CASTS, ids=name_of)
def test_stochastic_rounding_is_unbiased(options: QuantizationOptions) -> None:
    options = QuantizationOptions(
        options.quantized_datatype, options.algorithm, bits=options.bits, stochastic=True, seed=3
    )
    values = np.random.default_rng(7).normal(0.2, size=options.block_size or 512).astype(np.float32)
    rounds = 2000
    streams = np.random.default_rng(8).integers(0, 2**63, size=rounds)
    errors = np.array([there_and_back(options, values, int(stream)) - values.astype(np.float64) for stream in streams])
    mean, deviation = errors.mean(axis=0), errors.std(axis=0)
    # Next to a code the other one is rare, and perhaps never seen. 16-bit steps leave 8 bits to what is random.
    slack = documented_bound(options, values) * 10 / rounds + 1e-6
    assert (np.abs(mean) <= 5 * deviation / rounds**0.5 + slack).all()
    nearest = QuantizationOptions(options.quantized_datatype, options.algorithm, bits=options.bits)
    nearest_square = ((there_and_back(nearest, values) - values.astype(np.float64)) ** 2).mean()
    assert 1.5 * nearest_square < (errors**2).mean() < 2.7 * nearest_square


# Between peers


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with run_of(3, segment_bytes=4000) as three:
        yield three


@pytest.mark.parametrize("options", [*CODES, *CASTS], ids=name_of)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_all_peers_have_the_same_bits(cluster: Cluster, options: QuantizationOptions, dtype: type[np.floating]) -> None:
    """Seeds, and whether one rounds stochastically at all, are everyone's own affair."""
    inputs = [np.random.default_rng(i).normal(size=5003).astype(dtype) for i in range(3)]
    tensors = [x.copy() for x in inputs]
    own = [
        QuantizationOptions(
            options.quantized_datatype, options.algorithm, bits=options.bits, stochastic=i > 0, seed=i * 2**62
        )
        for i in range(3)
    ]
    cluster.each(lambda peer, i: peer.all_reduce(tensors[i], op=ReduceOp.SUM, quantization_options=own[i]))
    assert all(tensor.tobytes() == tensors[0].tobytes() for tensor in tensors)
    parts = [x.astype(np.float32) for x in inputs]
    assert relative_error(tensors[0], parts) < {4: 6e-2, 8: 3e-4, 16: 4e-5}[options.bits]


def test_unquantizable_dtypes_are_refused(cluster: Cluster) -> None:
    cast = QuantizationOptions(DataType.FLOAT16, CAST)
    for tensor, reason in [
        (np.zeros(9, np.float16), "does not make it smaller"),
        (np.zeros(9, np.int32), "only float tensors"),
    ]:
        with pytest.raises(PCCLError, match=reason) as caught:
            cluster[0].all_reduce(tensor, op=ReduceOp.SUM, quantization_options=cast)
        assert caught.value.result is Result.INVALID_ARGUMENT


def test_mismatched_quantization_is_named(cluster: Cluster) -> None:
    options = [EIGHT_BITS, FOUR_BITS, FOUR_BITS]
    tensors = [np.ones(999, np.float32) for _ in range(3)]
    outcomes = cluster.outcomes(
        lambda peer, i: peer.all_reduce(tensors[i], op=ReduceOp.SUM, quantization_options=options[i])
    )
    assert {outcome.result for outcome in outcomes} == {Result.INVALID_ARGUMENT}
    assert any("MIN_MAX to 4-bit UINT8 in blocks of 64" in str(outcome) for outcome in outcomes)
    assert any("MIN_MAX to UINT8 in blocks of 256" in str(outcome) for outcome in outcomes)
    assert all((tensor == 1).all() for tensor in tensors)
