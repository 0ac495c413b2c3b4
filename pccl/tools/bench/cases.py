"""One case of a benchmark on one rank: its arrays, its timed calls and the check of the result.

Each rank contributes small integers that depend on its number, so results are exact in every type. The contenders take
turns on the same arrays, each turn starting with another one, so that none always finds the caches of the same other.
Filling the arrays, the barrier and the check are not timed. Ranks that share a machine check after a second barrier:
the first to end must not take cores from the last.

The size of a case is that of the larger array, as in nccl-tests: the gathered one, or the one to be scattered. Rank
numbers of pccl may differ from the numbers of the benchmark: `order` lists the numbers by rank.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pccl import Attribute, Communicator, ReduceOp
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

JOIN_POLL_S = 0.01
WATCHED_ITERATIONS = 3
WATCH_S = 0.0005

Array = NDArray[Any]
Call = Callable[[], object]
Timed = Callable[[Call], float]
"""Makes a call and returns the seconds that it took."""
Ruler = Any
"""Another implementation. Its methods have the names of collectives and return a call; a collective without a method
is not measured with it."""


class Memory(msgspec.Struct, frozen=True):
    """The engine's memory beyond the caller's arrays."""

    scratch_bytes_max: int
    """The most that ops had in use at any time."""
    held_bytes_max: int
    """The most at any time, with memory that is kept for later ops."""


class Samples(msgspec.Struct, tag=True, frozen=True):
    """A worker's answer to a Case."""

    seconds: dict[str, list[float]]
    """The seconds of each contender's iterations."""
    memory: Memory | None


def join(communicator: Communicator, world_size: int) -> None:
    """Return once `world_size` peers are accepted."""
    while communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < world_size:
        if communicator.are_peers_pending():
            communicator.update_topology()
        else:
            time.sleep(JOIN_POLL_S)


class Rank:
    """A rank of the benchmark and the rulers that pccl is measured against."""

    def __init__(
        self, number: int, barrier: Callable[[], object], rulers: Mapping[str, Ruler], *, shares_machine: bool
    ) -> None:
        """`barrier` returns once all ranks have called it."""
        self._number = number
        self._barrier = barrier
        self._rulers = rulers
        self._shares_machine = shares_machine

    def run(self, communicator: Communicator, case: Case) -> Samples:
        order = communicator.all_gather(np.array(self._number)).array.tolist()
        work = _WORKS[case.collective](case, self._number, order, communicator)
        contenders = {PCCL: None, **{name: one for name, one in self._rulers.items() if hasattr(one, case.collective)}}
        names = list(contenders)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        with _no_garbage_collection():
            for iteration in range(case.warmup + case.iterations):
                first = iteration % len(names)
                for name in names[first:] + names[:first]:
                    one_s = work.turn(self._timed, contenders[name])
                    if iteration >= case.warmup:
                        seconds[name].append(one_s)
        memory = watched_memory(lambda: communicator.stats, lambda: work.turn(self._timed)) if case.memory else None
        return Samples(seconds, memory)

    def _timed(self, call: Call) -> float:
        self._barrier()
        start_s = time.perf_counter()
        call()
        elapsed_s = time.perf_counter() - start_s
        if self._shares_machine:
            self._barrier()
        return elapsed_s


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def watched_memory(stats: Callable[[], Mapping[str, int]], turn: Call) -> Memory:
    """Return the most memory seen during some untimed turns, by polling `stats` from a thread."""
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


class _Work:
    """The arrays of a case. Subclasses fill them and return the call to be timed, and check the result."""

    def __init__(self, case: Case, number: int, order: list[int], communicator: Communicator) -> None:
        self._case = case
        self._dtype = np.dtype(case.dtype)
        self._count = case.bytes // self._dtype.itemsize
        self._number = number
        self._order = order
        self._communicator = communicator
        self._algorithm = ALGORITHMS[case.algorithm]
        self._allocate()

    def turn(self, timed: Timed, ruler: Ruler | None = None) -> float:
        """Run pccl or a ruler once, check the result, and return the seconds that it took."""
        order = self._order if ruler is None else sorted(self._order)
        call = self._call_of(ruler, order)
        elapsed_s = timed(call)
        self._check(ruler, order)
        return elapsed_s

    def _allocate(self) -> None: ...

    def _call_of(self, ruler: Ruler | None, order: list[int]) -> Call:
        raise NotImplementedError

    def _check(self, ruler: Ruler | None, order: list[int]) -> None: ...

    @property
    def _root(self) -> int:
        """pccl's rank of number 0."""
        return self._order.index(0)

    def _pattern(self, count: int) -> Array:
        pattern: Array = (np.arange(count) % 13).astype(self._dtype)
        return pattern

    def _sum_of(self, pattern: Array) -> Array:
        """Return the sum over all ranks, each of which gives the pattern plus its number."""
        total: Array = pattern * self._dtype.type(len(self._order)) + self._dtype.type(sum(self._order))
        return total


