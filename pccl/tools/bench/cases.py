"""One benchmark case on one rank: its arrays, its timed calls and the check of the result.

Each rank contributes small integers that depend on its number, so results are exact in every type. The contenders take
turns on the same arrays, with a different one first in each iteration. Filling the arrays, the barrier and the check
are not timed. Ranks that share a machine check after a second barrier, so that the first to finish does not take cores
from the last. The size of a case is that of the larger array, as in nccl-tests.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pccl import Communicator, QuantizationOptions, ReduceAlgorithm, ReduceOp
from pccl.tools.bench.plan import (
    ALGORITHMS,
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    PCCL,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SEND,
    Case,
    error_max,
    parse_quantization,
)

WATCHED_ITERATIONS = 3
WATCH_S = 0.0005

Array = NDArray[Any]
Call = Callable[[], object]
Ruler = Any
"""Another implementation to compare with. Its methods have the names of collectives and return a call. Collectives
without a method are not measured."""


class Memory(msgspec.Struct, frozen=True):
    """The engine's memory beyond the caller's arrays."""

    scratch_bytes_max: int
    """The maximum that ops used at any time."""
    held_bytes_max: int
    """The maximum at any time, including memory that is kept for later ops."""


class Samples(msgspec.Struct, frozen=True):
    seconds: dict[str, list[float]]
    memory: Memory | None


def measure_case(
    case: Case,
    communicator: Communicator,
    barrier: Callable[[], object],
    rulers: Mapping[str, Ruler],
    *,
    shares_machine: bool,
) -> Samples:
    """Measure a case on this rank, with pccl and the rulers."""
    work = Work(case, communicator)
    contenders = {PCCL: None, **{name: one for name, one in rulers.items() if hasattr(one, case.collective)}}
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}

    def turn(ruler: Ruler | None) -> float:
        """Run pccl or a ruler once, check the result, and return the elapsed seconds."""
        call, check = work.prepared(ruler)
        barrier()
        start_s = time.perf_counter()
        call()
        elapsed_s = time.perf_counter() - start_s
        if shares_machine:
            barrier()
        check()
        return elapsed_s

    with _no_garbage_collection():
        for iteration in range(case.warmup + case.iterations):
            first = iteration % len(names)
            for name in names[first:] + names[:first]:
                time.sleep(case.pause_s)
                one_s = turn(contenders[name])
                if iteration >= case.warmup:
                    seconds[name].append(one_s)
    memory = watched_memory(lambda: communicator.stats, lambda: turn(None)) if case.memory else None
    return Samples(seconds, memory)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def watched_memory(stats: Callable[[], Mapping[str, int]], turn: Call) -> Memory:
    """Return the peak memory during some untimed turns, by polling `stats` from a thread."""
    is_over = threading.Event()
    scratch, held = [0], [0]

    def watch() -> None:
        while True:
            found = stats()
            scratch.append(found["scratch_bytes"])
            held.append(found["scratch_bytes"] + found["pool_bytes"])
            if is_over.wait(WATCH_S):
                return

    watcher = threading.Thread(target=watch, name="memory watch", daemon=True)
    watcher.start()
    try:
        for _ in range(WATCHED_ITERATIONS):
            turn()
    finally:
        is_over.set()
        watcher.join()
    return Memory(max(scratch), max(held))


class Work:
    """A case's arrays, the calls on them and the expected results.

    A row from one rank to another holds a pattern plus a mark for both ranks; a contribution to a sum holds the pattern
    plus the rank. Rank 0 is the root of a collective and the sender of `send`; rank 1 is the receiver.
    """

    def __init__(self, case: Case, communicator: Communicator) -> None:
        self._case = case
        self._dtype = np.dtype(case.dtype)
        self._rank, self._world_size = communicator.membership.rank, communicator.world_size
        self._communicator = communicator
        self._options = parse_quantization(case.quantization)
        self._whole = (np.arange(case.bytes // self._dtype.itemsize) % 13).astype(self._dtype)
        self._row = self._whole[: self._whole.size // self._world_size]
        self._given, self._expected = self._given_and_expected()
        self._send = np.empty_like(self._given)
        self._recv = self._send
        if case.collective in (ALL_GATHER, GATHER, ALL_TO_ALL):
            self._recv = np.empty((self._world_size, self._row.size), self._dtype)
        elif case.collective in (SCATTER, REDUCE_SCATTER):
            self._recv = np.empty_like(self._row)
        elif case.collective in (ALL_REDUCE, REDUCE) and not case.in_place:
            self._recv = np.empty_like(self._given)

    def _given_and_expected(self) -> tuple[Array, Array | None]:
        """Return the input and the expected result, or None if this rank gets no result."""
        own, row, whole, world = self._rank, self._row, self._whole, self._world_size
        ranks = range(world)
        match self._case.collective:
            case "all_reduce" | "reduce" | "reduce_scatter" as collective:
                whole = whole if collective != REDUCE_SCATTER else whole[: row.size * world]
                total = whole * self._dtype.type(world) + self._dtype.type(sum(ranks))
                if collective == REDUCE_SCATTER:
                    total = total.reshape(world, -1)[own]
                return self._marked(whole, own), total if collective != REDUCE or own == 0 else None
            case "all_gather":
                return self._marked(row, own), self._rows(ranks)
            case "gather":
                return self._marked(row, own), self._rows(ranks) if own == 0 else None
            case "scatter":
                return self._rows(ranks), self._marked(row, own)
            case "all_to_all":
                return self._rows(own * world + each for each in ranks), self._rows(
                    each * world + own for each in ranks
                )
            case "broadcast" | "send" as collective:
                is_receiver = collective == BROADCAST or own < 2
                return whole if own == 0 else np.zeros_like(whole), whole if is_receiver else None
        return np.empty(0, self._dtype), None  # a barrier

    def _marked(self, pattern: Array, mark: int) -> Array:
        marked: Array = pattern + self._dtype.type(mark)
        return marked

    def _rows(self, marks: Iterable[int]) -> Array:
        return np.stack([self._marked(self._row, mark) for mark in marks])

    def prepared(self, ruler: Ruler | None) -> tuple[Call, Callable[[], None]]:
        """Fill the arrays. Return the call of pccl or a ruler, and a check of its result. Rulers work in place."""
        given, expected = self._given, self._expected
        is_in_place = ruler is not None or self._case.in_place
        send, recv = self._send, self._recv
        if self._case.collective == ALL_GATHER and is_in_place:
            send = recv[self._rank]
        elif self._case.collective in (ALL_REDUCE, REDUCE) and is_in_place:
            recv = send
        recv.fill(0)
        np.copyto(send, given)
        if ruler is None:
            call, result = self._own_call(send, recv), recv
        else:
            call, result = self._call_of(ruler, send, recv)

        def check() -> None:
            if expected is not None:
                self._check(result, expected, None if ruler is not None else self._options)
            if not is_in_place and self._case.collective == ALL_REDUCE and not np.array_equal(send, given):
                raise RuntimeError("the reduce has modified its input")

        return call, check

    def _own_call(self, send: Array, recv: Array) -> Call:
        peer, collective = self._communicator, self._case.collective
        algorithm = ALGORITHMS[self._case.algorithm]
        if collective == ALL_REDUCE:
            return partial(self._reduce_parts, send, recv, algorithm)
        if collective == SEND:
            if self._rank == 0:
                return partial(peer.send, send, dst=1)
            return partial(peer.recv, recv, src=0) if self._rank == 1 else lambda: None
        calls: dict[str, Call] = {
            ALL_GATHER: partial(peer.all_gather, send, recv, algorithm=algorithm),
            REDUCE_SCATTER: partial(peer.reduce_scatter, send, recv, op=ReduceOp.SUM, algorithm=algorithm),
            ALL_TO_ALL: partial(peer.all_to_all, send, recv),
            GATHER: partial(peer.gather, send, recv, root=0),
            SCATTER: partial(peer.scatter, send, recv, root=0),
            REDUCE: partial(peer.reduce, send, recv, op=ReduceOp.SUM, root=0, algorithm=algorithm),
            BROADCAST: partial(peer.broadcast, send, root=0, algorithm=algorithm),
            BARRIER: peer.barrier,
        }
        return calls[collective]

    def _reduce_parts(self, send: Array, recv: Array, algorithm: ReduceAlgorithm | None) -> None:
        options: dict[str, Any] = {"op": ReduceOp.SUM, "quantization": self._options, "algorithm": algorithm}
        tensors = self._case.tensors
        if tensors == 1:
            self._communicator.all_reduce(send, recv, **options)
            return
        parts = zip(np.array_split(send, tensors), np.array_split(recv, tensors), strict=True)
        handles = [self._communicator.all_reduce_async(*part, tag=tag, **options) for tag, part in enumerate(parts)]
        for handle in handles:
            handle.result()

    def _call_of(self, ruler: Ruler, send: Array, recv: Array) -> tuple[Call, Array]:
        """Return a ruler's call and the array that holds its result."""
        collective = self._case.collective
        method = getattr(ruler, collective)
        if collective == BARRIER:
            return method, recv
        if collective == ALL_REDUCE:
            return method(send, self._case.tensors), recv
        if send is recv:
            return method(send), recv
        if collective == REDUCE_SCATTER:
            call, part = method(send, recv)
            return call, part
        return method(send, recv), recv

    def _check(self, result: Array, expected: Array, quantization: QuantizationOptions | None) -> None:
        """Raise RuntimeError for a wrong result, whose time would be meaningless."""
        if quantization is None:
            if not np.array_equal(result, expected):
                raise RuntimeError("wrong result")
            return
        largest, epsilon = float(expected.max()), float(np.finfo(self._dtype).eps)
        bound = error_max(quantization, self._world_size, largest, epsilon)
        error = float(np.abs(result - expected).max())
        if not error <= bound:  # also for NaN
            raise RuntimeError(f"a quantized result is off by {error:g}, more than the bound of {bound:g}")
