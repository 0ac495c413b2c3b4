"""Encodes the state of a Python object, as returned by `state_dict()`, as canonical bytes, without pickle.

A state is a tree of mappings, lists, tuples and sets. Its leaves are None, booleans, integers of any size, floats,
complex numbers, strings, bytes, NumPy arrays and scalars, and torch tensors. It is written as msgpack. Containers, and
leaves that msgpack lacks, become arrays that begin with a tag. Equal states give equal bytes. Unknown types, and
sparse, quantized, distributed or meta tensors, raise an error that names their path.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import msgpack
import numpy as np

Tree: TypeAlias = Any
"""The values that msgpack encodes: None, bool, 64-bit int, float, str, bytes, and lists that begin with a tag."""

LIST, TUPLE, SET, DICT, COUNTER, INTEGER, COMPLEX, ARRAY, SCALAR, TENSOR = range(10)
CHUNK_BYTES = 1 << 30
"""The maximum size of one chunk; a msgpack string must be smaller than 4 GiB."""
DEPTH_MAX = 200
PRIMITIVES = (type(None), bool, float, str, bytes)
VERBATIM = re.compile(r"(?![-+\d.e]*$|nan$|inf$|-inf$|True$|False$|None$)[\w.\- ]+")
"""String keys that cannot be confused with the `repr` of another key."""

Take: TypeAlias = Callable[[str, Any], bool]


def encode(state: Any, take: Take | None = None) -> bytes:
    """Return the canonical bytes of `state`. Raises ValueError with the path of a value that cannot be encoded.

    `take(path, value)` returns True for values that the caller stores itself; None is encoded in their place.
    """
    return _packed(_tree(state, "", take))


def decode(data: bytes, taken: Mapping[str, Any] | None = None) -> Any:
    """Decode a state. Raises ValueError if the bytes are malformed, or if torch is needed but not imported.

    `taken` holds the values that the caller of `encode` stored itself, by path.
    """
    try:
        tree = msgpack.unpackb(data, raw=False, unicode_errors="surrogatepass")
    except ValueError as error:
        raise ValueError(f"these bytes are not an encoded state: {error or type(error).__name__}") from error
    try:
        return _state(tree, "", taken or {})
    except (TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"these bytes are not an encoded state: {error}") from error


def _packed(tree: Tree) -> bytes:
    data = msgpack.packb(tree, use_bin_type=True, unicode_errors="surrogatepass")
    assert isinstance(data, bytes)
    return data


def _below(path: str, key: Any) -> str:
    text = key if isinstance(key, str) and VERBATIM.fullmatch(key) else repr(key)
    return f"{path}/{text}" if path else text


def _tree(value: Any, path: str, take: Take | None, depth: int = 0) -> Tree:
    if take is not None and take(path, value):
        return None
    kind = type(value)
    if kind in PRIMITIVES:
        return value
    if kind is int:
        if -(2**63) <= value < 2**64:
            return value
        return [INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]
    if kind is complex:
        return [COMPLEX, value.real, value.imag]
    if isinstance(value, np.ndarray | np.generic):
        return _array_tree(value, path)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return [TENSOR, str(value.dtype).removeprefix("torch."), list(value.shape), *_chunks(bytes_of(value, path))]
    if depth == DEPTH_MAX:
        raise ValueError(f"the state is nested more than {DEPTH_MAX} times, at {path[:100]}...")
    if isinstance(value, Mapping):
        entries = [
            [
                _tree(key, f"a key of {path or 'the state'}", None, depth + 1),
                _tree(item, _below(path, key), take, depth + 1),
            ]
            for key, item in value.items()
        ]
        entries.sort(key=lambda entry: _packed(entry[0]))
        return [COUNTER if isinstance(value, Counter) else DICT, *(part for entry in entries for part in entry)]
    if kind is list:
        return [LIST, *(_tree(item, _below(path, i), take, depth + 1) for i, item in enumerate(value))]
    if kind is tuple or (torch is not None and kind is torch.Size):
        return [TUPLE, *(_tree(item, _below(path, i), take, depth + 1) for i, item in enumerate(value))]
    if kind is set or kind is frozenset:
        return [
            SET,
            *sorted((_tree(item, f"{path or 'the state'}/...", None, depth + 1) for item in value), key=_packed),
        ]
    raise ValueError(
        f"{path or 'the state'} is a {kind.__module__}.{kind.__qualname__}; a state consists of dicts, lists, tuples, "
        "sets, numbers, strings, bytes, None, NumPy arrays and torch tensors"
    )


def _array_tree(value: Any, path: str) -> Tree:
    if value.dtype.kind not in "biufcMmSU":
        raise ValueError(f"{path or 'the state'} is a NumPy array of {value.dtype}; only plain numbers are encoded")
    array = np.ascontiguousarray(value)
    tag = SCALAR if isinstance(value, np.generic) else ARRAY
    return [tag, array.dtype.str, list(value.shape), *_chunks(array.reshape(-1).view(np.uint8))]


def bytes_of(tensor: Any, path: str) -> Any:
    """Return a torch tensor's elements in C order as a uint8 array. Raises ValueError unless it is dense and whole."""
    torch = sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or hasattr(tensor, "placements"):
        what = "distributed" if hasattr(tensor, "placements") else f"{tensor.layout}, {tensor.dtype}, {tensor.device}"
        raise ValueError(f"{path or 'the state'} is a torch tensor ({what}); only dense, whole tensors are encoded")
    plain = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return plain.view(-1).view(torch.uint8).numpy()


def _chunks(data: Any) -> Iterator[bytes]:
    for first in range(0, data.size, CHUNK_BYTES):
        yield data[first : first + CHUNK_BYTES].tobytes()


def _state(tree: Tree, path: str, taken: Mapping[str, Any]) -> Any:
    if tree is None:
        return taken.get(path)
    if isinstance(tree, PRIMITIVES) or type(tree) is int:
        return tree
    tag, *rest = tree
    if tag in (LIST, TUPLE):
        items = (_state(item, _below(path, i), taken) for i, item in enumerate(rest))
        return list(items) if tag == LIST else tuple(items)
    if tag == SET:
        return {_state(item, "", {}) for item in rest}
    if tag in (DICT, COUNTER):
        keys = [_state(key, "", {}) for key in rest[::2]]
        entries = {key: _state(item, _below(path, key), taken) for key, item in zip(keys, rest[1::2], strict=True)}
        return entries if tag == DICT else Counter(entries)
    if tag == INTEGER:
        return int.from_bytes(rest[0], "little", signed=True)
    if tag == COMPLEX:
        return complex(*rest)
    if tag in (ARRAY, SCALAR):
        array = np.frombuffer(bytearray(b"".join(rest[2:])), np.dtype(rest[0])).reshape(rest[1])
        return array if tag == ARRAY else array[()]
    if tag == TENSOR:
        return _tensor(*rest)
    raise ValueError(f"these bytes are not an encoded state: tag {tag!r}")


def _tensor(dtype: str, shape: list[int], *chunks: bytes) -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        raise ValueError("the state holds torch tensors: import torch first")
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"these bytes are not an encoded state: a tensor of {dtype!r}")
    if not math.prod(shape):
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(b"".join(chunks)), dtype=kind).view(shape)
