"""One case of a benchmark of a collective that is not all_reduce, on one rank: its arrays, its calls, the right answer.

The size of a case is that of the larger array, as in nccl-tests: the gathered one, or the one to be scattered. All
contenders work on the same arrays, each by its own ranks: those of pccl need not be the numbers of the benchmark.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from pccl import Communicator, ReduceOp
from pccl.bench.algorithms import ALGORITHMS
from pccl.bench.messages import (
    ALL_GATHER,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    GATHER,
    REDUCE,
    REDUCE_SCATTER,
    SCATTER,
    SEND,
    Case,
)

Array = NDArray[Any]
Call = Callable[[], None]
Timed = Callable[[Call], float]
"""Calls a collective and returns the seconds that it took."""


class Mover(Protocol):
    """A ruler for collectives that move elements. Each method prepares a call. The root is rank 0.

    A ruler is not measured in collectives of which it has no method: the raw ring has none of an `Exchanger`.
    """

    def all_gather(self, send: Array, recv: Array) -> Call: ...

    def reduce_scatter(self, send: Array, recv: Array) -> tuple[Call, Array]:
        """Return a call, and the array that has this rank's part of the sum after it. `send` may be overwritten."""

    def broadcast(self, array: Array) -> Call: ...

    def send(self, array: Array) -> Call:
        """Return a call that sends from rank 0 to rank 1."""

    def barrier(self) -> None: ...


class Exchanger(Mover, Protocol):
    """A ruler that has all collectives."""

    def all_to_all(self, send: Array, recv: Array) -> Call: ...

    def gather(self, send: Array, recv: Array) -> Call:
        """Return a call after which the root has a row of each rank in `recv`."""

    def scatter(self, send: Array, recv: Array) -> Call:
        """Return a call after which each rank has its row of the root's `send` in `recv`."""

    def reduce(self, array: Array) -> Call:
        """Return a call that replaces the root's array by the sum; other ranks' may be overwritten."""


class Work(Protocol):
    """The arrays of a case, and the right answer."""

    def turn(self, timed: Timed) -> float:
        """Run pccl once, check the result, and return the seconds that it took."""

    def ruler_turn(self, timed: Timed, ruler: Mover) -> float:
        """Run a ruler once, check the result, and return the seconds that it took."""


def work_of(case: Case, number: int, numbers: list[int], communicator: Communicator) -> Work:
    """Return the work of a case for the worker `number`. `numbers` are the workers' numbers by rank in pccl."""
    kinds: dict[str, Callable[[Case, int, list[int], Communicator], Work]] = {
        ALL_GATHER: _AllGather,
        REDUCE_SCATTER: _ReduceScatter,
        ALL_TO_ALL: _AllToAll,
        GATHER: _Gather,
        SCATTER: _Scatter,
        REDUCE: _Reduce,
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


class _Rows(_Base):
    """The work of a collective whose larger arrays have a row for each worker, in the order of ranks of whoever moves
    them. A row that goes from one worker to another holds a pattern plus a number that tells both."""

    def __init__(self, case: Case, number: int, numbers: list[int], communicator: Communicator) -> None:
        super().__init__(case, number, numbers, communicator)
        self._row = self._pattern(self._count // len(numbers))
        self._send = np.empty((len(numbers), self._row.size), self._dtype)
        self._recv = np.empty_like(self._send)

    def turn(self, timed: Timed) -> float:
        return self._turn(timed, self._numbers, lambda: self._call)

    def _call(self) -> None:
        raise NotImplementedError

    def _turn(self, timed: Timed, numbers: list[int], prepare: Callable[[], Call]) -> float:
        self._recv.fill(0)
        for row, to in zip(self._send, numbers, strict=True):
            np.add(self._row, self._dtype.type(self._mark(self._number, to)), out=row)
        elapsed_s = timed(prepare())
        self._check(numbers)
        return elapsed_s

    def _mark(self, number: int, to: int) -> int:
        return number * len(self._numbers) + to

    def _check(self, numbers: list[int]) -> None:
        raise NotImplementedError

    def _require_rows(self, rows: Array, marks: list[int]) -> None:
        for row, mark in zip(rows, marks, strict=True):
            _require(np.array_equal(row - self._dtype.type(mark), self._row))


class _AllToAll(_Rows):
    def _call(self) -> None:
        self._communicator.all_to_all(self._send, self._recv)

    def ruler_turn(self, timed: Timed, ruler: Mover) -> float:
        return self._turn(timed, sorted(self._numbers), lambda: _exchanger(ruler).all_to_all(self._send, self._recv))

    def _check(self, numbers: list[int]) -> None:
        self._require_rows(self._recv, [self._mark(number, self._number) for number in numbers])


class _Gather(_Rows):
    """The work of a gather of each worker's row for worker 0."""

    def _call(self) -> None:
        root = self._numbers.index(0)
        self._communicator.gather(self._send[root], self._recv, root=root)

    def ruler_turn(self, timed: Timed, ruler: Mover) -> float:
        return self._turn(timed, sorted(self._numbers), lambda: _exchanger(ruler).gather(self._send[0], self._recv))

    def _check(self, numbers: list[int]) -> None:
        if self._number == 0:
            self._require_rows(self._recv, [self._mark(number, 0) for number in numbers])


class _Scatter(_Rows):
    """The work of a scatter of worker 0's rows."""

    def _call(self) -> None:
        self._communicator.scatter(self._send, self._recv[0], root=self._numbers.index(0))

    def ruler_turn(self, timed: Timed, ruler: Mover) -> float:
        return self._turn(timed, sorted(self._numbers), lambda: _exchanger(ruler).scatter(self._send, self._recv[0]))

    def _check(self, numbers: list[int]) -> None:
        self._require_rows(self._recv[:1], [self._mark(0, self._number)])


class _Reduce(_Base):
    """The work of a sum for worker 0."""

    def __init__(self, case: Case, number: int, numbers: list[int], communicator: Communicator) -> None:
        super().__init__(case, number, numbers, communicator)
        self._given = self._pattern(self._count)
        self._send = np.empty_like(self._given)
        self._recv = self._send if self._in_place else np.empty_like(self._given)
        self._sum = self._given * self._dtype.type(len(numbers)) + self._dtype.type(sum(numbers))

    def turn(self, timed: Timed) -> float:
        return self._turn(timed, self._call, self._recv)

    def _call(self) -> None:
        root = self._numbers.index(0)
        self._communicator.reduce(self._send, self._recv, op=ReduceOp.SUM, root=root, algorithm=self._algorithm)

    def ruler_turn(self, timed: Timed, ruler: Mover) -> float:
        return self._turn(timed, _exchanger(ruler).reduce(self._send), self._send)

    def _turn(self, timed: Timed, call: Call, result: Array) -> float:
        np.add(self._given, self._dtype.type(self._number), out=self._send)
        elapsed_s = timed(call)
        _require(self._number != 0 or np.array_equal(result, self._sum))
        return elapsed_s


def _exchanger(ruler: Mover) -> Exchanger:
    """Return the ruler of a collective that all rulers have which are measured in it."""
    return cast(Exchanger, ruler)


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
            self._communicator.send(self._array, dst=self._numbers.index(1))
        elif self._number == 1:
            self._communicator.recv(self._array, src=self._numbers.index(0))

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
