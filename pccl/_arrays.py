"""Converts NumPy, torch and JAX arrays to the memory that the engine and the state transfer use, without copying.

This module imports neither torch nor JAX: a program that passes their arrays has already imported them.

A `jax.Array` is immutable. Its memory is read in place; JAX first copies an array on an accelerator to the host. A
result is written to new memory, from which JAX makes an array of the same dtype on the same device.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from pccl.devices import torch_cuda
from pccl.devices.device import Device
from pccl.errors import invalid
from pccl.runtime.extension import ffi
from pccl.types import DataType, ReduceOp

_ADDRESS = ffi.typeof("uintptr_t")
_numpy_types: dict[np.dtype[Any], DataType] = {}
"""A cache of known types."""
ALIGNMENT_BYTES = 64
"""The alignment that lets JAX use memory on the CPU without a copy."""

Fail = Callable[[str], Exception]
"""Makes an exception from a description of the fault."""


class Array(Protocol):
    """An array with elements of one type, such as a NumPy array or a torch tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...

    def __len__(self) -> int: ...


Movable: TypeAlias = Array | bytes | bytearray | memoryview
"""An array or bytes, for calls that move elements without reducing them."""


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
    """The device that holds the memory, or None for host memory. On a device, `address` is only an identifier."""
    bytes_of: str = ""
    """The array's own dtype if its elements are counted in bytes."""
    wrap: Callable[[Any], Any] | None = None
    """Makes a `jax.Array` from memory that holds a result; None for other arrays, which are written in place."""

    @property
    def size_bytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def device_name(self) -> str:
        return "the CPU" if self.device is None else self.device.name

    def memory(self) -> memoryview:
        """Return the memory as writable bytes. It must not be on a device."""
        assert self.device is None
        if self.count == 0:
            return memoryview(bytearray())
        chars = (ctypes.c_char * self.size_bytes).from_address(self.address)
        return memoryview(chars).cast("B")


def resolve(array: Any, role: str, func_name: str) -> Operand:
    """Return the memory of a NumPy, torch or JAX array. `role` names the argument in errors (INVALID_ARGUMENT)."""
    if isinstance(array, np.ndarray):
        return _from_numpy(array, role, func_name)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _from_torch(array, role, func_name)
    if is_jax(array):
        memory = _jax_view(array, _fail_for(role, func_name))
        return replace(_from_numpy(memory, role, func_name), wrap=_jax_maker(array))
    for known in _others:
        operand = known(array)
        if operand is not None:
            return operand
    is_value = isinstance(array, np.generic | float | int | list | tuple)
    hint = ": make an array of it with numpy.array" if is_value else ""
    if isinstance(array, ReduceOp):
        hint = ": give it as op="
    raise invalid(
        func_name,
        f"{role} must be a NumPy array, a torch tensor or a jax.Array, not {type(array).__name__}{hint}",
    )


def resolve_bytes(array: Any, role: str, func_name: str) -> Operand:
    """Return the memory of an array that is moved but not reduced.

    Elements that cannot be reduced are counted in bytes. A bytes, bytearray or memoryview is an array of uint8.
    """
    if isinstance(array, bytes | bytearray | memoryview):
        try:
            array = np.frombuffer(array, np.uint8)
        except (ValueError, BufferError) as error:
            raise invalid(func_name, f"{role}: {error}") from None
    if is_jax(array):
        memory = _jax_view(array, _fail_for(role, func_name))
        return replace(resolve_bytes(memory, role, func_name), wrap=_jax_maker(array))
    is_numpy, torch = isinstance(array, np.ndarray), sys.modules.get("torch")
    if is_numpy and array.dtype.hasobject:
        raise invalid(func_name, f"{role} holds Python objects; pass numbers or bytes")
    is_known = is_numpy or (torch is not None and isinstance(array, torch.Tensor))
    if not is_known or _is_reducible(array):
        return resolve(array, role, func_name)
    operand = (_from_numpy if is_numpy else _from_torch)(array, role, func_name, DataType.UINT8)
    bytes_of = str(array.dtype).removeprefix("torch.")
    return replace(operand, count=operand.count * array.dtype.itemsize, bytes_of=bytes_of)


def empty_like(operand: Operand, shape: tuple[int, ...]) -> Any:
    """Return a new array of the same library, dtype and device as the operand's array. For JAX, return memory for
    `Operand.wrap`."""
    array = operand.owner
    if operand.wrap is not None:
        return _jax_memory(shape, array.dtype)
    if operand.device is not None:
        return operand.device.empty(array, shape)
    if isinstance(array, np.ndarray):
        return np.empty(shape, array.dtype)
    return sys.modules["torch"].empty(shape, dtype=array.dtype, device="cpu")


