"""Turns arrays of NumPy, torch and JAX into the memory that the engine and the state transfer work on.

This is the one place that knows these libraries. Neither torch nor JAX is imported here: their arrays can only come
from a program that has imported them. Nothing is copied; whoever gets an address also gets the object that owns the
memory. Arrays of JAX cannot be written into, so that their results come in new ones (`pccl._jax_arrays`).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from pccl import _jax_arrays
from pccl._jax_arrays import NewArray
from pccl.devices import torch_cuda
from pccl.devices.device import Device
from pccl.errors import PCCLError
from pccl.runtime.extension import ffi
from pccl.types import DataType, Result

_ADDRESS = ffi.typeof("uintptr_t")


@dataclass(frozen=True, slots=True)
class Operand:
    """Contiguous memory of `count` elements."""

    address: int
    count: int
    dtype: DataType
    shape: tuple[int, ...]
    is_writable: bool
    owner: Any
    device: Device | None = None
    """The device that has the memory; None if it is this machine's. `address` is then only good to tell arrays of one
    device apart."""
    bytes_of: str = ""
    """The array's own dtype, where its elements are counted in bytes."""
    wrap: Callable[[Any], Any] | None = None
    """Makes an array of the caller's library of memory with a result. None where its arrays take results themselves."""

    @property
    def size_bytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def device_name(self) -> str:
        return "the CPU" if self.device is None else self.device.name

    def memory(self) -> memoryview:
        """Return its bytes, writable. Not to be called if it is on a device."""
        assert self.device is None
        if self.count == 0:
            return memoryview(bytearray())
        chars = (ctypes.c_char * self.size_bytes).from_address(self.address)
        return memoryview(chars).cast("B")


def resolve(array: Any, role: str, func_name: str) -> Operand:
    """Return the memory of an array of NumPy, torch or JAX. `role` names the argument in errors (INVALID_ARGUMENT)."""
    if isinstance(array, np.ndarray):
        return _from_numpy(array, role, func_name)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _from_torch(array, role, func_name)
    if _jax_arrays.is_array(array):
        memory, wrap = _from_jax(array, role, func_name)
        return replace(_from_numpy(memory, role, func_name), wrap=wrap)
    for known in _others:
        operand = known(array)
        if operand is not None:
            return operand
    raise PCCLError(
        Result.INVALID_ARGUMENT,
        func_name,
        f"{role} must be a NumPy array, a torch tensor or a jax.Array, not {type(array).__name__}",
    )


def resolve_bytes(array: Any, role: str, func_name: str) -> Operand:
    """Return the memory of an array that is only moved, and not reduced.

    It may be of any dtype whose elements are plain memory; elements that cannot be reduced are counted in bytes. It may
    also be bytes, a bytearray or a memoryview of bytes, which count as arrays of uint8. Errors as `resolve`.
    """
    if isinstance(array, bytes | bytearray | memoryview):
        try:
            array = np.frombuffer(array, np.uint8)
        except (ValueError, BufferError) as error:
            raise PCCLError(Result.INVALID_ARGUMENT, func_name, f"{role}: {error}") from None
    if not isinstance(array, np.ndarray):
        if _jax_arrays.is_array(array):
            memory, wrap = _from_jax(array, role, func_name)
            return replace(resolve_bytes(memory, role, func_name), wrap=wrap)
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(array, torch.Tensor) or _is_reducible(array):
            return resolve(array, role, func_name)
        operand = _from_torch(array, role, func_name, DataType.UINT8)
        bytes_of = str(array.dtype).removeprefix("torch.")
        return replace(operand, count=operand.count * array.element_size(), bytes_of=bytes_of)
    if array.dtype.hasobject:
        raise PCCLError(Result.INVALID_ARGUMENT, func_name, f"{role} holds Python objects; pass numbers or bytes")
    if _is_reducible(array):
        return resolve(array, role, func_name)
    operand = _from_numpy(array, role, func_name, DataType.UINT8)
    return replace(operand, count=array.nbytes, bytes_of=str(array.dtype))


def empty_like(operand: Operand, shape: tuple[int, ...]) -> Any:
    """Return a new array of the same library, dtype and device as the operand's owner; for one of JAX, memory to be
    made one of (`Operand.wrap`)."""
    array = operand.owner
    if operand.wrap is not None:
        return _jax_arrays.memory_for(shape, array.dtype)
    if operand.device is not None:
        return operand.device.empty(array, shape)
    if isinstance(array, np.ndarray):
        return np.empty(shape, array.dtype)
    return sys.modules["torch"].empty(shape, dtype=array.dtype, device="cpu")


def receiving(operand: Operand, array: Any, role: str, func_name: str) -> tuple[Operand, Callable[[], Any]]:
    """Return the memory that a result for `array` is received into, and a function that returns the array with it.

    That is the array itself, or a new one of JAX. INVALID_ARGUMENT if it is read-only.
    """
    if operand.wrap is None:
        require_writable(operand, role, func_name)
        return operand, lambda: array
    memory = empty_like(operand, operand.shape)
    return resolve_bytes(memory, role, func_name), NewArray(operand.wrap, memory)


