"""The cost of staging beside the copies of a device: `python -m tests.devices.staging_cost [MIB]`.

Two peers of this process reduce arrays over the loopback interface, plain ones and such of a device that is this
machine's memory and copies at once. So the difference is what the staging thread and the two copies take here.

With a GPU that torch can use also tensors there, staged by pccl, and as one would without: copied to the CPU, reduced,
copied back.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from pccl import Communicator, ReduceOp
from tests.support import fake_device
from tests.support.cluster import run_of
from tests.support.fake_device import FakeDevice, FakeEvent, FakeMemory

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

    def read(self, array: Any, start_byte: int, size_bytes: int, to: Any, after: Any) -> FakeEvent:
        fake_device.copy(to.address, array.bytes()[start_byte:].ctypes.data, size_bytes)
        return self._done

    def write(self, array: Any, start_byte: int, size_bytes: int, source: Any) -> FakeEvent:
        fake_device.copy(array.bytes()[start_byte:].ctypes.data, source.address, size_bytes)
        return self._done


def median_ms(reduce: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        started_s = time.perf_counter()
        reduce()
        times.append(1000 * (time.perf_counter() - started_s))
    return statistics.median(times[2:])


def on_gpu(count: int) -> dict[str, Callable[[Communicator, int], None]]:
    """Ways to reduce tensors on the first GPU."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    tensors = [torch.zeros(count, device="cuda") for _ in range(2)]

    def staged(peer: Communicator, i: int) -> None:
        peer.all_reduce(tensors[i], op=ReduceOp.SUM)
        torch.cuda.current_stream().synchronize()

    def copied(peer: Communicator, i: int) -> None:
        there = tensors[i].cpu()
        peer.all_reduce(there, op=ReduceOp.SUM)
        tensors[i].copy_(there)

    return {"GPU, staged": staged, "GPU, copied": copied}


def main() -> None:
    count = int(sys.argv[1] if len(sys.argv) > 1 else 128) << 18
    with fake_device.known_arrays(), run_of(2) as cluster:
        plain = [np.zeros(count, np.float32) for _ in range(2)]
        staged = [PromptDevice().array(array) for array in plain]

        def reducing(arrays: list[Any]) -> Callable[[Communicator, int], None]:
            def one(peer: Communicator, i: int) -> None:
                peer.all_reduce(arrays[i], op=ReduceOp.SUM)

            return one

        ways = {"plain": reducing(plain), "staged": reducing(staged), **on_gpu(count)}
        for name, way in [*ways.items(), *ways.items()]:
            print(f"{name:>11} {median_ms(partial(cluster.each, way)):8.1f} ms", flush=True)


if __name__ == "__main__":
    main()
