"""One case of a benchmark on one rank: iterations, timed and checked.

What a rank contributes is a pattern of small integers plus an offset of its own, so the sum is known exactly in
every type and depends on everybody's contribution.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pccl import Attribute, Communicator, QuantizationAlgorithm, QuantizationOptions, ReduceOp
from pccl.bench.messages import Case, Samples
from pccl.bench.raw_ring import RawRing

JOIN_POLL_S = 0.01
ALGORITHMS = {
    "min-max": QuantizationAlgorithm.MIN_MAX,
    "zero-point-scale": QuantizationAlgorithm.ZERO_POINT_SCALE,
}


def join(communicator: Communicator, world_size: int) -> None:
    """Returns once so many peers are accepted."""
    while communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < world_size:
        if communicator.are_peers_pending():
            communicator.update_topology()
        else:
            time.sleep(JOIN_POLL_S)


class Rank:
    """`offset` is this rank's, `offset_sum` that of all ranks. Without a raw ring only pccl is measured."""

    def __init__(
        self,
        communicator: Communicator,
        world_size: int,
        offset: int,
        offset_sum: int,
        barrier: Callable[[], None],
        raw_ring: RawRing | None,
    ) -> None:
        self._communicator = communicator
        self._world_size = world_size
        self._offset = offset
        self._offset_sum = offset_sum
        self._barrier = barrier
        self._raw_ring = raw_ring

    def run(self, case: Case) -> Samples:
        dtype = np.dtype(case.dtype)
        pattern = (np.arange(case.bytes // dtype.itemsize) % 13).astype(dtype)
        values = np.empty_like(pattern)
        expected = pattern * dtype.type(self._world_size) + dtype.type(self._offset_sum)
        options = QuantizationOptions(algorithm=ALGORITHMS[case.quantization]) if case.quantization != "none" else None
        tensors = np.array_split(values, case.tensors)

        def reduce_with_pccl() -> None:
            handles = [
                self._communicator.all_reduce_async(tensor, op=ReduceOp.SUM, tag=tag, quantization_options=options)
                for tag, tensor in enumerate(tensors)
            ]
            for handle in handles:
                is_success, status, _ = handle.wait()
                if not is_success:
                    raise RuntimeError(f"the reduce failed with {status.name}")

        def timed(reduce: Callable[[], None], exact: bool) -> float:
            np.add(pattern, dtype.type(self._offset), out=values)
            self._barrier()
            start_s = time.perf_counter()
            reduce()
            elapsed_s = time.perf_counter() - start_s
            _check(values, expected, exact)
            return elapsed_s

        pccl_s, raw_s = [], []
        ring = self._raw_ring
        for iteration in range(case.warmup + case.iterations):
            one_pccl_s = timed(reduce_with_pccl, options is None)
            one_raw_s = timed(lambda: ring.all_reduce_sum(values), True) if ring is not None else 0.0
            if iteration >= case.warmup:
                pccl_s.append(one_pccl_s)
                raw_s.append(one_raw_s)
        return Samples(pccl_s, raw_s if ring is not None else [])


def _check(values: NDArray[Any], expected: NDArray[Any], exact: bool) -> None:
    """A benchmark of wrong results is worthless."""
    if exact and not np.array_equal(values, expected):
        raise RuntimeError(f"wrong result in {np.count_nonzero(values != expected)} elements")
    if not exact and np.abs(values.astype(np.float64) - expected).max(initial=0.0) > 0.1 * expected.max(initial=0):
        raise RuntimeError("a quantized result is off by more than a tenth of the range")
