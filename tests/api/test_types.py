"""The vocabulary: dtypes to and from NumPy and torch, the engine's numbers, options that check themselves."""

from __future__ import annotations

import numpy as np
import pytest

from pccl import DataType, QuantizationAlgorithm, QuantizationOptions, ReduceDescriptor, ReduceInfo, ReduceOp, Result
from pccl._native import lib

HAS_NUMPY_TYPE = [dtype for dtype in DataType if dtype is not DataType.BFLOAT16]


@pytest.mark.parametrize("dtype", HAS_NUMPY_TYPE)
def test_numpy_dtypes_go_there_and_back(dtype: DataType) -> None:
    assert DataType.from_numpy_dtype(dtype.to_numpy_dtype()) is dtype
    assert DataType.from_numpy_dtype(dtype.to_numpy_dtype().type) is dtype
    assert dtype.itemsize == dtype.to_numpy_dtype().itemsize
    assert dtype.is_float == (dtype.to_numpy_dtype().kind == "f")


def test_bfloat16_needs_ml_dtypes_in_numpy() -> None:
    try:
        import ml_dtypes
    except ImportError:
        with pytest.raises(TypeError, match="ml_dtypes"):
            DataType.BFLOAT16.to_numpy_dtype()
    else:
        assert DataType.BFLOAT16.to_numpy_dtype() == np.dtype(ml_dtypes.bfloat16)
        assert DataType.from_numpy_dtype(ml_dtypes.bfloat16) is DataType.BFLOAT16
    assert (DataType.BFLOAT16.itemsize, DataType.BFLOAT16.is_float) == (2, True)


@pytest.mark.parametrize("dtype", ["bool", "complex64", "datetime64[s]", "U3", "O", "V8"])
def test_other_numpy_dtypes_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(ValueError, match="cannot be reduced; use one of uint8, int8, "):
        DataType.from_numpy_dtype(np.dtype(dtype))


def test_byte_swapped_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="byte-swapped"):
        DataType.from_numpy_dtype(np.dtype(np.float32).newbyteorder())


def test_numbers_are_those_of_the_engine() -> None:
    names = {DataType.FLOAT: "FLOAT32", DataType.DOUBLE: "FLOAT64"}
    assert {dtype: getattr(lib, f"PCCL_{names.get(dtype, dtype.name)}") for dtype in DataType} == {
        dtype: int(dtype) for dtype in DataType
    }
    assert len(DataType) == lib.PCCL_DTYPE_COUNT
    assert [getattr(lib, f"PCCL_{op.name}") for op in ReduceOp] == list(ReduceOp)
    assert len(ReduceOp) == lib.PCCL_REDUCE_OP_COUNT
    assert [getattr(lib, f"PCCL_QUANT_{kind.name}") for kind in QuantizationAlgorithm] == list(QuantizationAlgorithm)
    assert len(QuantizationAlgorithm) == lib.PCCL_QUANT_COUNT
    assert [lib.pccl_dtype_bytes(dtype) for dtype in DataType] == [dtype.itemsize for dtype in DataType]


@pytest.mark.parametrize("dtype", [DataType.UINT32, DataType.FLOAT, DataType.FLOAT16, DataType.INT64])
def test_values_are_quantized_to_small_integers_only(dtype: DataType) -> None:
    with pytest.raises(ValueError, match="must be one of UINT8, INT8, UINT16, INT16"):
        QuantizationOptions(dtype)
    QuantizationOptions(dtype, QuantizationAlgorithm.NONE)


@pytest.mark.parametrize("block_size", [-1, 7, 65537])
def test_block_sizes_are_bounded(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size {block_size}"):
        QuantizationOptions(block_size=block_size)


def test_a_reduce_descriptor_does_not_quantize_unless_told_to() -> None:
    assert ReduceDescriptor(3, ReduceOp.SUM).quantization_options.algorithm is QuantizationAlgorithm.NONE


def test_world_size_is_the_same_as_local_world_size() -> None:
    assert ReduceInfo(3, 0, 0).world_size == 3


def test_success_is_the_only_false_result() -> None:
    assert [result for result in Result if not result] == [Result.SUCCESS]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in ("block_size", "bits", "seed") for value in (64.0, "64", None, True, [64])),
        *(("algorithm", value) for value in (None, "MIN_MAX", 1)),
        *(("quantized_datatype", value) for value in (None, "UINT8", 0, True, ReduceOp.SUM)),
    ],
)
def test_quantization_of_other_kinds_is_refused_when_it_is_made(name: str, value: object) -> None:
    """The engine could make nothing of it, in a thread that others share."""
    with pytest.raises(ValueError, match=name):
        QuantizationOptions(**{name: value})  # type: ignore[arg-type]


def test_quantization_takes_numpy_numbers() -> None:
    options = QuantizationOptions(block_size=np.int64(64), seed=np.uint64(3), stochastic=np.bool_(True))  # type: ignore[arg-type]
    assert options == QuantizationOptions(block_size=64, seed=3, stochastic=True)
    assert [type(each) for each in (options.block_size, options.seed, options.stochastic)] == [int, int, bool]