class _AllReduce(_Work):
    def _allocate(self) -> None:
        pattern = self._pattern(self._count)
        self._options = parse_quantization(self._case.quantization)
        self._contribution = pattern + self._dtype.type(self._number)
        self._expected = self._sum_of(pattern)
        self._send = np.empty_like(pattern)
        self._recv = self._send if self._case.in_place else np.empty_like(pattern)

    def _call_of(self, ruler: Ruler | None, order: list[int]) -> Call:
        if ruler is not None:
            np.copyto(self._recv, self._contribution)
            call: Call = ruler.all_reduce(self._recv, self._case.tensors)
            return call
        if self._recv is not self._send:
            self._recv.fill(0)
        np.copyto(self._send, self._contribution)
        return self._reduce_whole if self._case.tensors == 1 else self._reduce_parts

    def _reduce_whole(self) -> None:
        self._communicator.all_reduce(
            self._send, self._recv, op=ReduceOp.SUM, quantization_options=self._options, algorithm=self._algorithm
        )

    def _reduce_parts(self) -> None:
        tensors = self._case.tensors
        parts = zip(np.array_split(self._send, tensors), np.array_split(self._recv, tensors), strict=True)
        handles = [
            self._communicator.all_reduce_async(
                *(send, recv),
                op=ReduceOp.SUM,
                tag=tag,
                quantization_options=self._options,
                algorithm=self._algorithm,
            )
            for tag, (send, recv) in enumerate(parts)
        ]
        for handle in handles:
            handle.result()

    def _check(self, ruler: Ruler | None, order: list[int]) -> None:
        if ruler is None and self._recv is not self._send and not np.array_equal(self._send, self._contribution):
            raise RuntimeError("the reduce has changed its input")
        if ruler is not None or self._options is None:
            _require(np.array_equal(self._recv, self._expected))
            return
        largest, epsilon = float(self._expected.max()), float(np.finfo(self._dtype).eps)
        bound = error_max(self._options, len(order), largest, epsilon)
        error = float(np.abs(self._recv - self._expected).max())
        if not error <= bound:  # also for NaN
            raise RuntimeError(f"a quantized result is off by {error:g}, more than the bound of {bound:g}")


