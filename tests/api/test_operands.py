"""Arrays as memory: what they are taken for, and why some are not taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl import DataType, PCCLError, Result
from pccl._arrays import Operand, resolve


def resolved(array: Any) -> Operand:
    return resolve(array, "send", "all_reduce")


@given(st.lists(st.integers(0, 4), max_size=4), st.sampled_from([np.uint8, np.int16, np.float32, np.float64]))
def test_an_array_is_its_memory(shape: list[int], dtype: npt.DTypeLike) -> None:
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    operand = resolved(array)
    assert operand.address == array.ctypes.data
    assert (operand.count, operand.shape, operand.size_bytes) == (array.size, array.shape, array.nbytes)
    assert operand.dtype is DataType.from_numpy_dtype(dtype)
    assert operand.memory() == array.tobytes()
    assert operand.owner is array


def test_writes_to_the_memory_are_writes_to_the_array() -> None:
    array = np.zeros(4, np.uint16)
    resolved(array).memory()[2:4] = b"\x01\x02"
    assert array.tolist() == [0, 0x0201, 0, 0]


def test_whether_an_array_can_be_written_is_noted() -> None:
    array = np.zeros(3)
    assert resolved(array).is_writable
    array.flags.writeable = False
    assert not resolved(array).is_writable
    assert not resolved(np.frombuffer(b"abcd", np.uint8)).is_writable


@pytest.mark.parametrize(
    "view", [np.zeros(8)[::2], np.zeros(8)[::-1], np.zeros((3, 4)).T, np.broadcast_to(np.zeros(1), (3,))]
)
def test_views_with_gaps_are_not_taken(view: npt.NDArray[Any]) -> None:
    with pytest.raises(PCCLError, match="send is not contiguous") as caught:
        resolved(view)
    assert caught.value.result is Result.INVALID_ARGUMENT


def test_a_slice_without_gaps_is_taken() -> None:
    whole = np.arange(12.0).reshape(3, 4)
    assert resolved(whole[1:]).address == whole.ctypes.data + 32


def test_subclasses_of_arrays_are_arrays(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "file", np.int32, "w+", shape=(5,))
    assert resolved(mapped).count == 5


@pytest.mark.parametrize("other", [1.0, [1.0], b"bytes", memoryview(b"bytes"), np.float32(1.0), None, "text"])
def test_other_things_are_not_taken(other: Any) -> None:
    with pytest.raises(PCCLError, match=r"send must be a NumPy array, a torch tensor or a jax\.Array, not") as caught:
        resolved(other)
    assert caught.value.func_name == "all_reduce"
