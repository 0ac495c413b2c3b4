"""An average of the peers' vectors, weighted for example by the number of tokens or samples they trained on.

The mean is `sum(w * x) / sum(w)` over the peers of one world. Two ops are launched together: the *sum*, an all-reduce
of each peer's vector times its weight, and the *notes*, an all-gather of its weight and its seconds per inner step.
With error feedback the notes come first, and weights are divided by their sum. A peer may be lost between the two ops.
Membership only shrinks between them, so worlds of equal size are identical. If the sizes differ, all survivors
relaunch the op with the larger world until the sizes agree.

Each product is rounded once to the vector's type. The quotient is computed in float64 and rounded once. All peers
raise an error if the sum is not finite. If all weights are 0, the mean is 0.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pccl import Communicator, ErrorFeedback, MismatchError, PCCLError, QuantizationOptions, ReduceOp, Result
from pccl._floating_point import default_environment
from pccl.training.compression import Compressor, Owners
from pccl.training.group.relaunch import Outcome, Relaunched, average, own_number
from pccl.training.state.replica import Vector

Rows = NDArray[np.float64]
"""The notes of all peers in a world, ordered by rank: float64 of shape (world size, 2 or 3)."""

_NOTES = np.dtype([("weight", "<f8"), ("seconds", "<f8"), ("is_nonfinite", "<u4"), ("size", "<u4")])
"""What precedes a compressed vector."""


def explained(error: PCCLError) -> PCCLError:
    """Return the error of an average, with advice added if only some peers gave a weight."""
    if "AVG of" not in error.message or not ("SUM of" in error.message or "all_gather of" in error.message):
        return error
    text = f"{error.message}; peers with a weight call another op: give outer_step(weight=...) on all peers or on none"
    return MismatchError(Result.INVALID_ARGUMENT, error.func_name, text)


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
        if feedback is not None and weight is not None:
            tag, notes_tag = notes_tag, tag  # so that the notes meet the average of a peer without a weight, and fail
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
        numbers = self._numbers = np.array([math.nan if weight is None else weight, seconds, *flags])
        self._notes = Relaunched(
            communicator, lambda: communicator.launch.all_gather(numbers, tag=notes_tag, step=step)
        )
        self._noted: Outcome | None = None
        self._unit = 1.0
        """What all weights are divided by."""
        if weight is not None:
            if feedback is not None:
                # Residuals are then errors of a mean, and fit the next mean whatever its weights are.
                try:
                    self._noted = self._notes.wait()
                except PCCLError as error:
                    raise explained(error) from None
                total = math.fsum(self._rows[:, 0].tolist())
                self._unit = total if 0 < total < math.inf else 1.0
            _weigh(vector, weight / self._unit)
            self._sum, op = np.empty_like(vector), ReduceOp.SUM
        self._average = average(communicator, vector, tag, step, quantization, op=op, out=self._sum, feedback=feedback)

    def wait(self) -> Outcome:
        """Wait until the vector is the average. Raises PCCLError, INVALID_ARGUMENT if the sum is not finite."""
        averaged = self._average.wait()
        noted = self._noted or self._notes.wait()
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
        rows = self._rows
        flags = rows[:, 2:].astype(int).ravel().tolist()
        if len({flag & 2 for flag in flags}) > 1:
            text = "some peers gave a weight: give outer_step(weight=...) on all peers or on none"
            raise PCCLError(Result.INVALID_ARGUMENT, "weighted average", text)
        self.nonfinite = tuple(peer for peer, flag in zip(noted.peers, flags, strict=False) if flag & 1)
        if self._sum is not None:
            # If this peer is alone, its vector is the sum.
            _divide(self._sum if averaged.world_size > 1 else self._vector, rows[:, 0] / self._unit, self._vector)
        self.seconds = tuple(rows[:, 1].tolist())
        return total

    @property
    def _rows(self) -> Rows:
        rows: Rows = self._notes.info.array if self._notes.info is not None else self._numbers[np.newaxis]
        return rows


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

    _is_nonfinite: bool

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
        self._prepare(vector, weight, seconds, is_finite)
        self._compressor, compressor.step = compressor, step
        data: bytes | None = b""
        if not self._is_left_out:
            data = compressor.compress(self._short, communicator.membership.peers)
        self._is_nonfinite = self._is_nonfinite or data is None
        row = self._row = self._noted(data, compressor.bound(vector.size), self._is_nonfinite)
        self._gathered = Relaunched(communicator, lambda: communicator.launch.all_gather(row, tag=tag, step=step))

    def _prepare(self, vector: Vector, weight: float | None, seconds: float, is_finite: bool | None) -> None:
        self.nonfinite: tuple[int, ...] = ()
        self.own_seconds = seconds
        self.seconds: tuple[float, ...] = ()
        self._vector, self._short = vector, vector.astype(np.float32, copy=False)
        self._weight = weight
        self._is_checked, self._is_nonfinite = is_finite is not None, is_finite is False

    @property
    def _is_left_out(self) -> bool:
        return self._is_nonfinite or self._weight == 0

    def _noted(self, data: bytes | None, size: int, is_nonfinite: bool) -> Any:
        """Return this peer's notes and a code, padded to `size`."""
        row, data = np.zeros(_NOTES.itemsize + size, np.uint8), data or b""
        weight = math.nan if self._weight is None else self._weight
        row[: _NOTES.itemsize].view(_NOTES)[0] = (weight, self.own_seconds, is_nonfinite, len(data))
        row[_NOTES.itemsize : _NOTES.itemsize + len(data)] = np.frombuffer(data, np.uint8)
        return row

    def wait(self) -> Outcome:
        """Wait until the vector is the average. Raises PCCLError, INVALID_ARGUMENT if a vector is not finite."""
        outcome = self._gathered.wait()
        rows = self._gathered.info.array if self._gathered.info is not None else self._row[np.newaxis]
        weights = self._weights(rows, outcome.peers)
        self._compressor.commit()
        if len(rows) > 1:
            self._vector[...] = _mean(rows, weights, self._compressor, self._vector.size)
        return outcome

    def _weights(self, rows: Any, peers: tuple[int, ...]) -> list[float]:
        """Return the weights of all peers. Raises PCCLError, the same on all of them."""
        notes = [_notes_of(row) for row in rows]
        weights = [float(each["weight"]) for each in notes]
        if len({math.isnan(weight) for weight in weights}) > 1:
            text = "some peers gave a weight: give outer_step(weight=...) on all peers or on none"
            raise PCCLError(Result.INVALID_ARGUMENT, "compressed average", text)
        self.nonfinite = tuple(peer for peer, each in zip(peers, notes, strict=True) if each["is_nonfinite"])
        if self.nonfinite and not self._is_checked:
            text = f"NaN or infinity in the movement of peer {', '.join(map(str, self.nonfinite))}"
            raise PCCLError(Result.INVALID_ARGUMENT, "compressed average", text)
        self.seconds = tuple(float(each["seconds"]) for each in notes)
        weights = [0.0 if each["size"] == 0 else weight for each, weight in zip(notes, weights, strict=True)]
        return [1.0 if math.isnan(weight) else weight for weight in weights]


