"""One rank of a benchmark, as a process: `python -m pccl.bench.worker`, driven over its standard streams."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pccl import (
    Attribute,
    Communicator,
    PCCLError,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceOp,
)
from pccl.bench.messages import COMMIT, Case, Hello, Loop, Ready, Reply, Request, Samples, Setup, Step, Steps
from pccl.bench.raw_ring import RawRing, join_ring

JOIN_POLL_S = 0.01
ALGORITHMS = {
    "min-max": QuantizationAlgorithm.MIN_MAX,
    "zero-point-scale": QuantizationAlgorithm.ZERO_POINT_SCALE,
}


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    _reply(Hello(listener.getsockname()[1]))
    setup = _request()
    assert isinstance(setup, Setup)
    ring = join_ring(setup.rank, setup.ring_ports, listener)
    with Communicator(setup.master, p2p_connection_pool_size=setup.connections) as communicator:
        _join(communicator, len(setup.ring_ports))
        _reply(Ready())
        while (request := _request()) is not None:
            match request:
                case Case():
                    _reply(_run_case(request, communicator, ring, setup))
                case Loop():
                    _reply(_run_loop(request, communicator))
                case Setup():
                    raise ValueError("set up already")
    ring.close()


def _request() -> Request | None:
    """The coordinator's next request; None when it is gone or has no more."""
    line = sys.stdin.buffer.readline()
    return msgspec.json.decode(line, type=Request) if line else None


def _reply(reply: Reply) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
    sys.stdout.buffer.flush()


def _join(communicator: Communicator, world_size: int) -> None:
    while communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < world_size:
        if communicator.are_peers_pending():
            communicator.update_topology()
        else:
            time.sleep(JOIN_POLL_S)


def _run_case(case: Case, communicator: Communicator, ring: RawRing, setup: Setup) -> Samples:
    world_size = len(setup.ring_ports)
    dtype = np.dtype(case.dtype)
    pattern = (np.arange(case.bytes // dtype.itemsize) % 13).astype(dtype)
    values = np.empty_like(pattern)
    expected = pattern * dtype.type(world_size) + dtype.type(world_size * (world_size - 1) // 2)
    options = QuantizationOptions(algorithm=ALGORITHMS[case.quantization]) if case.quantization != "none" else None
    tensors = np.array_split(values, case.tensors)

    def reduce_with_pccl() -> None:
        handles = [
            communicator.all_reduce_async(tensor, op=ReduceOp.SUM, tag=tag, quantization_options=options)
            for tag, tensor in enumerate(tensors)
        ]
        for handle in handles:
            is_success, status, _ = handle.wait()
            if not is_success:
                raise RuntimeError(f"rank {setup.rank}: the reduce failed with {status.name}")

    def reduce_with_raw_ring() -> None:
        ring.all_reduce_sum(values)

    def timed(reduce: Callable[[], None], exact: bool) -> float:
        np.add(pattern, dtype.type(setup.rank), out=values)
        ring.barrier()
        start_s = time.perf_counter()
        reduce()
        elapsed_s = time.perf_counter() - start_s
        _check(values, expected, exact, setup.rank)
        return elapsed_s

    pccl_s, raw_s = [], []
    for iteration in range(case.warmup + case.iterations):
        one_pccl_s = timed(reduce_with_pccl, options is None)
        one_raw_s = timed(reduce_with_raw_ring, True)
        if iteration >= case.warmup:
            pccl_s.append(one_pccl_s)
            raw_s.append(one_raw_s)
    return Samples(pccl_s, raw_s)


def _check(values: NDArray[Any], expected: NDArray[Any], exact: bool, rank: int) -> None:
    """A benchmark of wrong results is worthless."""
    if exact and not np.array_equal(values, expected):
        raise RuntimeError(f"rank {rank}: wrong result in {np.count_nonzero(values != expected)} elements")
    if not exact and np.abs(values.astype(np.float64) - expected).max(initial=0.0) > 0.1 * expected.max(initial=0):
        raise RuntimeError(f"rank {rank}: a quantized result is off by more than a tenth of the range")


def _run_loop(loop: Loop, communicator: Communicator) -> Steps:
    template = np.random.default_rng().standard_normal(loop.bytes // 4, dtype=np.float32)
    values = np.empty_like(template)
    full_world_size = world_size = communicator.get_attribute(Attribute.LOCAL_WORLD_SIZE)
    steps: list[Step] = []
    committed_after_loss = 0
    while committed_after_loss < loop.steps_after_loss:
        values[:] = template
        start_s = time.monotonic()
        try:
            world_size = communicator.all_reduce(values, op=ReduceOp.AVG).world_size
            verdict = COMMIT
        except PCCLError as error:
            world_size = communicator.get_attribute(Attribute.LOCAL_WORLD_SIZE)
            verdict = error.result.name
        steps.append(Step(start_s, time.monotonic(), verdict, world_size))
        committed_after_loss += verdict == COMMIT and world_size < full_world_size
        if loop.announce_steps:
            _reply(steps[-1])
    return Steps(steps)


if __name__ == "__main__":
    main()
