"""The arrays of one op: what is sent and received, and whether the library leaves alone what it has given back.

*Errors.* Whatever error a call raises, what it was given must be as it was and is never touched again. So after an
error the arrays are compared with what they held, filled with a mark that is looked for much later (`Marked`), and the
next attempt gets others.
"""

from __future__ import annotations

from collections import deque

import blake3
import numpy as np

from pccl import QuantizationAlgorithm, QuantizationOptions, ReduceDescriptor, ReduceOpDescriptor
from pccl.stress.errors import BrokenPromiseError
from pccl.stress.messages import Outcome
from pccl.stress.values import Array, Op, WrongResultError

MARK = 0xA5
MARKED_KEPT = 200
"""The most arrays that are kept to be looked at again."""


class Marked:
    """Arrays that the library has given back with an error, and must not touch any more."""

    def __init__(self) -> None:
        self._kept: deque[tuple[str, Array]] = deque()

    def add(self, what: str, *arrays: Array) -> None:
        for array in arrays:
            array.view(np.uint8)[:] = MARK
            self._kept.append((what, array))
        while len(self._kept) > MARKED_KEPT:
            self._check(*self._kept.popleft())

    def check(self) -> None:
        for what, array in list(self._kept):
            self._check(what, array)

    @staticmethod
    def _check(what: str, array: Array) -> None:
        touched = np.flatnonzero(array.view(np.uint8) != MARK)
        if len(touched):
            raise BrokenPromiseError(
                f"{what} had failed, and later {len(touched)} bytes of its arrays were written, the first is number "
                f"{touched[0]}"
            )


class Buffers:
    """The arrays that one op sends and receives."""

    def __init__(self, op: Op, step: int, slot: int, in_place: bool, marked: Marked) -> None:
        self.op = op
        self.step = step
        """The state's revision: an op of another step must not go together with this one."""
        self.aborts = 0
        self._slot = slot
        self._in_place = in_place
        self._marked = marked
        self._original = op.contribution(slot)
        self._make()

    def _make(self) -> None:
        self.send = self._original.copy()
        self.recv = self.send if self._in_place else np.empty_like(self.send)

    def take_back(self) -> None:
        """Check after an error that all is as it was, and go on with other arrays."""
        self.check_untouched()
        self._marked.add(str(self.op), self.send, *(() if self._in_place else (self.recv,)))
        self._make()

    def descriptor(self) -> ReduceOpDescriptor:
        op = self.op
        quantization = op.quantization or QuantizationOptions(algorithm=QuantizationAlgorithm.NONE)
        descriptor = ReduceDescriptor(op.count, op.op, op.tag, None, quantization, op.algorithm, self.step)
        return ReduceOpDescriptor.from_numpy(self.send, self.recv, descriptor)

    def check_untouched(self) -> None:
        """Check after an error that the input is as it was. BrokenPromiseError."""
        if self.send.tobytes() != self._original.tobytes():
            wrong = np.flatnonzero(self.send != self._original)
            raise BrokenPromiseError(
                f"{self.op} failed and its input was not restored: {len(wrong)} elements differ, the first is "
                f"number {wrong[:1].tolist()}"
            )

    @property
    def is_committed(self) -> bool:
        """Whether an op in place was committed whose end this peer was not told: a result is never equal to an input.
        Always false for an op that is not in place."""
        return self.send.tobytes() != self._original.tobytes()

    def outcome(self, slot: int, world_size: int) -> Outcome:
        """Reads the result. BrokenPromiseError if it is none."""
        try:
            participants = sorted(self.op.participants(self.recv))
        except WrongResultError as error:
            raise BrokenPromiseError(f"a wrong result: {error}") from None
        if self.send is not self.recv and self.send.tobytes() != self._original.tobytes():
            raise BrokenPromiseError(f"{self.op} was committed and its separate input was changed")
        if slot not in participants:
            raise BrokenPromiseError(f"{self.op} was committed without this peer's own part, over slots {participants}")
        digest = blake3.blake3(self.recv.tobytes()).hexdigest(8)
        return Outcome(self.op.number, participants, world_size, digest, self.aborts)
