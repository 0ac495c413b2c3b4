"""Stores for device tensors in a shared state. They hash tensors on the host and copy them block by block.

The device is synchronized before its tensors are hashed, and received blocks are visible to all streams when the sync
returns. A block is verified on the host before it is copied to the device. If the device fails, a StoreError is raised
and the peer leaves the run.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

from pccl.devices.device import Block, Device, Event
from pccl.devices.staging import helper_of
from pccl.runtime.state import tensor_blocks
from pccl.runtime.state.tensor_blocks import StoreError

WRITES_MAX = 16
"""Maximum number of concurrent copies to the device. Each uses a block of host memory."""


P = ParamSpec("P")
T = TypeVar("T")


def _failing_clearly(
    method: Callable[Concatenate[DeviceStore, P], T],
) -> Callable[Concatenate[DeviceStore, P], T]:
    def call(self: DeviceStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # whatever the device's library raises
            raise StoreError(f"{self.device.name} failed: {type(error).__name__}: {error}") from error

    return call


class DeviceStore:
    """The `tensor_blocks.Store` of a tensor on a device, for one sync."""

    def __init__(self, device: Device, array: Any, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.device = device
        self._array = array
        self._pool = helper_of(device).pool
        self._writes: deque[tuple[Event, Block]] = deque()

    @_failing_clearly
    def digests(self) -> bytes:
        self.device.synchronize()
        blocks = range(-(-self.size_bytes // tensor_blocks.BLOCK_BYTES))
        return b"".join(tensor_blocks.digest(block) for block in self._loaded(blocks))

    @_failing_clearly
    def load(self, number: int) -> memoryview:
        return next(self._loaded(range(number, number + 1)))

    def _loaded(self, numbers: range) -> Iterator[memoryview]:
        """Yield copies of blocks in host memory. The next block is copied while the caller uses the current one."""
        coming: deque[tuple[Event, memoryview]] = deque()
        for number in numbers:
            start, size = self._place(number)
            block = self._pool.take(size)
            coming.append((self.device.read(self._array, start, size, block.host, None), _view(block, size)))
            if len(coming) > 1:
                yield _waited(*coming.popleft())
        while coming:
            yield _waited(*coming.popleft())

    @_failing_clearly
    def memory_of(self, number: int) -> _Received:
        return _Received(self, *self._place(number), self._pool.take(self._place(number)[1]))

    @_failing_clearly
    def settle(self) -> None:
        if self._writes:
            self.device.synchronize()
            self._writes.clear()
        self._pool.trim()

    def _place(self, number: int) -> tuple[int, int]:
        start = number * tensor_blocks.BLOCK_BYTES
        return start, min(tensor_blocks.BLOCK_BYTES, self.size_bytes - start)

    @_failing_clearly
    def write(self, start: int, size: int, block: Block) -> None:
        if len(self._writes) >= WRITES_MAX:
            self._writes.popleft()[0].wait()
        self._writes.append((self.device.write(self._array, start, size, block.host), block))


class _Received:
    """A received block in host memory."""

    def __init__(self, store: DeviceStore, start: int, size: int, block: Block) -> None:
        self.view = _view(block, size)
        self._store = store
        self._start = start
        self._block = block

    def commit(self) -> None:
        self._store.write(self._start, len(self.view), self._block)


def _waited(event: Event, view: memoryview) -> memoryview:
    event.wait()
    return view


def _view(block: Block, size: int) -> memoryview:
    """Return a view of the first bytes of a block; the view keeps the block alive."""
    chars = (ctypes.c_char * size).from_address(block.address)
    chars.block = block  # type: ignore[attr-defined]
    return memoryview(chars).cast("B")
