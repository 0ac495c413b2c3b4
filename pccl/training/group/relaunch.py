"""A collective that is launched now, waited for later, and relaunched after each peer loss.

All peers of the group launch it with the same tag and step, and wait for their ops in the same order. A loss aborts it
on all survivors and leaves the arrays unchanged, so each survivor relaunches it when it waits for it. `step` is the
revision that the op starts from, so that a relaunched op cannot match an op of the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from pccl import (
    Communicator,
    ErrorFeedback,
    PCCLError,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceOp,
    Result,
)

ABORTED = (Result.RANK_CONNECTION_LOST, Result.TOO_FEW_PEERS, Result.TIMEOUT)
"""Results of a launched op that was aborted on all peers, or whose other peers were all lost."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The cost of a collective, and the peers that took part. Bytes are payload."""

    world_size: int
    """The number of peers in the op; 1 if this peer was alone."""
    aborted: int
    tx_bytes: int
    rx_bytes: int
    peers: tuple[int, ...] = ()
    """Peer numbers, by rank."""

    def with_cost(self, other: Outcome, aborted: int = 0) -> Outcome:
        """Return this outcome plus the cost of another one and `aborted` further aborted ops."""
        aborted += self.aborted + other.aborted
        tx_bytes, rx_bytes = self.tx_bytes + other.tx_bytes, self.rx_bytes + other.rx_bytes
        return replace(self, aborted=aborted, tx_bytes=tx_bytes, rx_bytes=rx_bytes)


NOT_MADE = Outcome(0, 0, 0, 0)


def combined(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the total cost of several collectives, their smallest world size, and the peers that took part in all."""
    return Outcome(
        min(each.world_size for each in outcomes),
        sum(each.aborted for each in outcomes),
        sum(each.tx_bytes for each in outcomes),
        sum(each.rx_bytes for each in outcomes),
        tuple(peer for peer in outcomes[0].peers if all(peer in each.peers for each in outcomes)),
    )


def own_number(communicator: Communicator) -> int:
    """Return this peer's number in `Communicator.membership`."""
    membership = communicator.membership
    return membership.peers[membership.rank]


class Relaunched:
    """One relaunchable collective. Not thread-safe."""

    def __init__(self, communicator: Communicator, launch: Callable[[], Any]) -> None:
        """`launch` returns a pccl handle. The arrays must not be touched until `wait` has returned."""
        self._communicator = communicator
        self._launch = launch
        self.info: Any = None
        """The `ReduceInfo` or `CollectiveInfo` of the committed op; None if this peer is alone."""
        self.again()

    def again(self) -> None:
        """Launch the op again, even if it has committed."""
        self._handle: Any = None
        if self._communicator.world_size < 2:
            return
        try:
            self._handle = self._launch()
            self._handle.ignore_failure()  # `wait` raises it; if another op fails first, that error is enough
        except PCCLError as error:
            if error.result is not Result.TOO_FEW_PEERS:  # which means that the others have just been lost
                raise

    def wait(self) -> Outcome:
        """Wait until the op has committed. Raises PCCLError for failures other than losses."""
        aborted = 0
        self.info = None
        while self._handle is not None:
            try:
                info = self.info = self._handle.result()
            except PCCLError as error:
                if error.result not in ABORTED:
                    raise
                aborted += 1
                self.again()
            else:
                return Outcome(info.world_size, aborted, info.tx_bytes, info.rx_bytes, info.membership.peers)
        return Outcome(1, aborted, 0, 0, (own_number(self._communicator),))


def average(
    communicator: Communicator,
    vector: Any,
    tag: int,
    step: int | None,
    quantization: QuantizationOptions | None = None,
    *,
    op: ReduceOp = ReduceOp.AVG,
    out: Any = None,
    feedback: ErrorFeedback | None = None,
) -> Relaunched:
    """Launch an average, or another reduction, into `out` (None: in place). A peer that is alone writes no memory."""
    return Relaunched(
        communicator,
        lambda: communicator.launch.all_reduce(
            vector, out, op=op, tag=tag, quantization=quantization, step=step, feedback=feedback
        ),
    )


CompressionWord: TypeAlias = Literal["8bit", "4bit", "2bit", "1bit"]
_COMPRESSIONS: dict[str, tuple[QuantizationOptions, float | None]] = {
    "8bit": (QuantizationOptions(), None),
    "4bit": (QuantizationOptions(bits=4), 1.0),
    "2bit": (QuantizationOptions(algorithm=QuantizationAlgorithm.LLOYD_MAX), 0.4),
    "1bit": (QuantizationOptions(algorithm=QuantizationAlgorithm.SIGN), 0.4),
}
"""The options and the decay of error feedback, if there is any, by the word in `compression=`."""


@dataclass(frozen=True, slots=True)
class Compression:
    """How vectors are encoded: `quantization`, and the decay of error feedback, None without."""

    quantization: QuantizationOptions | None
    decay: float | None = None

    @classmethod
    def of(cls, word: str | None, quantization: QuantizationOptions | None) -> Compression:
        """Return what the argument `compression=` stands for. Raises ValueError for an unknown word, or for both."""
        if word is None:
            return cls(quantization)
        if not isinstance(word, str) or word not in _COMPRESSIONS:
            raise ValueError(f"compression {word!r}: must be one of {', '.join(map(repr, _COMPRESSIONS))} or None")
        if quantization is not None:
            raise ValueError(f"compression {word!r} sets quantization= itself: give one of the two")
        return cls(*_COMPRESSIONS[word])

    def feedback(self, dtype: object) -> ErrorFeedback | None:
        """Return error feedback for one vector, or None. Raises ValueError if its type is not float32."""
        if self.decay is None:
            return None
        if str(dtype).removeprefix("torch.") != "float32":
            raise ValueError(f'compression with error feedback needs float32, not {dtype}; use "8bit" or quantization=')
        return ErrorFeedback(self.decay)


def rescale(feedback: ErrorFeedback, factor: float) -> None:
    """Multiply the residuals by `factor`, for a vector whose weight has changed. No op may be in flight."""
    if feedback.kept.array is not None:
        feedback.kept.array *= factor


def reduce_among_all(communicator: Communicator, vector: Any, op: ReduceOp, tag: int, step: int | None = None) -> None:
    """All-reduce `vector` in place; a peer alone keeps its own. Raises PCCLError for failures other than losses."""
    average(communicator, vector, tag, step, op=op).wait()


def gather_among_all(
    communicator: Communicator, row: Any, tag: int, step: int | None = None
) -> tuple[dict[int, Any], Outcome]:
    """Gather equally shaped arrays from all peers, by peer number. Raises PCCLError for failures other than losses."""
    op = Relaunched(communicator, lambda: communicator.launch.all_gather(row, tag=tag, step=step))
    outcome = op.wait()
    rows = op.info.array if op.info is not None else [row]
    return dict(zip(outcome.peers, rows, strict=True)), outcome
