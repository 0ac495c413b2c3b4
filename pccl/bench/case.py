"""One case of a benchmark on one rank: iterations, timed and checked.

Each rank contributes a pattern of small integers plus its own number, so the sum is known exactly in every type and
depends on every contribution.

In each iteration every contender has its turn, on the same arrays. The first one changes from iteration to iteration,
so that none always finds the caches of the same other. The timed part of a turn leaves out what all contenders need
alike: filling the arrays, a barrier, and checking the result. Ranks that share a machine check only once all are done:
else the first to end would take cores from the last, which would be hardest on a contender whose ranks end far apart.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pccl import Attribute, Communicator, ReduceOp
from pccl.bench.algorithms import ALGORITHMS
from pccl.bench.memory import Memory, MemoryWatch
from pccl.bench.messages import ALL_REDUCE, PCCL, Case, Samples
from pccl.bench.movement import Mover, work_of
from pccl.bench.quantization import error_max, parse_quantization

JOIN_POLL_S = 0.01
WATCHED_ITERATIONS = 3

Reduce = Callable[[], None]
Timed = Callable[[Reduce], float]
"""Calls a reduce and returns the seconds that it took."""
Turn = Callable[[], float]
"""Runs a contender once and returns the seconds that it took."""
Ruler = Callable[[NDArray[Any], int], Reduce]
"""Prepares the sum, in place, of an array that is cut into a number of tensors. Only what it returns is timed."""


def join(communicator: Communicator, world_size: int) -> None:
    """Return once `world_size` peers are accepted."""
    while communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < world_size:
        if communicator.are_peers_pending():
            communicator.update_topology()
        else:
            time.sleep(JOIN_POLL_S)


class Rank:
    """A rank, and the rulers that it measures pccl against. `barrier` returns once all ranks have called it."""

    def __init__(
        self,
        number: int,
        world_size: int,
        barrier: Callable[[], None],
        rulers: Mapping[str, Ruler],
        movers: Mapping[str, Mover],
        *,
        shares_machine: bool,
    ) -> None:
        """Measure as rank `number`. `rulers` are for all_reduce, `movers` for the other collectives."""
        self._number = number
        self._world_size = world_size
        self._barrier = barrier
        self._rulers = rulers
        self._movers = movers
        self._shares_machine = shares_machine

    def run(self, communicator: Communicator, case: Case) -> Samples:
        watch = MemoryWatch(lambda: communicator.stats) if case.memory else None
        turns = self._turns(communicator, case) if case.collective == ALL_REDUCE else self._moves(communicator, case)
        names = list(turns)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        with _no_garbage_collection():
            for iteration in range(case.warmup + case.iterations):
                first = iteration % len(names)
                for name in names[first:] + names[:first]:
                    one_s = turns[name]()
                    if iteration >= case.warmup:
                        seconds[name].append(one_s)
        return Samples(seconds, _watched(watch, turns[PCCL]) if watch else None)

    def _turns(self, communicator: Communicator, case: Case) -> dict[str, Turn]:
        work = _Work(case, self._number, self._world_size)
        turns: dict[str, Turn] = {PCCL: partial(work.turn, self._timed, work.reduce_with(communicator))}
        for name, ruler in self._rulers.items():
            turns[name] = partial(work.ruler_turn, self._timed, ruler(work.recv, case.tensors))
        return turns

    def _moves(self, communicator: Communicator, case: Case) -> dict[str, Turn]:
        numbers = communicator.all_gather(np.array(self._number)).array.tolist()
        work = work_of(case, self._number, numbers, communicator)
        turns: dict[str, Turn] = {PCCL: partial(work.turn, self._timed)}
        for name, mover in self._movers.items():
            if hasattr(mover, case.collective):
                turns[name] = partial(work.ruler_turn, self._timed, mover)
        return turns

    def _timed(self, reduce: Reduce) -> float:
        self._barrier()
        start_s = time.perf_counter()
        reduce()
        elapsed_s = time.perf_counter() - start_s
        if self._shares_machine:
            self._barrier()
        return elapsed_s


class _Work:
    """The arrays of a case, and the right answer. `recv` is `send` if the reduce is in place."""

    def __init__(self, case: Case, number: int, world_size: int) -> None:
        dtype = np.dtype(case.dtype)
        pattern = (np.arange(case.bytes // dtype.itemsize) % 13).astype(dtype)
        self._case = case
        self._options = parse_quantization(case.quantization)
        self._contribution = pattern + dtype.type(number)
        self._expected = pattern
        self._expected *= dtype.type(world_size)
        self._expected += dtype.type(sum(range(world_size)))
        self.send = np.empty_like(pattern)
        self.recv = self.send if case.in_place else np.empty_like(pattern)
        self._error_max: float | None = None
        if self._options is not None:
            largest, epsilon = float(self._expected.max()), float(np.finfo(dtype).eps)
            self._error_max = error_max(self._options, world_size, largest, epsilon)
            self._difference = np.empty_like(pattern)

    def reduce_with(self, communicator: Communicator) -> Reduce:
        sends = np.array_split(self.send, self._case.tensors)
        recvs = np.array_split(self.recv, self._case.tensors)
        algorithm = ALGORITHMS[self._case.algorithm]

        def reduce_whole() -> None:
            communicator.all_reduce(
                self.send, self.recv, op=ReduceOp.SUM, quantization_options=self._options, algorithm=algorithm
            )

        def reduce_parts() -> None:
            handles = [
                communicator.all_reduce_async(
                    send, recv, op=ReduceOp.SUM, tag=tag, quantization_options=self._options, algorithm=algorithm
                )
                for tag, (send, recv) in enumerate(zip(sends, recvs, strict=True))
            ]
            for handle in handles:
                is_success, status, _ = handle.wait()
                if not is_success:
                    raise RuntimeError(f"the reduce failed with {status.name}")

        return reduce_whole if self._case.tensors == 1 else reduce_parts

    def turn(self, timed: Timed, reduce: Reduce) -> float:
        """Run pccl once, check the result, and return the seconds that it took."""
        np.copyto(self.send, self._contribution)
        if self.recv is not self.send:
            self.recv.fill(0)
        elapsed_s = timed(reduce)
        if self.recv is not self.send and not np.array_equal(self.send, self._contribution):
            raise RuntimeError("the reduce has changed what it was given")
        self._check(self._error_max)
        return elapsed_s

    def ruler_turn(self, timed: Timed, reduce: Reduce) -> float:
        """Run a ruler once, check the result, and return the seconds that it took. Rulers always work in place."""
        np.copyto(self.recv, self._contribution)
        elapsed_s = timed(reduce)
        self._check(None)
        return elapsed_s

    def _check(self, error_max: float | None) -> None:
        """Raise RuntimeError if the result is wrong: a benchmark of wrong results is worthless."""
        if error_max is None:
            if not np.array_equal(self.recv, self._expected):
                wrong = np.count_nonzero(self.recv != self._expected)
                raise RuntimeError(f"wrong result in {wrong} elements")
            return
        np.subtract(self.recv, self._expected, out=self._difference)
        np.abs(self._difference, out=self._difference)
        if not (error := float(self._difference.max())) <= error_max:  # NaN is not
            raise RuntimeError(f"a quantized result is off by {error:g}, more than the {error_max:g} that it may be")


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _watched(watch: MemoryWatch, turn: Callable[[], float]) -> Memory:
    with watch:
        for _ in range(WATCHED_ITERATIONS):
            turn()
    return watch.result()