class _AllGather(_Work):
    def _allocate(self) -> None:
        self._row = self._pattern(self._count // len(self._order))
        self._recv = np.empty((len(self._order), self._row.size), self._dtype)
        self._send = np.empty_like(self._row)

    def _call_of(self, ruler: Ruler | None, order: list[int]) -> Call:
        is_in_place = ruler is not None or self._case.in_place
        send = self._recv[order.index(self._number)] if is_in_place else self._send
        self._recv.fill(0)
        np.add(self._row, self._dtype.type(self._number), out=send)
        if ruler is not None:
            call: Call = ruler.all_gather(send, self._recv)
            return call
        return lambda: self._communicator.all_gather(send, self._recv, algorithm=self._algorithm)

    def _check(self, ruler: Ruler | None, order: list[int]) -> None:
        for row, number in zip(self._recv, order, strict=True):
            _require(np.array_equal(row - self._dtype.type(number), self._row))


class _ReduceScatter(_Work):
    def _allocate(self) -> None:
        world = len(self._order)
        self._given = self._pattern(self._count // world * world)
        self._send = np.empty_like(self._given)
        self._recv = np.empty(self._given.size // world, self._dtype)
        self._sum = self._sum_of(self._given)
        self._part = self._recv

    def _call_of(self, ruler: Ruler | None, order: list[int]) -> Call:
        np.add(self._given, self._dtype.type(self._number), out=self._send)
        self._recv.fill(0)
        if ruler is not None:
            call: Call
            call, self._part = ruler.reduce_scatter(self._send, self._recv)
            return call
        self._part = self._recv
        return lambda: self._communicator.reduce_scatter(
            self._send, self._recv, op=ReduceOp.SUM, algorithm=self._algorithm
        )

    def _check(self, ruler: Ruler | None, order: list[int]) -> None:
        first = order.index(self._number) * self._recv.size
        _require(np.array_equal(self._part, self._sum[first : first + self._recv.size]))


class _Exchange(_Work):
    """all_to_all, gather and scatter: arrays with a row per rank. A row from one rank to another holds a pattern plus
    a mark of both numbers."""

    def _allocate(self) -> None:
        self._row = self._pattern(self._count // len(self._order))
        self._send = np.empty((len(self._order), self._row.size), self._dtype)
        self._recv = np.empty_like(self._send)

    def _call_of(self, ruler: Ruler | None, order: list[int]) -> Call:
        self._recv.fill(0)
        for row, receiver in zip(self._send, order, strict=True):
            np.add(self._row, self._dtype.type(self._number * len(order) + receiver), out=row)
        root, arrays = order.index(0), (self._send, self._recv)
        if self._case.collective == GATHER:
            arrays = self._send[root], self._recv
        elif self._case.collective == SCATTER:
            arrays = self._send, self._recv[0]
        if ruler is not None:
            call: Call = getattr(ruler, self._case.collective)(*arrays)
            return call
        if self._case.collective == ALL_TO_ALL:
            return lambda: self._communicator.all_to_all(*arrays)
        collective = self._communicator.gather if self._case.collective == GATHER else self._communicator.scatter
        return lambda: collective(*arrays, root=root)

    def _check(self, ruler: Ruler | None, order: list[int]) -> None:
        senders: Sequence[int] = order
        if self._case.collective == SCATTER:
            senders = [0]
        elif self._case.collective == GATHER and self._number != 0:
            senders = []
        for row, sender in zip(self._recv, senders, strict=False):
            _require(np.array_equal(row - self._dtype.type(sender * len(order) + self._number), self._row))


class _Reduce(_Work):
    """A sum for number 0."""

    def _allocate(self) -> None:
        self._given = self._pattern(self._count)
        self._send = np.empty_like(self._given)
        self._recv = self._send if self._case.in_place else np.empty_like(self._given)
        self._sum = self._sum_of(self._given)

    def _call_of(self, ruler: Ruler | None, order: list[int]) -> Call:
        np.add(self._given, self._dtype.type(self._number), out=self._send)
        if ruler is not None:
            call: Call = ruler.reduce(self._send)
            return call
        return lambda: self._communicator.reduce(
            self._send, self._recv, op=ReduceOp.SUM, root=self._root, algorithm=self._algorithm
        )

    def _check(self, ruler: Ruler | None, order: list[int]) -> None:
        result = self._recv if ruler is None else self._send
        _require(self._number != 0 or np.array_equal(result, self._sum))


class _Broadcast(_Work):
    """A broadcast from number 0, or a send from number 0 to number 1."""

    def _allocate(self) -> None:
        self._given = self._pattern(self._count)
        self._array = np.empty_like(self._given)

    def _call_of(self, ruler: Ruler | None, order: list[int]) -> Call:
        if self._number == 0:
            np.copyto(self._array, self._given)
        else:
            self._array.fill(0)
        if ruler is not None:
            call: Call = getattr(ruler, self._case.collective)(self._array)
            return call
        if self._case.collective == BROADCAST:
            return lambda: self._communicator.broadcast(self._array, root=self._root, algorithm=self._algorithm)
        if self._number == 0:
            return lambda: self._communicator.send(self._array, dst=order.index(1))
        if self._number == 1:
            return lambda: self._communicator.recv(self._array, src=order.index(0))
        return lambda: None

    def _check(self, ruler: Ruler | None, order: list[int]) -> None:
        is_receiver = self._case.collective == BROADCAST or self._number < 2
        _require(not is_receiver or np.array_equal(self._array, self._given))


class _Barrier(_Work):
    def _call_of(self, ruler: Ruler | None, order: list[int]) -> Call:
        call: Call = self._communicator.barrier if ruler is None else ruler.barrier
        return call


def _require(is_right: bool) -> None:
    """Raise RuntimeError for a wrong result: its time would be worthless."""
    if not is_right:
        raise RuntimeError("wrong result")


_WORKS: dict[str, type[_Work]] = {
    ALL_REDUCE: _AllReduce,
    ALL_GATHER: _AllGather,
    REDUCE_SCATTER: _ReduceScatter,
    ALL_TO_ALL: _Exchange,
    GATHER: _Exchange,
    SCATTER: _Exchange,
    REDUCE: _Reduce,
    BROADCAST: _Broadcast,
    SEND: _Broadcast,
    BARRIER: _Barrier,
}