def receiving(operand: Operand, array: Any, role: str, func_name: str) -> tuple[Operand, Callable[[], Any]]:
    """Return the memory that receives a result for `array`, and a function that returns the array holding it.

    The latter is `array` itself or a new `jax.Array`. Raise INVALID_ARGUMENT if `array` is read-only.
    """
    if operand.wrap is None:
        require_writable(operand, role, func_name)
        return operand, lambda: array
    memory = empty_like(operand, operand.shape)
    return resolve_bytes(memory, role, func_name), NewArray(operand.wrap, memory)


def changes_of(*arrays: Any) -> Callable[[], None] | None:
    """Return a function that notifies autograd of a write to torch tensors, or None if there are no tensors."""
    torch = sys.modules.get("torch")
    others = [each for each in arrays if not isinstance(each, np.ndarray)]
    if torch is None or not others:  # NumPy arrays do not need torch, which another thread may be importing
        return None
    tensors = [each for each in others if isinstance(each, torch.Tensor) and not each.is_inference()]
    return partial(torch.autograd.graph.increment_version, tensors) if tensors else None


def require_writable(operand: Operand, role: str, func_name: str) -> None:
    if operand.wrap is not None:
        what = f"{role} is a jax.Array, which cannot be written to; leave it out to get the result in a new array"
        raise invalid(func_name, what)
    if not operand.is_writable:
        raise invalid(func_name, f"{role} is read-only")


def require_alike(send: Operand, recv: Operand, func_name: str) -> None:
    what = ""
    if send.device is not recv.device:
        what = f"send is on {send.device_name} but recv on {recv.device_name}; they must be on the same device"
    elif send.dtype is not recv.dtype:
        what = f"send is {send.dtype.name} but recv is {recv.dtype.name}; they must have the same dtype"
    if what:
        raise invalid(func_name, what)


def _is_reducible(array: Any) -> bool:
    try:
        (DataType.from_numpy_dtype if isinstance(array, np.ndarray) else DataType.from_torch_dtype)(array.dtype)
    except ValueError:
        return False
    return True


def _from_numpy(array: np.ndarray[Any, Any], role: str, func_name: str, dtype: DataType | None = None) -> Operand:
    """Return the array's memory. `dtype` overrides the array's."""
    if dtype is None:
        dtype = _numpy_types.get(array.dtype)
    if dtype is None:
        try:
            dtype = _numpy_types[array.dtype] = DataType.from_numpy_dtype(array.dtype)
        except ValueError as error:
            raise invalid(func_name, f"{role}: {error}") from None
    if not array.flags.c_contiguous:
        raise invalid(func_name, f"{role} is not contiguous; copy it with numpy.ascontiguousarray and use that array")
    return Operand(_address(array), array.size, dtype, array.shape, array.flags.writeable, array)


def _address(array: np.ndarray[Any, Any]) -> int:
    """Return the address of a contiguous array. `__array_interface__` takes four times as long."""
    try:
        return int(ffi.cast(_ADDRESS, ffi.from_buffer(array)))
    except (TypeError, ValueError, BufferError):  # the buffer protocol cannot describe the dtype
        return int(array.__array_interface__["data"][0])


def _fail_for(role: str, func_name: str) -> Fail:
    return lambda what: invalid(func_name, f"{role} {what}")


