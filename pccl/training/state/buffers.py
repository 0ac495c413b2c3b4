"""The buffers of a torch module, such as running statistics, and the rules by which peers share them.

Forward passes change buffers according to each peer's own data. The common values are held here, separate from the
module, in two flat vectors: floating-point buffers and all others (int64). An exchange updates them by one of three
rules:

    average    floating-point buffers change by the mean of their changes; others become the peers' maximum
    first      all buffers become those of the peer with rank 0
    local      no exchange; buffers are not part of digests or the shared state

Unchanged buffers keep their bits. Changes made by forward passes while an exchange is in flight are added to its
result. Forward passes may replace buffers, so buffers are looked up in their modules each time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pccl import Communicator, ReduceOp, TensorInfo
from pccl._floating_point import default_environment
from pccl.training.group.relaunch import NOT_MADE, Outcome, Relaunched, average, combined
from pccl.training.state.replica import local_shard, plain_name

AVERAGE, FIRST, LOCAL = "average", "first", "local"
RULES = (AVERAGE, FIRST, LOCAL)

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.int64]


def exchanged_buffers(model: Any, rule: str) -> Buffers:
    """Return the buffers of a torch module, exchanged by `rule`; other models have none. Raises ValueError."""
    if rule not in RULES:
        raise ValueError(f"buffers {rule!r}: must be one of {', '.join(map(repr, RULES))}")
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        return Buffers(None, [], rule)
    seen: set[int] = set()
    places = []
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            name = plain_name(f"{prefix}.{key}" if prefix else key)
            if buffer is None or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            if buffer.is_meta:
                raise ValueError(f"buffer {name!r} is on meta and has no values; materialize the module first")
            places.append(_Place(name, module, key))
    return Buffers(torch, places, rule)


class _Place:
    """A buffer's place in the module and its form in the exchanged vector."""

    def __init__(self, name: str, module: Any, key: str) -> None:
        self.name = name
        self._module = module
        self._key = key
        self.shape = tuple(self.tensor.shape)
        self.dtype = self.tensor.dtype

    @property
    def is_float(self) -> bool:
        return bool(self.dtype.is_floating_point or self.dtype.is_complex)

    @property
    def count(self) -> int:
        return int(math.prod(self.shape)) * (2 if self.dtype.is_complex else 1)

    @property
    def tensor(self) -> Any:
        return local_shard(self._module._buffers[self._key]).detach()

    @property
    def version(self) -> int:
        buffer = self._module._buffers[self._key]
        return 0 if buffer.is_inference() else int(buffer._version)

    def read(self, torch: Any, dtype: Any) -> Any:
        """Return the values as a flat tensor on the CPU."""
        tensor = self.tensor
        if tuple(tensor.shape) != self.shape or tensor.dtype != self.dtype:
            raise ValueError(
                f"buffer {self.name!r} was {self.dtype} of shape {self.shape} and is now {tensor.dtype} of shape "
                f"{tuple(tensor.shape)}: use buffers='local', or keep its shape and dtype"
            )
        if self.dtype.is_complex:
            tensor = torch.view_as_real(tensor.resolve_conj())
        return tensor.to("cpu", dtype).reshape(-1).contiguous()  # expanded tensors are not flat or contiguous

    def made(self, torch: Any, vector: NDArray[Any]) -> Any:
        """Return a tensor of this buffer's shape and dtype."""
        values = torch.from_numpy(vector)
        if self.dtype.is_complex:
            values = torch.view_as_complex(values.view(*self.shape, 2))
        return values.view(self.shape).to(self.dtype)

    def write(self, torch: Any, vector: NDArray[Any]) -> None:
        with torch.no_grad():
            self.tensor.copy_(self.made(torch, vector))


