"""A device of one process of the simulation: its copies are done by tasks, a moment later each.

What `pccl.devices.staging` gives to a thread for each device, a task of the process does in order, at times that the
seed chooses.
"""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import trio

from pccl import DataType, _arrays
from pccl._arrays import Operand
from pccl.devices import staging
from pccl.devices.device import HostPool
from tests.simulation.session.checks import Array
from tests.simulation.session.heartbeats import Spawn

COPY_S_MAX = 0.02


class _Happened:
    """An event of a device whose work is done at once."""

    def wait(self) -> None:
        pass


class _Memory:
    def __init__(self, size_bytes: int) -> None:
        self._bytes = np.full(max(1, size_bytes), 0xA5, np.uint8)
        self.address: int = self._bytes.ctypes.data


class SimArray:
    """An array on a device."""

    def __init__(self, device: SimDevice, values: Array) -> None:
        self.device = device
        self.values = values.copy()


class SimDevice:
    """See `pccl.devices.device.Device`."""

    def __init__(self, name: str, chance: random.Random, spawn: Spawn) -> None:
        self.name = name
        self.pool = HostPool(self)
        self._random = chance
        self._spawn = spawn
        self._tasks: deque[Callable[[Any], None]] = deque()
        staging._helpers[self] = cast(staging.Helper, self)

    # What its helper does.

    def run(self, task: Callable[[Any], None]) -> None:
        self._tasks.append(task)
        if len(self._tasks) == 1:
            self._spawn(self._work)

    async def _work(self) -> None:
        while self._tasks:
            await trio.sleep(self._random.random() * COPY_S_MAX)
            self._tasks[0](self)
            self._tasks.popleft()

    # What pccl asks of a device.

    def allocate(self, size_bytes: int, pinned: bool) -> _Memory:
        return _Memory(size_bytes)

    def mark(self) -> _Happened:
        return _Happened()

    def read(self, array: SimArray, start_byte: int, size_bytes: int, to: Any, after: Any) -> _Happened:
        ctypes.memmove(to.address, array.values.ctypes.data + start_byte, size_bytes)
        return _Happened()

    def write(self, array: SimArray, start_byte: int, size_bytes: int, source: Any) -> _Happened:
        ctypes.memmove(array.values.ctypes.data + start_byte, source.address, size_bytes)
        return _Happened()

    def follow(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        raise AssertionError("all_reduce makes no arrays")


def _operand(array: Any) -> Operand | None:
    if not isinstance(array, SimArray):
        return None
    values = array.values
    dtype = DataType.from_numpy_dtype(values.dtype)
    return Operand(values.ctypes.data, values.size, dtype, values.shape, True, array, array.device)


@contextmanager
def known_arrays() -> Iterator[None]:
    """pccl takes SimArrays."""
    before = dict(staging._helpers)
    _arrays._others.append(_operand)
    try:
        yield
    finally:
        _arrays._others.remove(_operand)
        staging._helpers.clear()
        staging._helpers.update(before)