def _notes_of(row: Any) -> Any:
    return row[: _NOTES.itemsize].view(_NOTES)[0]


@default_environment()
def _decoded(row: Any, compressor: Compressor, count: int) -> Any:
    decoded = np.zeros(count, np.float32)
    size = int(_notes_of(row)["size"])
    if size:
        compressor.decode_add(memoryview(row)[_NOTES.itemsize : _NOTES.itemsize + size], decoded)
    return decoded


@default_environment()
def _mean(rows: Any, weights: list[float], compressor: Compressor, count: int) -> Any:
    """Return the weighted mean of the decoded vectors."""
    mean, total = np.empty(count, np.float32), math.fsum(weights)
    codes = [
        (weight / total, memoryview(row)[_NOTES.itemsize : _NOTES.itemsize + int(_notes_of(row)["size"])])
        for row, weight in zip(rows, weights, strict=True)
        if weight
    ]
    compressor.average(codes, mean)
    return mean


class OwnedAverage(CompressedAverage):
    """An average by `Owners`: an all-to-all of the codes of parts, and an all-gather of the codes of their means.

    Codes are padded to their bounds, so that peers need not exchange sizes first. If a peer is lost between the ops,
    all survivors see that in the second one, and start again with new owners. Residuals are kept after the second.
    """

    def __init__(
        self,
        communicator: Communicator,
        vector: Vector,
        tag: int,
        means_tag: int,
        step: int,
        owners: Owners,
        weight: float | None,
        seconds: float,
        is_finite: bool | None = None,
    ) -> None:
        self._prepare(vector, weight, seconds, is_finite)
        self._is_nonfinite = self._is_nonfinite or not (self._is_left_out or np.isfinite(self._short).all())
        self._communicator, self._owners = communicator, owners
        self._tag, self._means_tag, self._step = tag, means_tag, step
        self._number = own_number(communicator)
        self._has_failed = False
        self._codes: list[Any] = []
        self._exchange = Relaunched(communicator, self._launch_exchange)

    def _launch_exchange(self) -> Any:
        owners, membership = self._owners, self._communicator.membership
        if not self._codes or owners.peers != membership.peers:
            owners.divide(self._vector.size, membership.peers, self._step)
            parts = [self._short[part] for part in owners.parts]
            data = [
                up.compress(part, owners.peers) if part.size and not self._is_left_out else b""
                for up, part in zip(owners.ups, parts, strict=True)
            ]
            self._is_nonfinite = self._is_nonfinite or None in data
            self._codes = [
                self._noted(each, up.bound(part.size), self._is_nonfinite)
                for each, up, part in zip(data, owners.ups, parts, strict=True)
            ]
        return self._communicator.launch.all_to_all(
            np.concatenate(self._codes),
            send_counts=[code.size for code in self._codes],
            recv_counts=[self._codes[membership.rank].size] * len(self._codes),
            tag=self._tag,
            step=self._step,
        )

    def _wait_for_exchange(self) -> Outcome:
        try:
            return self._exchange.wait()
        except PCCLError as error:
            # On all peers, if one of them has launched the op for a group that another had just left.
            if error.result is not Result.INVALID_ARGUMENT or self._has_failed:
                raise
        self._has_failed = True
        self._exchange.again()
        return self._exchange.wait()

    def wait(self) -> Outcome:
        """As for `CompressedAverage`."""
        total = self._wait_for_exchange()
        while self._exchange.info is not None:
            means = self._average_part(self._exchange.info.array.reshape(len(self._codes), -1))
            outcome = means.wait()
            if outcome.peers == self._owners.peers:
                self._take(means.info.array)
                return outcome.with_cost(total)
            self._exchange.again()
            total = self._wait_for_exchange().with_cost(outcome.with_cost(total), 1)
        self._weights([self._noted(b"", 0, self._is_nonfinite)], total.peers)
        return total

    def _average_part(self, rows: Any) -> Relaunched:
        """Launch the gathering of the means of all parts, this peer's part from the codes of all peers."""
        owners, own = self._owners, self._owners.peers.index(self._number)
        sizes = [part.stop - part.start for part in owners.parts]
        weights = self._weights(rows, owners.peers)
        mean = _mean(rows, weights, owners.ups[own], sizes[own])
        data = owners.downs[own].compress(mean, owners.peers) if mean.size else b""
        bound = max(down.bound(size) for down, size in zip(owners.downs, sizes, strict=True))
        row = self._noted(data, bound, data is None)
        return Relaunched(
            self._communicator,
            lambda: self._communicator.launch.all_gather(row, tag=self._means_tag, step=self._step),
        )

    def _take(self, rows: Any) -> None:
        """Make the decoded means the vector."""
        owners = self._owners
        overflown = [peer for peer, row in zip(owners.peers, rows, strict=True) if _notes_of(row)["is_nonfinite"]]
        if overflown:
            text = f"the mean of the part of peer {', '.join(map(str, overflown))} is too large for its encoding"
            raise PCCLError(Result.INVALID_ARGUMENT, "compressed average", text)
        for row, down, part in zip(rows, owners.downs, owners.parts, strict=True):
            self._vector[part] = _decoded(row, down, part.stop - part.start)
        for compressor in (*owners.ups, *owners.downs):
            compressor.commit()


Average: TypeAlias = Relaunched | NotedAverage | CompressedAverage
