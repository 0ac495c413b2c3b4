"""One case of a benchmark of a collective that is not all_reduce, on one rank: its arrays, its calls, the right answer.

The size of a case is that of the larger array, as in nccl-tests: the gathered one, or the one to be scattered. All
contenders work on the same arrays, each by its own ranks: those of pccl need not be the numbers of the benchmark.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pccl import Communicator, ReduceOp
from pccl.bench.algorithms import ALGORITHMS
from pccl.bench.messages import ALL_GATHER, BARRIER, BROADCAST, REDUCE_SCATTER, SEND, Case

Array = NDArray[Any]
Call = Callable[[], None]
Timed = Callable[[Call], float]
"""Calls a collective and returns the seconds that it took."""


class Mover(Protocol):
    """A ruler for collectives that move elements. Each method prepares a call. The root of a broadcast is rank 0."""

    def all_gather(self, send: Array, recv: Array) -> Call: ...

    def reduce_scatter(self, send: Array, recv: Array) -> tuple[Call, Array]:
        """Return a call, and the array that has this rank's part of the sum after it. `send` may be overwritten."""

    def broadcast(self, array: Array) -> Call: ...

    def send(self, array: Array) -> Call:
        """Return a call that sends from rank 0 to rank 1."""

    def barrier(self) -> None: ...


class Work(Protocol):
    """The arrays of a case, and the right answer."""

    def turn(self, timed: Timed) -> float:
        """Run pccl once, check the result, and return the seconds that it took."""

    def ruler_turn(self, timed: Timed, ruler: Mover) -> float:
        """Run a ruler once, check the result, and return the seconds that it took."""


def work_of(case: Case, number: int, numbers: list[int], communicator: Communicator) -> Work:
    """Return the work of a case for the worker `number`. `numbers` are the workers' numbers by rank in pccl."""
    kinds: dict[str, type[_AllGather | _ReduceScatter | _Broadcast | _Send | _Barrier]] = {
        ALL_GATHER: _AllGather,
        REDUCE_SCATTER: _ReduceScatter,
        BROADCAST: _Broadcast,
        SEND: _Send,
        BARRIER: _Barrier,
    }
    return kinds[case.collective](case, number, numbers, communicator)


class _Base:
    def __init__(self, case: Case, number: int, numbers: list[int], communicator: Communicator) -> None:
        self._dtype = np.dtype(case.dtype)
        self._count = case.bytes // self._dtype.itemsize
        self._number = number
        self._numbers = numbers
        self._rank = numbers.index(number)
        self._communicator = communicator
        self._algorithm = ALGORITHMS[case.algorithm]
        self._in_place = case.in_place

    def _pattern(self, count: int) -> Array:
        return (np.arange(count) % 13).astype(self._dtype)


class _AllGather(_Base):
    def __init__(self, case: Case, number: int, numbers: list[int], communicator: Communicator) -> None:
        super().__init__(case, number, numbers, communicator)
        self._row = self._pattern(self._count // len(numbers))
        self._recv = np.empty((len(numbers), self._row.size), self._dtype)
        self._send = np.empty_like(self._row)

    def turn(self, timed: Timed) -> float:
        send = self._recv[self._rank] if self._in_place else self._send
        self._fill(send)
        elapsed_s = timed(lambda: self._call(send))
        self._check(self._numbers)
        return elapsed_s

    def _call(self, send: Array) -> None:
        self._communicator.all_gather(send, self._recv, algorithm=self._algorithm)

    def ruler_turn(self, timed: Timed, ruler: Mover) -> float:
        send = self._recv[self._number]
        self._fill(send)
        elapsed_s = timed(ruler.all_gather(send, self._recv))
        self._check(sorted(self._numbers))
        return elapsed_s

    def _fill(self, send: Array) -> None:
        self._recv.fill(0)
        np.add(self._row, self._dtype.type(self._number), out=send)

    def _check(self, numbers: list[int]) -> None:
        for row, number in zip(self._recv, numbers, strict=True):
            _require(np.array_equal(row - self._dtype.type(number), self._row))


class _ReduceScatter(_Base):
    def __init__(self, case: Case, number: int, numbers: list[int], communicator: Communicator) -> None:
        super().__init__(case, number, numbers, communicator)
        world = len(numbers)
        self._given = self._pattern(self._count // world * world)
        self._send = np.empty_like(self._given)
        self._recv = np.empty(self._given.size // world, self._dtype)
        self._sum = self._given * self._dtype.type(world) + self._dtype.type(sum(numbers))

    def turn(self, timed: Timed) -> float:
        self._fill()
        elapsed_s = timed(self._call)
        self._check(self._recv, self._rank)
        return elapsed_s

    def _call(self) -> None:
        self._communicator.reduce_scatter(self._send, self._recv, op=ReduceOp.SUM, algorithm=self._algorithm)

    def ruler_turn(self, timed: Timed, ruler: Mover) -> float:
        self._fill()
        call, part = ruler.reduce_scatter(self._send, self._recv)
        elapsed_s = timed(call)
        self._check(part, self._number)
        return elapsed_s

    def _fill(self) -> None:
        np.add(self._given, self._dtype.type(self._number), out=self._send)
        self._recv.fill(0)

    def _check(self, part: Array, rank: int) -> None:
        size = self._recv.size
        _require(np.array_equal(part, self._sum[rank * size : (rank + 1) * size]))


class _Broadcast(_Base):
    def __init__(self, case: Case, number: int, numbers: list[int], communicator: Communicator) -> None:
        super().__init__(case, number, numbers, communicator)
        self._given = self._pattern(self._count)
        self._array = np.empty_like(self._given)

    def turn(self, timed: Timed) -> float:
        return self._turn(timed, self._call)

    def _call(self) -> None:
        self._communicator.broadcast(self._array, root=self._numbers.index(0), algorithm=self._algorithm)

    def ruler_turn(self, timed: Timed, ruler: Mover) -> float:
        return self._turn(timed, ruler.broadcast(self._array))

    def _turn(self, timed: Timed, call: Call) -> float:
        if self._number == 0:
            np.copyto(self._array, self._given)
        else:
            self._array.fill(0)
        elapsed_s = timed(call)
        _require(self._is_right())
        return elapsed_s

    def _is_right(self) -> bool:
        return np.array_equal(self._array, self._given)


class _Send(_Broadcast):
    """The work of a send from worker 0 to worker 1, while the others do nothing."""

    def _call(self) -> None:
        if self._number == 0:
            self._communicator.send(self._array, to=self._numbers.index(1))
        elif self._number == 1:
            self._communicator.recv(self._array, from_=self._numbers.index(0))

    def ruler_turn(self, timed: Timed, ruler: Mover) -> float:
        return self._turn(timed, ruler.send(self._array))

    def _is_right(self) -> bool:
        return self._number > 1 or super()._is_right()


class _Barrier(_Base):
    def turn(self, timed: Timed) -> float:
        return timed(self._call)

    def _call(self) -> None:
        self._communicator.barrier()

    def ruler_turn(self, timed: Timed, ruler: Mover) -> float:
        return timed(ruler.barrier)


def _require(is_right: bool) -> None:
    """Raise RuntimeError if a result is wrong: a benchmark of wrong results is worthless."""
    if not is_right:
        raise RuntimeError("wrong result")