def changes_of(*arrays: Any) -> Callable[[], None] | None:
    """Return a function that tells autograd that something was written into arrays of torch; None: there are none.

    A backward pass that has saved a tensor compares its version, which torch counts up where it knows of a change.
    """
    torch = sys.modules.get("torch")
    others = [each for each in arrays if not isinstance(each, np.ndarray)]
    if torch is None or not others:  # for arrays of NumPy another thread may be just importing torch
        return None
    tensors = [each for each in others if isinstance(each, torch.Tensor) and not each.is_inference()]
    increment = getattr(torch.autograd.graph, "increment_version", None)  # not in the oldest releases
    if increment is None or not tensors:
        return None
    if len(tensors) == 1:
        return partial(increment, tensors[0])

    def count_up() -> None:
        for tensor in tensors:
            increment(tensor)

    return count_up


def require_writable(operand: Operand, role: str, func_name: str) -> None:
    """Raise INVALID_ARGUMENT if nothing can be received into it."""
    if operand.wrap is not None:
        what = f"{role} is a jax.Array, which cannot be written into; leave it out to get the result in a new one"
        raise PCCLError(Result.INVALID_ARGUMENT, func_name, what)
    if not operand.is_writable:
        raise PCCLError(Result.INVALID_ARGUMENT, func_name, f"{role} is read-only")


def require_alike(send: Operand, recv: Operand, func_name: str) -> None:
    """Raise INVALID_ARGUMENT unless both are on one device, or none, and of one dtype."""
    what = ""
    if send.device is not recv.device:
        what = f"send is on {send.device_name} but recv on {recv.device_name}; they must be in one place"
    elif send.dtype is not recv.dtype:
        what = f"send is {send.dtype.name} but recv is {recv.dtype.name}; they must be of one dtype"
    if what:
        raise PCCLError(Result.INVALID_ARGUMENT, func_name, what)


def _is_reducible(array: Any) -> bool:
    try:
        if isinstance(array, np.ndarray):
            DataType.from_numpy_dtype(array.dtype)
        else:
            DataType.from_torch_dtype(array.dtype)
    except ValueError:
        return False
    return True


def _from_numpy(array: np.ndarray[Any, Any], role: str, func_name: str, dtype: DataType | None = None) -> Operand:
    """Return the array's memory. `dtype` is taken for its own if it is given."""
    try:
        dtype = dtype if dtype is not None else DataType.from_numpy_dtype(array.dtype)
    except ValueError as error:
        raise PCCLError(Result.INVALID_ARGUMENT, func_name, f"{role}: {error}") from None
    if not array.flags.c_contiguous:
        raise PCCLError(
            Result.INVALID_ARGUMENT, func_name, f"{role} is not contiguous; pass numpy.ascontiguousarray({role})"
        )
    return Operand(_address(array), array.size, dtype, array.shape, array.flags.writeable, array)


def _address(array: np.ndarray[Any, Any]) -> int:
    """Return where a contiguous array begins.

    The array's interface takes four times as long, and has Python intern strings, whose table grows by a megabyte and
    shrinks again in whatever thread it is.
    """
    try:
        return int(ffi.cast(_ADDRESS, ffi.from_buffer(array)))
    except (TypeError, ValueError, BufferError):  # of a dtype that the buffer protocol cannot describe
        return int(array.__array_interface__["data"][0])


def _from_jax(array: Any, role: str, func_name: str) -> tuple[np.ndarray[Any, Any], Callable[[Any], Any]]:
    """Return the array's memory, and what makes others of it."""

    def fail(what: str) -> PCCLError:
        return PCCLError(Result.INVALID_ARGUMENT, func_name, f"{role} {what}")

    return _jax_arrays.view(array, fail), _jax_arrays.maker(array)


def _from_torch(tensor: Any, role: str, func_name: str, dtype: DataType | None = None) -> Operand:
    """Return the array's memory. `dtype` is taken for its own if it is given."""

    def fail(what: str) -> PCCLError:
        return PCCLError(Result.INVALID_ARGUMENT, func_name, f"{role} {what}")

    if getattr(tensor, "is_nested", False):
        raise fail("is a nested tensor; pass its tensors one by one (unbind())")
    if tensor.is_quantized:
        raise fail("is a quantized tensor; pass its dequantize(), or its int_repr()")
    if hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh"):
        raise fail(
            "is a distributed tensor; pass its to_local(), to peers that hold the same shard: see pccl.training.Site"
        )
    if str(tensor.layout) != "torch.strided":
        raise fail(f"has layout {tensor.layout}; pass a dense tensor")
    device = torch_cuda.device_of(tensor)
    if device is None and tensor.device.type != "cpu":
        raise fail(f"is on {tensor.device}; only CPU and CUDA tensors can be used, pass {role}.cpu()")
    if not tensor.is_contiguous():
        raise fail(f"is not contiguous; pass {role}.contiguous()")
    if tensor.is_conj():
        raise fail(f"is a conjugate that has not been computed; pass {role}.resolve_conj()")
    if tensor.is_neg():
        raise fail(f"is a negative that has not been computed; pass {role}.resolve_neg()")
    try:
        dtype = dtype if dtype is not None else DataType.from_torch_dtype(tensor.dtype)
    except ValueError as error:
        raise fail(f": {error}") from None
    try:
        return Operand(tensor.data_ptr(), tensor.numel(), dtype, tuple(tensor.shape), True, tensor.detach(), device)
    except RuntimeError as error:  # of a kind of tensor that has no memory of its own
        raise fail(f"cannot be used: {error}") from None


_others: list[Callable[[Any], Operand | None]] = []
"""Functions that return the memory of further kinds of arrays, or None for what they do not know. For tests."""
