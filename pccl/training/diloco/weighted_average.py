"""An average of the peers' vectors, weighted for example by the number of tokens or samples they trained on.

The mean is `sum(w * x) / sum(w)` over the peers of one world. Two ops are launched together: the *sum*, an all-reduce
of each peer's vector times its weight, and the *notes*, an all-gather of its weight and its seconds per inner step. A
peer may be lost between the two. Membership only shrinks between them, so worlds of equal size are identical. If
the sizes differ, all survivors relaunch the op with the larger world until the sizes agree.

Each product is rounded once to the vector's type. The quotient is computed in float64 and rounded once. All peers
raise an error if the sum is not finite. If all weights are 0, the mean is 0.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pccl import Communicator, ErrorFeedback, PCCLError, QuantizationOptions, ReduceOp, Result
from pccl._floating_point import default_environment
from pccl.training.compression import Compressor
from pccl.training.group.relaunch import Outcome, Relaunched, average
from pccl.training.state.replica import Vector

Rows = NDArray[np.float64]
"""The notes of all peers in a world, ordered by rank: float64 of shape (world size, 2 or 3)."""

_NOTES = np.dtype([("weight", "<f8"), ("seconds", "<f8"), ("is_nonfinite", "<u4"), ("size", "<u4")])
"""What precedes a compressed vector."""


def explained(error: PCCLError) -> PCCLError:
    """Return the error of an average, with advice added if only some peers gave a weight."""
    if not all(f"{op.name} of" in error.message for op in (ReduceOp.SUM, ReduceOp.AVG)):
        return error
    text = f"{error.message}; peers that give a weight use SUM: give outer_step(weight=...) on all peers or on none"
    return PCCLError(error.result, error.func_name, text)


class NotedAverage:
    """An average with notes, used like a `Relaunched`. With a weight it allocates another vector."""

    def __init__(
        self,
        communicator: Communicator,
        vector: Vector,
        tag: int,
        notes_tag: int,
        step: int,
        quantization: QuantizationOptions | None,
        weight: float | None,
        seconds: float,
        is_finite: bool | None = None,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        """All peers give a `weight` or none does; `seconds` is sent to the others. Unless `is_finite` is None on all
        peers, missing weights are 1, and a peer with False is left out and listed in `nonfinite`."""
        flags = []
        if is_finite is not None:
            flags = [2 * (weight is not None) + (not is_finite)]
            weight = 0.0 if not is_finite else 1.0 if weight is None else weight
        self.nonfinite: tuple[int, ...] = ()
        """The peers whose vectors were not finite, the same on all peers, once `wait` has returned."""
        self._vector = vector
        self._weight = weight
        self.own_seconds = seconds
        self.seconds: tuple[float, ...] = ()
        """The seconds of all peers in the average, once `wait` has returned."""
        self._sum: Vector | None = None
        op = ReduceOp.AVG
        if weight is not None:
            _weigh(vector, weight)
            self._sum, op = np.empty_like(vector), ReduceOp.SUM
        numbers = self._numbers = np.array([math.nan if weight is None else weight, seconds, *flags])
        self._notes = Relaunched(
            communicator, lambda: communicator.launch.all_gather(numbers, tag=notes_tag, step=step)
        )
        self._average = average(communicator, vector, tag, step, quantization, op=op, out=self._sum, feedback=feedback)

    def wait(self) -> Outcome:
        """Wait until the vector is the average. Raises PCCLError, INVALID_ARGUMENT if the sum is not finite."""
        averaged = self._average.wait()
        noted = self._notes.wait()
        total = averaged.with_cost(noted)
        while self._weight is not None and averaged.world_size != noted.world_size:
            if averaged.world_size > noted.world_size:
                self._average.again()
                averaged = self._average.wait()
                total = averaged.with_cost(total, 1)
            else:
                self._notes.again()
                noted = self._notes.wait()
                total = total.with_cost(noted, 1)
        rows: Rows = self._notes.info.array if self._notes.info is not None else self._numbers[np.newaxis]
        flags = rows[:, 2:].astype(int).ravel().tolist()
        if len({flag & 2 for flag in flags}) > 1:
            text = "some peers gave a weight: give outer_step(weight=...) on all peers or on none"
            raise PCCLError(Result.INVALID_ARGUMENT, "weighted average", text)
        self.nonfinite = tuple(peer for peer, flag in zip(noted.peers, flags, strict=False) if flag & 1)
        if self._sum is not None:
            # If this peer is alone, its vector is the sum.
            _divide(self._sum if averaged.world_size > 1 else self._vector, rows[:, 0], self._vector)
        self.seconds = tuple(rows[:, 1].tolist())
        return total


@default_environment()
def _weigh(vector: Vector, weight: float) -> None:
    if weight == 0:
        vector[...] = 0  # unlike a product, this also clears values that are not finite
        return
    with np.errstate(over="ignore", invalid="ignore"):  # all peers detect these in the sum
        np.multiply(vector, np.float64(weight), out=vector, dtype=np.float64, casting="same_kind")


@default_environment()
def _divide(total: Vector, weights: Any, out: Vector) -> None:
    if not np.isfinite(total).all():
        raise PCCLError(
            Result.INVALID_ARGUMENT,
            "weighted average",
            "the weighted sum is not finite: a peer's parameters are not, or its weight is too large for the type "
            "used on the wire; give smaller weights, such as tokens divided by a constant",
        )
    weight = math.fsum(weights.tolist())
    if weight == 0:
        out[...] = 0
        return
    np.divide(total, np.float64(weight), out=out, dtype=np.float64, casting="same_kind")


class CompressedAverage:
    """An average of compressed vectors, used like a `NotedAverage`: one all-gather of each peer's notes and encoded
    vector, padded to the bound. If this peer is alone, its vector stays as it is."""

    def __init__(
        self,
        communicator: Communicator,
        vector: Vector,
        tag: int,
        step: int,
        compressor: Compressor,
        weight: float | None,
        seconds: float,
        is_finite: bool | None = None,
    ) -> None:
        """As for `NotedAverage`. With `is_finite` None, `wait` fails on all peers if a vector is not finite."""
        self.nonfinite: tuple[int, ...] = ()
        self.own_seconds = seconds
        self.seconds: tuple[float, ...] = ()
        self._vector, self._compressor = vector, compressor
        self._is_checked = is_finite is not None
        compressor.step = step
        short = vector.astype(np.float32, copy=False)
        data: bytes | None = b""
        if is_finite is False:
            data = None
        elif weight != 0:
            data = compressor.compress(short, communicator.membership.peers)
        is_nonfinite, data = data is None, data or b""
        notes = (math.nan if weight is None else weight, seconds, is_nonfinite, len(data))
        row = np.zeros(_NOTES.itemsize + compressor.bound(vector.size), np.uint8)
        row[: _NOTES.itemsize].view(_NOTES)[0] = notes
        row[_NOTES.itemsize : _NOTES.itemsize + len(data)] = np.frombuffer(data, np.uint8)
        self._row = row
        self._gathered = Relaunched(communicator, lambda: communicator.launch.all_gather(row, tag=tag, step=step))

    def wait(self) -> Outcome:
        """Wait until the vector is the average. Raises PCCLError, INVALID_ARGUMENT if a vector is not finite."""
        outcome = self._gathered.wait()
        rows = self._gathered.info.array if self._gathered.info is not None else self._row[np.newaxis]
        notes = [row[: _NOTES.itemsize].view(_NOTES)[0] for row in rows]
        weights = [float(each["weight"]) for each in notes]
        if len({math.isnan(weight) for weight in weights}) > 1:
            text = "some peers gave a weight: give outer_step(weight=...) on all peers or on none"
            raise PCCLError(Result.INVALID_ARGUMENT, "compressed average", text)
        self.nonfinite = tuple(peer for peer, each in zip(outcome.peers, notes, strict=True) if each["is_nonfinite"])
        if self.nonfinite and not self._is_checked:
            text = f"NaN or infinity in the movement of peer {', '.join(map(str, self.nonfinite))}"
            raise PCCLError(Result.INVALID_ARGUMENT, "compressed average", text)
        self.seconds = tuple(float(each["seconds"]) for each in notes)
        self._compressor.commit()
        if len(rows) > 1:
            weights = [0.0 if each["size"] == 0 else weight for each, weight in zip(notes, weights, strict=True)]
            self._fold(rows, notes, [1.0 if math.isnan(weight) else weight for weight in weights])
        return outcome

    @default_environment()
    def _fold(self, rows: Any, notes: Any, weights: list[float]) -> None:
        """Set the vector to the weighted mean of the decoded vectors, added up in float32 by rank."""
        total, mean = math.fsum(weights), np.empty(self._vector.size, np.float32)
        codes = [
            (weight / total, memoryview(row)[_NOTES.itemsize : _NOTES.itemsize + int(note["size"])])
            for row, note, weight in zip(rows, notes, weights, strict=True)
            if weight
        ]
        self._compressor.average(codes, mean)
        self._vector[...] = mean


Average: TypeAlias = Relaunched | NotedAverage | CompressedAverage
