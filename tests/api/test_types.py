"""The vocabulary: dtypes to and from NumPy and torch, the engine's numbers, options that check themselves."""

from __future__ import annotations

import numpy as np
import pytest

from pccl import DataType, QuantizationAlgorithm, ReduceOp, Result
from pccl._native import lib

HAS_NUMPY_TYPE = [dtype for dtype in DataType if dtype is not DataType.BFLOAT16]


@pytest.mark.parametrize("dtype", HAS_NUMPY_TYPE)
def test_numpy_dtypes_round_trip(dtype: DataType) -> None:
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
def test_other_numpy_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match="cannot be reduced; use one of uint8, int8, "):
        DataType.from_numpy_dtype(np.dtype(dtype))


def test_byte_swapped_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="byte-swapped"):
        DataType.from_numpy_dtype(np.dtype(np.float32).newbyteorder())


def test_numbers_equal_the_engine() -> None:
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


def test_success_is_the_only_false_result() -> None:
    assert [result for result in Result if not result] == [Result.SUCCESS]