class Buffers:
    """The exchanged buffers of one module. Not thread-safe."""

    def __init__(self, torch: Any, places: list[_Place], rule: str) -> None:
        self.rule = rule
        self._torch = torch
        shared = [] if rule == LOCAL else places
        self._floats = [place for place in shared if place.is_float]
        self._integers = [place for place in shared if not place.is_float]
        is_double = torch is not None and any(p.dtype in (torch.float64, torch.complex128) for p in self._floats)
        dtype = np.float64 if is_double else np.float32
        self.floats: Floats = np.empty(sum(place.count for place in self._floats), dtype)
        self.integers: Integers = np.empty(sum(place.count for place in self._integers), np.int64)
        self._ops: list[Relaunched] = []
        self._sent: tuple[Floats, Integers] = self.floats, self.integers
        self._moved: Floats = self.floats
        self._most: Integers = self.integers
        self._bytes = np.empty(0, np.uint8)
        self._own: tuple[Floats, Integers] | None = None
        self.adopt()

    @property
    def layout(self) -> str:
        """The rule, names, shapes and dtypes, which must be the same on all peers."""
        return repr((self.rule, [(p.name, p.shape, str(p.dtype)) for p in (*self._floats, *self._integers)]))

    @property
    def is_empty(self) -> bool:
        return not self._floats and not self._integers

    def infos(self) -> list[TensorInfo]:
        """Return the common values for a shared state; call `show` after they are synchronized."""
        vectors = {"floating-point buffers": self.floats, "other buffers": self.integers}
        return [TensorInfo.from_numpy(vector, name) for name, vector in vectors.items() if vector.size]

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield the common values by name."""
        for places, vector in ((self._floats, self.floats), (self._integers, self.integers)):
            first = 0
            for place in places:
                yield f"buffer {place.name}", vector[first : first + place.count]
                first += place.count

    def module_tensors(self) -> Iterator[tuple[str, Any]]:
        """Yield the module's shared buffers by name."""
        for place in (*self._floats, *self._integers):
            yield f"buffer {place.name}", place.tensor

    def is_finite(self) -> bool:
        """Return whether all exchanged buffers of the module are finite."""
        return all(bool(place.tensor.isfinite().all()) for place in self._floats)

    def version(self) -> int:
        """Return a number that changes when a buffer of the module is written."""
        return sum(place.version for place in (*self._floats, *self._integers))

    def adopt(self) -> None:
        """Make the module's values the common ones. All peers must do this, with the same values."""
        self.floats[...], self.integers[...] = self._read()

    def show(self) -> None:
        """Write the common values into the module."""
        self._own = None
        self._write(self.floats, self.integers)

    @contextmanager
    def own(self) -> Iterator[None]:
        """Write this peer's own values into the module for the block, and the common ones at its end."""
        if self.is_empty:
            yield
            return
        self.show_own()
        try:
            yield
        finally:
            own = self._read()
            self.show()
            self._own = own

    def show_own(self) -> None:
        """Write this peer's own values into the module if `own` has saved any."""
        if self._own is not None:
            self._write(*self._own)

    def launch(self, communicator: Communicator, tag: int, step: int) -> None:
        """Start exchanging the module's values; `land` ends it. Uses `tag` and `tag + 1`. A group call."""
        if self.is_empty or self._ops:
            return
        self._sent = floats, integers = self._read()
        if self.rule == FIRST:
            self._bytes = np.concatenate([floats.view(np.uint8), integers.view(np.uint8)])
            self._ops = [
                Relaunched(communicator, lambda: communicator.launch.broadcast(self._bytes, root=0, tag=tag, step=step))
            ]
            return
        self._moved, self._most = _movement(self.floats, floats), integers.copy()
        for i, (vector, op) in enumerate(((self._moved, ReduceOp.AVG), (self._most, ReduceOp.MAX))):
            if vector.size:
                self._ops.append(average(communicator, vector, tag + i, step, op=op))

    def land(self, *, keep_going: bool = False) -> Outcome:
        """Wait for the exchange, if any, and write the common values into the module. Raises PCCLError.

        `keep_going`: forward passes ran during the exchange; keep their changes.
        """
        if not self._ops:
            return NOT_MADE
        outcomes = [op.wait() for op in self._ops]
        is_alone = self._ops[0].info is None
        self._ops = []
        self._take(is_alone)
        self._go_on() if keep_going else self.show()
        return combined(outcomes)

    def drop(self) -> None:
        """Discard an exchange whose communicator has been closed."""
        self._ops = []

    @default_environment()
    def _take(self, alone: bool) -> None:
        floats, integers = self._sent
        if self.rule == FIRST:
            self.floats[...] = self._bytes[: self.floats.nbytes].view(self.floats.dtype)
            self.integers[...] = self._bytes[self.floats.nbytes :].view(np.int64)
        elif alone:
            self.floats[...], self.integers[...] = floats, integers
        else:
            moved = self._moved != 0  # includes NaN
            self.floats[moved] += self._moved[moved]
            self.integers[...] = self._most

    @default_environment()
    def _go_on(self) -> None:
        floats, integers = self._read()
        sent_floats, sent_integers = self._sent
        moved = _movement(sent_floats, floats)
        has_moved = moved != 0
        target = self.floats.copy()
        target[has_moved] += moved[has_moved]
        self._write(target, self.integers + (integers - sent_integers))

    def _read(self) -> tuple[Floats, Integers]:
        return self._gathered(self._floats, self.floats), self._gathered(self._integers, self.integers)

    def _gathered(self, places: list[_Place], like: NDArray[Any]) -> Any:
        vector = np.empty_like(like)
        if places:
            torch = self._torch
            dtype = torch.from_numpy(like).dtype
            torch.cat([place.read(torch, dtype) for place in places], out=torch.from_numpy(vector))
        return vector

    def _write(self, floats: Floats, integers: Integers) -> None:
        """Write the values, skipping equal buffers because expanded ones cannot be written."""
        torch = self._torch
        for places, vector in ((self._floats, floats), (self._integers, integers)):
            first = 0
            for place in places:
                values = vector[first : first + place.count]
                first += place.count
                held = place.read(torch, torch.from_numpy(values).dtype).numpy()
                if not np.array_equal(held.view(np.uint8), values.view(np.uint8)):
                    place.write(torch, values)


@default_environment()
def _movement(start: Floats, end: Floats) -> Floats:
    """Return `end - start`, or 0 where both have equal bits, which includes infinities."""
    with np.errstate(invalid="ignore", over="ignore"):
        moved: Floats = end - start
    bits = np.uint64 if start.dtype == np.float64 else np.uint32
    moved[end.view(bits) == start.view(bits)] = 0
    return moved
