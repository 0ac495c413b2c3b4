"""What staging costs beside the copies of a device: `python -m tests.staging_cost [MIB]`.

Two peers of this process reduce arrays over the loopback interface, plain ones and such of a device that is this
machine's memory and copies at once. So the difference is what pieces, their threads and the two copies take here.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pccl import Communicator, ReduceOp
from tests import fake_device
from tests.crew import run_of
from tests.fake_device import FakeArray, FakeDevice, FakeEvent, FakeMemory

ROUNDS = 9


class PromptDevice(FakeDevice):
    """Does at once what it is asked."""

    def __init__(self) -> None:
        super().__init__(name="prompt")
        self._done = FakeEvent()
        self._done.happen()

    def allocate(self, size_bytes: int, pinned: bool) -> FakeMemory:
        return FakeMemory(size_bytes)

    def mark(self) -> FakeEvent:
        return self._done

    def read(self, array: FakeArray, start_byte: int, size_bytes: int, to: Any, after: Any) -> FakeEvent:
        fake_device.copy(to.address, array.bytes()[start_byte:].ctypes.data, size_bytes)
        return self._done

    def write(self, array: FakeArray, start_byte: int, size_bytes: int, source: Any) -> FakeEvent:
        fake_device.copy(array.bytes()[start_byte:].ctypes.data, source.address, size_bytes)
        return self._done


def median_ms(reduce: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        reduce()
        times.append(1000 * (time.perf_counter() - started_s))
    return statistics.median(times[2:])


def main() -> None:
    count = int(sys.argv[1] if len(sys.argv) > 1 else 128) << 18
    with fake_device.known_arrays(), run_of(2) as crew:
        plain = [np.zeros(count, np.float32) for _ in range(2)]
        staged = [PromptDevice().array(array) for array in plain]

        def reduce(arrays: list[Any]) -> None:
            def one(peer: Communicator, i: int) -> None:
                peer.all_reduce(arrays[i], op=ReduceOp.SUM)

            crew.each(one)

        for name, arrays in (("plain", plain), ("staged", staged), ("plain", plain), ("staged", staged)):
            print(f"{name:>7} {median_ms(lambda arrays=arrays: reduce(arrays)):8.1f} ms", flush=True)  # type: ignore[misc]


if __name__ == "__main__":
    main()
