"""A training step on all peers (begin, claim, averages, land, commit, admit, end), its report, and the base of the
training classes. The base rejoins the run if a step fails because this peer was evicted or lost the master."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from pccl import Communicator, DataType, PCCLError, QuantizationAlgorithm, QuantizationOptions, Result
from pccl.training.group.membership import Admission, Membership
from pccl.training.group.relaunch import NOT_MADE, Outcome, combined
from pccl.training.state.checkpoint import Checkpointed
from pccl.training.state.replicated_state import ReplicatedState

Report = TypeVar("Report", bound="StepReport")


@dataclass(frozen=True, slots=True)
class StepReport:
    """The outcome of a step. Bytes are payload; the state sent to newcomers is counted separately."""

    revision: int
    world_size: int
    admitted: bool
    """Whether newcomers were admitted at the end of the step."""
    rejoined: bool
    """Whether this peer was evicted or lost the master, and has rejoined with the run's state instead of making a step.
    Its computation is lost."""
    aborted: int
    tx_bytes: int
    rx_bytes: int
    state_tx_bytes: int
    state_rx_bytes: int
    waited_s: float
    """Seconds that the computation waited for the network."""

    def __str__(self) -> str:
        """Return the fields that people read, in one line."""
        size = f"{self.tx_bytes / 1e6:.3g} MB sent, waited {self.waited_s:.3g} s"
        is_skipped = getattr(self, "is_skipped", False)
        notes = [f"{self.aborted} aborted"] * (self.aborted > 0) + ["admitted newcomers"] * self.admitted
        notes += ["rejoined"] * self.rejoined + ["skipped"] * is_skipped
        peers = "1 peer" if self.world_size == 1 else f"{self.world_size} peers"
        if self.world_size == 0 and not (self.rejoined or is_skipped):
            peers = "no average yet"
        return ", ".join([f"step {self.revision}: {peers}", size, *notes])


class GroupStep:
    """One step in progress. Not thread-safe."""

    def __init__(self, func_name: str, membership: Membership, replicated: ReplicatedState) -> None:
        self._func_name = func_name
        self._membership = membership
        self._replicated = replicated
        self.outcomes: list[Outcome] = []
        self.admission: Admission | None = None
        self.rejoined = False
        self.world_size = 0
        """The number of peers in the step's update."""
        self.waited_s = 0.0
        self._are_peers_pending: bool | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time spent in the block as waiting for the network."""
        started_s = time.monotonic()
        yield
        self.waited_s += time.monotonic() - started_s

    def begin(self) -> None:
        """Raises DivergenceError again if it was raised before."""
        self._replicated.begin(self._membership.revision)

    def claim(self, in_flight: int = 0, counts: Mapping[int, int] | None = None) -> None:
        """`in_flight` is the number of averages currently in flight, `counts` the numbers of samples, if known."""
        self._replicated.claim(in_flight, counts)

    def launch_buffers(self) -> None:
        self._replicated.launch_buffers(self._membership.revision)

    def land(self) -> None:
        """Raises DivergenceError before the step changes any state."""
        self._replicated.land_comparison()
        self.land_buffers()

    def land_buffers(self, *, keep_going: bool = False) -> None:
        """`keep_going`: forward passes ran during the exchange; keep their changes."""
        self.outcomes.append(self._replicated.buffers.land(keep_going=keep_going))

    def commit(self, peers: Collection[int]) -> None:
        """`peers` are the numbers of the peers that contributed to the average."""
        self._replicated.commit(peers)

    def are_peers_pending(self) -> bool:
        """Return whether newcomers are waiting. The answer is the same on all peers and cached for the step."""
        if self._are_peers_pending is None:
            self._are_peers_pending = self._membership.are_peers_pending()
        return self._are_peers_pending

    @property
    def is_short(self) -> bool:
        """Whether all averages had too few peers to continue. The same on all of these peers."""
        most = max((each.world_size for each in self.outcomes), default=0)
        return 0 < most < self._membership.hold_below

    def must_admit(self) -> bool:
        """Return whether `admit` has anything to do. The same on all peers."""
        return self.is_short or self.are_peers_pending()

    def admit(self) -> Admission | None:
        """Admit the newcomers that are waiting, if any, and more until there are enough. No op may be in flight."""
        is_short = self.is_short
        if self.are_peers_pending():
            self.admission = self._membership.admit()
        if self.admission is not None or is_short:
            world_size = self.admission.world_size if self.admission is not None else 0
            self.admission = self._membership.hold(self._func_name, world_size, self.admission)
        return self.admission

    def end(self) -> None:
        self._replicated.end(self._membership.revision)

    def report(self, kind: type[Report], **more: Any) -> Report:
        """Return the report; `more` are the fields that `kind` adds to `StepReport`."""
        total = combined(self.outcomes or [NOT_MADE])
        figures = {"loss": more["loss"]} if "loss" in more else {}
        self._membership.report(step=self._membership.revision, **figures)
        return kind(
            revision=self._membership.revision,
            world_size=0 if self.rejoined else self.world_size,
            admitted=self.admission is not None and not self.rejoined,
            rejoined=self.rejoined,
            aborted=total.aborted,
            tx_bytes=total.tx_bytes,
            rx_bytes=total.rx_bytes,
            state_tx_bytes=self.admission.tx_bytes if self.admission is not None else 0,
            state_rx_bytes=self.admission.rx_bytes if self.admission is not None else 0,
            waited_s=self.waited_s,
            **more,
        )


class TrainingLoop(Checkpointed):
    """The base of the training classes: joining a run, taking part in its steps, and coming back to it."""

    def join(self, peers_min: int = 1) -> Admission:
        """Join the run, with at least `peers_min` peers if it is new. Raises the errors of `DiLoCo.join`."""
        admission = self._membership.join(peers_min)
        self._enter(admission)
        return admission

    def report(self, **figures: float) -> None:
        """Show figures such as the loss in `pccl status` and on the page: see `Communicator.report`."""
        self._membership.report(**figures)

    def _enter(self, admission: Admission) -> None:
        """Continue from the state with which this peer has joined."""

    def _drop(self) -> None:
        """Discard what belongs to a lost session."""
        self._replicated.renew(self._communicator)

    def _group_step(self, func_name: str, *, rejoins: bool = True) -> AbstractContextManager[GroupStep]:
        """Return the guard of a group call, which shortens tracebacks."""
        return _Shortening(self._guarded_step(func_name, rejoins))

    @contextmanager
    def _guarded_step(self, func_name: str, rejoins: bool) -> Iterator[GroupStep]:
        """Guard a group call. If this peer was evicted or has lost the master, rejoin, mark the step as `rejoined` and
        continue after the `with` block. Raises PCCLError like `Membership.step` and `Membership.rejoin`."""
        step = GroupStep(func_name, self._membership, self._replicated)
        began_s = time.monotonic()
        try:
            with self._membership.step(func_name):
                yield step
            return
        except PCCLError as error:
            if not (rejoins and self._membership.may_rejoin(error)):
                raise
            lost = error
        step.admission, step.outcomes = self._membership.rejoin(func_name, lost, self._drop, self._enter), []
        step.rejoined, step.waited_s = True, time.monotonic() - began_s


def shorten(error: PCCLError) -> None:
    """Leave the inner frames out of the traceback, unless they may show a bug."""
    if error.result is not Result.INTERNAL_ERROR:
        error.__traceback__ = None


class _Shortening(AbstractContextManager[GroupStep]):
    """A guard whose PCCLErrors have short tracebacks. A generator's guard would restore the long ones."""

    def __init__(self, guard: AbstractContextManager[GroupStep]) -> None:
        self._guard = guard

    def __enter__(self) -> GroupStep:
        return self._guard.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            is_handled = self._guard.__exit__(kind, error, traceback)
        except PCCLError as other:
            shorten(other)
            raise
        if isinstance(error, PCCLError):
            shorten(error)
        return is_handled


