"""Arrays of JAX as operands of collectives: read where they are, with results in new arrays.

A `jax.Array` is immutable. pccl reads its memory on this machine, which for an array on the CPU is the array itself and
for one on an accelerator a copy that JAX makes and keeps with the array. A result is received into fresh memory, and
JAX makes an array of that: of the same dtype, on the same device, and with the same sharding where the shape is the
same. On the CPU it takes the memory over without a copy, if that is aligned as it likes.

pccl never imports JAX: such an array can only come from a program that has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

ALIGNMENT_BYTES = 64

Fail = Callable[[str], Exception]
"""Makes the error of a wrong argument from what is wrong with it."""


def is_array(array: Any) -> bool:
    """Return whether it is an array of JAX, or what JAX puts in the place of one while it traces a function."""
    kind = getattr(sys.modules.get("jax"), "Array", None)
    return kind is not None and isinstance(array, kind)


def view(array: Any, fail: Fail) -> np.ndarray[Any, Any]:
    """Return the array's memory on this machine, contiguous and not to be written into."""
    jax: Any = sys.modules["jax"]
    if isinstance(array, jax.core.Tracer):
        raise fail(
            "is traced by JAX, and has no values yet; call pccl outside jit and grad, or through "
            "jax.experimental.io_callback"
        )
    if array.is_deleted():
        raise fail("has been deleted, or donated to a computation")
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        raise fail(f"holds {array.dtype}, which has no memory of its own; pass jax.random.key_data() of it")
    if len(array.sharding.device_set) != 1:
        raise fail(
            f"is spread over {len(array.sharding.device_set)} devices; pass what one device has of it, such as "
            f"addressable_shards[0].data"
        )
    return np.ascontiguousarray(np.asarray(array)).reshape(array.shape)


def memory_for(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return new memory for a result, aligned such that an array of JAX on the CPU can take it over."""
    size_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    room = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -room.ctypes.data % ALIGNMENT_BYTES
    return room[start : start + size_bytes].view(dtype).reshape(shape)


def maker(array: Any) -> Callable[[np.ndarray[Any, Any]], Any]:
    """Return a function that makes an array of JAX of memory with a result, on the device of `array`.

    The memory belongs to the new array from then on.
    """
    jax: Any = sys.modules["jax"]
    shape, sharding = array.shape, array.sharding
    (device,) = sharding.device_set

    def make(memory: np.ndarray[Any, Any]) -> Any:
        return jax.device_put(memory, sharding if memory.shape == shape else device)

    return make


class NewArray:
    """An array that is made of memory with a result when somebody asks for it, once."""

    def __init__(self, make: Callable[[Any], Any], memory: Any) -> None:
        self._make = make
        self._memory = memory
        self._array: Any = None

    def __call__(self) -> Any:
        if self._memory is not None:
            self._array = self._make(self._memory)
            self._memory = None
        return self._array


class Leaves:
    """The values of a tree of arrays in host memory, from which the tree can be made again."""

    def __init__(self, tree: Any, fail: Fail) -> None:
        self.values: dict[str, np.ndarray[Any, Any]] = {}
        """The values by the names of their leaves, writable."""
        self._makers: list[Callable[[np.ndarray[Any, Any]], Any]] = []
        views, self._structure = _flattened(tree, fail)
        for path, leaf, values in views:
            self.values[path] = np.array(values)
            self._makers.append(maker(leaf) if is_array(leaf) else np.copy)

    def tree(self) -> Any:
        """Return a tree of new arrays with these values."""
        jax: Any = sys.modules["jax"]
        leaves = []
        for make, values in zip(self._makers, self.values.values(), strict=True):
            memory = memory_for(values.shape, values.dtype)
            memory[...] = values
            leaves.append(make(memory))
        return jax.tree_util.tree_unflatten(self._structure, leaves)

    def take(self, tree: Any, fail: Fail) -> None:
        """Copy the values of a tree, all of them or none."""
        views, structure = _flattened(tree, fail)
        if structure != self._structure:
            raise fail(f"the tree is {structure}, and the state is of {self._structure}")
        for path, _, values in views:
            own = self.values[path]
            if (values.shape, values.dtype) != (own.shape, own.dtype):
                raise fail(
                    f"leaf {path} is {values.dtype}{list(values.shape)}, and in the state it is "
                    f"{own.dtype}{list(own.shape)}"
                )
        for path, _, values in views:
            self.values[path][...] = values


def _flattened(tree: Any, fail: Fail) -> tuple[list[tuple[str, Any, np.ndarray[Any, Any]]], Any]:
    """Return name, leaf and memory of each leaf, and the structure of the tree."""
    jax: Any = sys.modules.get("jax")
    if jax is None:
        raise fail("trees of arrays are those of JAX, which this program has not imported; see SharedState.from_numpy")
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    views = []
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path) or "the only leaf"
        if not is_array(leaf) and not isinstance(leaf, np.ndarray):
            raise fail(f"leaf {name} is {leaf!r}, which is neither a jax.Array nor a NumPy array")
        values = view(leaf, partial(_fail_of_leaf, fail, name)) if is_array(leaf) else leaf
        views.append((name, leaf, values))
    return views, structure


def _fail_of_leaf(fail: Fail, name: str, what: str) -> Exception:
    return fail(f"leaf {name} {what}")