def _from_torch(tensor: Any, role: str, func_name: str, dtype: DataType | None = None) -> Operand:
    fail = _fail_for(role, func_name)
    if getattr(tensor, "is_nested", False):
        raise fail("is a nested tensor; pass its tensors one by one (unbind())")
    if tensor.is_quantized:
        raise fail("is a quantized tensor; pass its dequantize(), or its int_repr()")
    if hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh"):
        raise fail(
            "is a distributed tensor; pass its to_local(), only among peers with the same shard (pccl.training.Site)"
        )
    if str(tensor.layout) != "torch.strided":
        raise fail(f"has layout {tensor.layout}; pass a dense tensor")
    device = torch_cuda.device_of(tensor)
    if device is None and tensor.device.type != "cpu":
        raise fail(f"is on {tensor.device}; only CPU and CUDA tensors can be used, pass {role}.cpu()")
    if not tensor.is_contiguous():
        raise fail(f"is not contiguous; pass {role}.contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        raise fail(f"is a lazy conjugate or negative; pass {role}.resolve_conj().resolve_neg()")
    try:
        dtype = dtype if dtype is not None else DataType.from_torch_dtype(tensor.dtype)
    except ValueError as error:
        raise fail(f": {error}") from None
    try:
        return Operand(tensor.data_ptr(), tensor.numel(), dtype, tuple(tensor.shape), True, tensor.detach(), device)
    except RuntimeError as error:  # a tensor without memory
        raise fail(f"cannot be used: {error}") from None


_others: list[Callable[[Any], Operand | None]] = []
"""Functions, set by tests, that return the memory of other kinds of arrays, or None for unknown kinds."""


# JAX.


def is_jax(array: Any) -> bool:
    """Return whether `array` is a `jax.Array` or the tracer that JAX substitutes while it traces a function."""
    kind = getattr(sys.modules.get("jax"), "Array", None)
    return kind is not None and isinstance(array, kind)


def _jax_view(array: Any, fail: Fail) -> np.ndarray[Any, Any]:
    jax: Any = sys.modules["jax"]
    if isinstance(array, jax.core.Tracer):
        raise fail("is traced by JAX and has no values yet; call pccl outside jit and grad, or through io_callback")
    if array.is_deleted():
        raise fail("has been deleted, or donated to a computation")
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        raise fail(f"holds {array.dtype}, which has no memory of its own; pass its jax.random.key_data()")
    if len(array.sharding.device_set) != 1:
        devices = len(array.sharding.device_set)
        raise fail(f"is spread over {devices} devices; pass one device's part, such as addressable_shards[0].data")
    return np.ascontiguousarray(np.asarray(array)).reshape(array.shape)


def _jax_memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return new memory for a result, aligned so that JAX on the CPU can use it without a copy."""
    size_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    room = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -room.ctypes.data % ALIGNMENT_BYTES
    return room[start : start + size_bytes].view(dtype).reshape(shape)


def _jax_maker(array: Any) -> Callable[[np.ndarray[Any, Any]], Any]:
    """Return a function that turns memory into an array on the device of `array`. The new array owns the memory."""
    jax: Any = sys.modules["jax"]
    shape, sharding = array.shape, array.sharding
    (device,) = sharding.device_set

    def make(memory: np.ndarray[Any, Any]) -> Any:
        return jax.device_put(memory, sharding if memory.shape == shape else device)

    return make


class NewArray:
    """Makes an array, when first called, from memory that holds a result."""

    def __init__(self, make: Callable[[Any], Any], memory: Any) -> None:
        self._make = make
        self._memory = memory
        self._array: Any = None

    def __call__(self) -> Any:
        if self._memory is not None:
            self._array = self._make(self._memory)
            self._memory = None
        return self._array


class JaxLeaves:
    """The values of a pytree of arrays, copied to host memory, and the structure to rebuild the tree."""

    def __init__(self, tree: Any, fail: Fail) -> None:
        self.values: dict[str, np.ndarray[Any, Any]] = {}
        """The writable values, by leaf name."""
        self._makers: list[Callable[[np.ndarray[Any, Any]], Any]] = []
        views, self._structure = _flattened(tree, fail)
        for path, leaf, values in views:
            self.values[path] = np.array(values)
            self._makers.append(_jax_maker(leaf) if is_jax(leaf) else np.copy)

    def tree(self) -> Any:
        jax: Any = sys.modules["jax"]
        leaves = []
        for make, values in zip(self._makers, self.values.values(), strict=True):
            memory = _jax_memory(values.shape, values.dtype)
            memory[...] = values
            leaves.append(make(memory))
        return jax.tree_util.tree_unflatten(self._structure, leaves)

    def copy_from(self, tree: Any, fail: Fail) -> None:
        """Copy the values of a tree. If the tree does not match, copy none of them."""
        views, structure = _flattened(tree, fail)
        if structure != self._structure:
            raise fail(f"tree structure mismatch: expected {self._structure}, got {structure}")
        for path, _, values in views:
            own = self.values[path]
            kind, own_kind = (f"{each.dtype}{list(each.shape)}" for each in (values, own))
            if kind != own_kind:
                raise fail(f"leaf {path} is {kind}, but in the state it is {own_kind}")
        for path, _, values in views:
            self.values[path][...] = values


def _flattened(tree: Any, fail: Fail) -> tuple[list[tuple[str, Any, np.ndarray[Any, Any]]], Any]:
    jax: Any = sys.modules.get("jax")
    if jax is None:
        raise fail("trees of arrays need JAX, which this program has not imported; see SharedState.from_numpy")
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    views = []
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path) or "the only leaf"
        if not is_jax(leaf) and not isinstance(leaf, np.ndarray):
            raise fail(f"leaf {name} is {leaf!r}, which is neither a jax.Array nor a NumPy array")
        values = _jax_view(leaf, _fail_of_leaf(fail, name)) if is_jax(leaf) else leaf
        views.append((name, leaf, values))
    return views, structure


def _fail_of_leaf(fail: Fail, name: str) -> Fail:
    return lambda what: fail(f"leaf {name} {what}")