OnNonfinite: TypeAlias = Literal["raise", "skip", "leave out"]
"""What all peers do if one of them contributes NaN or infinity: skip the update and raise an error, skip it with a
WARNING, or average the other contributions."""


def checked_on_nonfinite(given: OnNonfinite | None) -> OnNonfinite | None:
    """Raises ValueError for another value."""
    allowed = (*get_args(OnNonfinite), None)
    if given not in allowed:
        raise ValueError(f"on_nonfinite {given!r}: must be one of {', '.join(map(repr, allowed))}")
    return given


ENCODED_MAX = {
    (QuantizationAlgorithm.CAST, DataType.FLOAT16): 65504.0,
    (QuantizationAlgorithm.LLOYD_MAX, DataType.UINT8): 2.0**19,
    (QuantizationAlgorithm.SIGN, DataType.UINT8): 2.0**19,
}
"""The largest values, also of a sum, that certain encodings represent."""


def encoded_max(quantization: QuantizationOptions | None) -> float:
    """Return the largest value that an average with this quantization represents, also as a sum."""
    if quantization is None:
        return math.inf
    return ENCODED_MAX.get((quantization.algorithm, quantization.quantized_datatype), math.inf)


def nonfinite_text(communicator: Communicator, peers: Collection[int], what: str, is_skipped: bool) -> str:
    """Return the text that names the peers with a contribution that is not finite, the same on all peers."""
    named = communicator._inner.session("step").named
    end = "no peer takes this step" if is_skipped else "the average is over the other peers"
    return f"{what} of {', '.join(map(named, sorted(peers)))} has NaN or infinity: {end}"


def checked_weight(weight: Any) -> float | None:
    """Return a peer's weight in an average as a float, or None if it is None. Raises ValueError."""
    if weight is None:
        return None
    value = _float(weight)
    if value is None or not (math.isfinite(value) and value >= 0):
        shown = type(weight).__name__ if value is None else value
        raise ValueError(f"weight {shown}: must be finite and at least 0, such as the number of tokens trained on")
    return value


def as_float(name: str, given: Any) -> float:
    """Return `given`, the value of argument `name`, as a float. Raises ValueError if it cannot be one."""
    value = _float(given)
    if value is None:
        raise ValueError(f"{name} of type {type(given).__name__}: must be a number that a float can hold")
    return value


def _float(given: Any) -> float | None:
    try:
        return float(given)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch raises the last one for several elements
        return None
