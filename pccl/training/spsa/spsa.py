"""SPSA: training with forward passes only, and one byte from each peer in each step.

SPSA (Spall 1992) estimates the slope of a loss L along a random direction z from two evaluations, g = (L(w + eps z) -
L(w - eps z)) / 2 eps, and moves the weights by -rate * g * z. MeZO (Malladi et al. 2023, arXiv:2305.17333) generates z
from a seed and needs only the memory of inference; Zelikman et al. 2023 (arXiv:2306.10015) send g in one byte. In each
step, peers exchange the bytes of their own directions and move the weights by the mean over all directions.

*Directions* are numbered from 0 in the order of *stable ranks*: ranks at the last admission, which peers keep when
others are lost. *The byte* is an 8-bit float (sign, four exponent bits, three mantissa bits) times a unit. *Newcomers*
that have the weights of a recent revision receive the missing steps; others receive the weights.
"""

from __future__ import annotations

import bisect
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import blake3
import numpy as np
from numpy.typing import NDArray

from _pccl_torch import outside_graphs
from pccl import Communicator, PCCLError, ReduceOp, Result, SharedState, TensorInfo
from pccl._floating_point import default_environment
from pccl._integers import as_int
from pccl.training.group.membership import Admission, Churn, Membership, fingerprint
from pccl.training.group.relaunch import Outcome, Relaunched, gather_among_all, own_number, reduce_among_all
from pccl.training.spsa import step_log
from pccl.training.spsa.grid import Grid, tensors_of
from pccl.training.spsa.step_log import LogError, LogFile, LoggedStep, Mark
from pccl.training.state.buffers import AVERAGE, exchanged_buffers
from pccl.training.state.checkpoint import Snapshot
from pccl.training.state.replica import replica_of
from pccl.training.state.replicated_state import ReplicatedState, Stateful, frozen_parameters
from pccl.training.state.torch_state import assign, buffers_of, require_like, without_state_dict
from pccl.training.step import StepReport, TrainingLoop

SIGN = 0x80
MAGNITUDES: tuple[int, ...] = tuple(
    code & 7 if code < 8 else (8 + (code & 7)) << ((code >> 3) - 1) for code in range(SIGN)
)
"""The magnitudes of the unsigned codes in ascending order, in units."""


def encode_gradient(value: float, unit: float) -> int:
    """Return the code nearest to a finite value, or the one with the larger magnitude in a tie."""
    magnitude = abs(value) / unit
    above = min(bisect.bisect_left(MAGNITUDES, magnitude), len(MAGNITUDES) - 1)
    below = max(above - 1, 0)
    code = below if magnitude - MAGNITUDES[below] < MAGNITUDES[above] - magnitude else above
    return code | SIGN if value < 0 and code else code


def decode_gradient(code: int, unit: float) -> float:
    """Return the value of a code, exact if the unit is a power of two."""
    magnitude = MAGNITUDES[code & ~SIGN] * unit
    return -magnitude if code & SIGN else magnitude


class StableRanks:
    """The stable ranks of this peer and the others. Uses one tag. Its methods are group calls."""

    def __init__(self, communicator: Communicator, tag: int) -> None:
        self._communicator = communicator
        self._tag = tag
        self._ranks: dict[int, int] = {}
        self.own = 0

    def assign(self, step: int) -> None:
        """Take the ranks from a committed barrier. `step` must be the same on all peers."""
        barrier = self._communicator.launch.barrier
        op = Relaunched(self._communicator, lambda: barrier(tag=self._tag, step=step))
        peers = op.wait().peers
        self._ranks = {peer: rank for rank, peer in enumerate(peers)}
        self.own = self._ranks[own_number(self._communicator)]

    def exchange(self, item: bytes, step: int) -> tuple[LoggedStep, Outcome]:
        """Gather `item`, of equal size on all peers. Raises PCCLError INVALID_USAGE if a peer has no rank."""
        rows, outcome = gather_among_all(self._communicator, np.frombuffer(item, np.uint8), self._tag, step)
        if not self._ranks.keys() >= rows.keys():
            what = "a participating peer has no stable rank: a call of update_topology outside of SPSA admitted it"
            raise PCCLError(Result.INVALID_USAGE, "SPSA.step", what)
        ranks, codes = tuple(self._ranks[peer] for peer in rows), tuple(row.tobytes() for row in rows.values())
        return LoggedStep(step, ranks, codes), outcome


RANKS, CATCH_UP = 0, 2
STEPS_MAX = 2**32
TAIL_BYTES_MAX = 1 << 26
"""The maximum size of the steps sent to newcomers instead of weights."""
NEVER = 2**62

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SPSAOptions:
    """The options of SPSA, which must be equal on all peers."""

    learning_rate: float
    """The step size. It must be far smaller than with gradients: the squared norm of the estimate is about the squared
    norm of the gradient, times the number of parameters."""
    decay_steps: float = math.inf
    """The rate of step t is `learning_rate / (1 + t / decay_steps)`."""
    epsilon: float = 2.0**-10
    """The perturbation of each parameter."""
    directions: int = 1
    """The number of directions that each peer evaluates in a step, at one byte each."""
    unit: float = 2.0**-12
    """The unit of the bytes that encode projected gradients. These keep full precision from 8 units up and are clipped
    at 245760 units."""
    seed: int = 0
    """The seed of all directions, 64 bits."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "decay_steps", "epsilon", "unit"):
            value = getattr(self, name)
            if not value > 0 or (math.isinf(value) and name != "decay_steps"):
                raise ValueError(f"{name} {value}: must be above 0")
        object.__setattr__(self, "directions", as_int("directions", self.directions, 1, 1 << 16))
        object.__setattr__(self, "seed", as_int("seed", self.seed, 0, 2**64 - 1))

    def rate(self, step: int) -> float:
        """Return the rate of a step, the same double on all peers."""
        return self.learning_rate / (1 + step / self.decay_steps)


@dataclass(frozen=True, slots=True)
class SPSAStep(StepReport):
    """The outcome of an SPSA step. `world_size` counts the peers whose directions moved the weights."""

    loss: float
    """The mean of this peer's own evaluations at perturbed weights."""


@outside_graphs
class SPSA(TrainingLoop):
    """Simultaneous perturbation stochastic approximation (Spall 1992) with shared seeds.

    Peers evaluate the loss along random signs, exchange a byte for each direction, and take the same step. Between
    calls, the model may be read but not written. Not thread-safe. Example::

        with Communicator() as communicator:
            spsa = SPSA(communicator, model, SPSAOptions(learning_rate=1e-3))
            spsa.join(peers_min=4)
            while spsa.revision < 1000:
                print(spsa.step(lambda direction: evaluate(model, batch_of(spsa.revision, direction))))
    """

    def __init__(
        self,
        communicator: Communicator,
        model: Any,
        options: SPSAOptions,
        *,
        admit_every: int = 10,
        replay_max: int = 10_000,
        log: str | os.PathLike[str] | None = None,
        shared: Mapping[str, Stateful] | None = None,
        buffers: str = AVERAGE,
        check_every: int | None = None,
        tag: int = 0,
        **churn: Unpack[Churn],
    ) -> None:
        """All peers must build the same model and give the same arguments, except `log`.

        Args:
            model: A torch module on the CPU or a CUDA device, or a mapping of names to NumPy arrays, in float32.
                Parameters are rounded slightly (see `pccl.training.spsa.grid`).
            admit_every: Admit newcomers and exchange buffers after this many steps.
            replay_max: Newcomers at most this many steps behind catch up from the log.
            log: The path of this peer's own step log.
            shared: Objects whose `state_dict()` is replicated.
            buffers: "average" (mean of floats, maximum of others), "first" (from rank 0) or "local".
            check_every: Compare digests after this many steps; None: as often as 0.1 % of the time allows.
            tag: The first of three tags.
            churn: `rejoin`, `hold_below` and `on_older_run`: see `pccl.training.group.membership.Churn`.

        Raises TypeError or ValueError if the model cannot be trained or an argument is invalid, and OSError or
        LogError from the log file.
        """
        if not isinstance(options, SPSAOptions):
            raise TypeError(f"options must be SPSAOptions, not {options!r}")
        tag, replay_max = as_int("tag", tag), as_int("replay_max", replay_max, 0)
        admit_every = as_int("admit_every", admit_every, 1)
        self._communicator = communicator
        self._model = model
        self._options = options
        self._admit_every = admit_every
        self._tag = tag
        self._tensors, layout = tensors_of(model)
        self._grid = Grid(list(self._tensors.values()), options.epsilon, options.seed)
        self._run = f"SPSA {fingerprint(None, options, admit_every, replay_max, layout)}"
        self._alike = {"admit_every": admit_every, "replay_max": replay_max, "options": options}
        self._replicated = ReplicatedState(
            communicator,
            tensors=self._compared,
            frozen=frozen_parameters(model),
            adopt=self._grid.adopt,
            buffers=exchanged_buffers(model, buffers),
            shared=shared,
            check_every=check_every,
            tag=tag,
        )
        infos = [tensor.info(name) for name, tensor in self._tensors.items()]
        infos.append(TensorInfo.from_numpy(self._grid.exponents, f"grid of {self._run}"))
        self._state = SharedState([*infos, *self._replicated.infos()])
        self._layout = layout
        self._recent: deque[LoggedStep] = deque(maxlen=replay_max)
        self._log = LogFile(log) if log is not None else None
        self._churn = churn
        self._membership = self._new_membership()
        self._ranks = StableRanks(communicator, tag + RANKS)

    def _new_membership(self) -> Membership:
        return Membership(
            self._communicator,
            self._state,
            {"class": type(self).__name__, **self._alike, **self._replicated.options()},
            before_sync=self._hand_on_the_log,
            joint=self._replicated,
            churn=self._churn,
        )

    def _compared(self) -> Iterator[tuple[str, Any]]:
        self._grid.require_home()
        yield "grid", self._grid.exponents
        for name, tensor in self._tensors.items():
            yield f"parameter {name}", tensor.numpy()
        yield from self._replicated.buffers.module_tensors()

    def _weights_digest(self) -> bytes:
        self._grid.require_home()
        hasher = blake3.blake3(self.revision.to_bytes(8, "little"))
        hasher.update(self._grid.exponents.data.cast("B"))
        for tensor in self._tensors.values():
            hasher.update(tensor.numpy().data.cast("B"))
        return hasher.digest()

    # Peers.

    def reconnect(self, communicator: Communicator, peers_min: int = 1) -> Admission:
        """Rejoin with a new communicator, after the master was lost or this peer was evicted."""
        self._communicator = communicator
        self._replicated.renew(communicator)
        self._membership = self._new_membership()
        self._ranks = StableRanks(communicator, self._tag + RANKS)
        return self.join(peers_min)

    def _drop(self) -> None:
        super()._drop()
        self._grid.come_home()

    def _enter(self, admission: Admission) -> None:
        """Reset after newcomers or this peer were admitted."""
        if admission.world_size < 2:
            self._grid.require_home()  # with other peers, the comparison of the state has checked it
        if admission.rx_bytes > 0 or (self._recent and self._recent[-1].revision + 1 != self.revision):
            self._recent.clear()  # these steps do not lead to the present weights
        self._grid.adopt()
        self._ranks.assign(self.revision)
        self._mark()

    def _hand_on_the_log(self) -> None:
        """Send newcomers the steps since their revision, if a peer under way has them."""
        try:
            tail = self._tail_for_newcomers()
        except PCCLError as error:
            if error.result not in (Result.INVALID_USAGE, Result.INVALID_ARGUMENT):
                raise
            logger.warning("a newcomer makes different calls: %s", error)  # synchronization rejects its state's names
            return
        if self._membership.is_under_way or not tail or not self._grid.is_home:
            return
        try:
            made = self._play(step_log.entries_of(tail))
            logger.info("caught up by %d steps, %d bytes", made, len(tail))
        except (LogError, OverflowError) as error:
            logger.warning("the log does not continue from this peer's weights: %s", error)

    def _tail_for_newcomers(self) -> bytes:
        """Return the encoded steps since the revision of the oldest newcomer, or b"" if it is too old."""
        is_under_way = self._membership.is_under_way
        own_first = self._recent[0].revision if self._recent else self.revision
        own = self.revision if self._grid.is_home else NEVER  # a log continues only from home
        facts = np.array([NEVER, self.revision, own_first] if is_under_way else [own, NEVER, NEVER])
        self._reduce(facts, ReduceOp.MIN)
        behind, reached, first = facts.tolist()
        if reached == NEVER or not first <= behind < reached:
            return b""
        tail = b""
        if is_under_way and own_first <= behind:
            tail = b"".join(step.encode() for step in self._recent if step.revision >= behind)
            tail = tail if len(tail) <= TAIL_BYTES_MAX else b""
        size = np.array([len(tail)])
        self._reduce(size, ReduceOp.MAX)
        # All peers that have a tail have the same one, so the maximum of tails and zeros is the tail.
        buffer = np.zeros(int(size[0]), np.uint8)
        buffer[: len(tail)] = np.frombuffer(tail, np.uint8)
        self._reduce(buffer, ReduceOp.MAX)
        return buffer.tobytes()

    def _reduce(self, vector: NDArray[Any], op: ReduceOp) -> None:
        reduce_among_all(self._communicator, vector, op, self._tag + CATCH_UP)

    # Steps.

    def step(self, loss: Callable[[int], float]) -> SPSAStep:
        """Evaluate `loss`, exchange bytes, move the weights and admit newcomers. A group call.

        `loss(direction)` is called twice for each of this peer's directions, at perturbed weights. It must return the
        same value for the same direction and weights (one batch, no dropout) and must not change the weights. If it
        raises, the weights are restored, the exception propagates, and the step may be called again.

        Raises:
            FloatingPointError: A loss is not finite.
            OverflowError: Training has diverged (raised on all peers).
            PCCLError: The master was lost or this peer was evicted, and it could not rejoin. INVALID_USAGE after a
                KeyboardInterrupt outside of `loss`: call `reconnect`.
            RuntimeError: An interrupt arrived while weights were being moved: call `load` or `reconnect`.
            DivergenceError: Replicated state differs (raised on all peers).
            OSError: The log cannot be written.
        """
        self._membership.require_step("SPSA.step")
        if self.revision >= STEPS_MAX:
            raise PCCLError(Result.INVALID_USAGE, "SPSA.step", f"a run is limited to {STEPS_MAX} steps")
        try:
            with self._replicated.buffers.own():
                codes, loss_mean = self._evaluate(loss)
            with self._group_step("SPSA.step") as step:
                with step.waiting():
                    step.begin()
                    step.claim()
                    logged, outcome = self._ranks.exchange(codes, self.revision)
                    self._replicated.land_comparison()
                    step.commit(outcome.peers)
                self._move(logged)
                step.world_size = len(logged.ranks)
                step.outcomes.append(outcome)
                with step.waiting():
                    if self.revision % self._admit_every == 0 or step.is_short:
                        step.outcomes.append(self._replicated.exchange_own_buffers(self.revision))
                        if (admission := step.admit()) is not None:
                            self._enter(admission)
                    step.end()
        finally:
            self._grid.come_home()
        return step.report(SPSAStep, loss=loss_mean)

    def finish(self) -> None:
        """Compare the replicated state after the last step. A group call. Raises the errors of `step`."""
        with self._group_step("SPSA.finish", rejoins=False):
            self._replicated.check(self.revision)

    def _evaluate(self, loss: Callable[[int], float]) -> tuple[bytes, float]:
        """Return the bytes of this peer's directions and the mean loss. The weights stay displaced."""
        options = self._options
        codes = bytearray()
        losses = []
        first = self._ranks.own * options.directions
        for direction in range(first, first + options.directions):
            pair = []
            for factor in (1, -1):
                self._grid.displace(self.revision, {direction: factor})
                pair.append(float(loss(direction)))
            with default_environment():
                projected = (pair[0] - pair[1]) / (2 * options.epsilon)
                if not math.isfinite(projected):
                    raise FloatingPointError(
                        f"the loss is {pair[0]} and {pair[1]} at weights perturbed by {options.epsilon:g}"
                    )
                codes.append(encode_gradient(projected, options.unit))
            losses += pair
        return bytes(codes), sum(losses) / len(losses)

    @default_environment()
    def _move(self, step: LoggedStep) -> None:
        """Apply a step that starts at this revision. Weights may be displaced before it, and are home after it."""
        options = self._options
        count = sum(map(len, step.codes))
        coefficients: dict[int, float] = {}
        for rank, codes in zip(step.ranks, step.codes, strict=True):
            for i, code in enumerate(codes):
                projected = decode_gradient(code, options.unit)
                coefficients[rank * options.directions + i] = -options.rate(step.revision) * projected / count
        self._grid.update(step.revision, coefficients)
        self._state.revision += 1
        self._recent.append(step)
        if self._log is not None:
            self._log.add(step)

    # The log.

    def replay(self, path: str | os.PathLike[str]) -> int:
        """Apply logged steps from this revision on, before `join`. Return their number. Raises OSError, LogError."""
        return self._play(step_log.read(path))

    def _play(self, entries: Iterable[step_log.Entry]) -> int:
        made = 0
        for entry in entries:
            if entry.revision != self.revision and (isinstance(entry, Mark) or entry.revision < self.revision):
                continue
            if isinstance(entry, LoggedStep):
                if entry.revision > self.revision:
                    break
                self._move(entry)
                made += 1
            elif entry.run != self._run:
                raise LogError(f"the log is from another run, {entry.run!r}; this one is {self._run!r}")
            elif entry.digest != self._weights_digest():
                raise LogError(f"the log has different weights at revision {self.revision}, after {made} of its steps")
        return made

    def _mark(self) -> None:
        if self._log is not None:
            self._log.add(Mark(self.revision, self._weights_digest(), self._run))

    def close_log(self) -> None:
        """Write a final mark and close the log file, if there is one."""
        if self._log is not None:
            self._mark()
            self._log.close()
            self._log = None

    # Checkpoints.

    def _snapshot(self) -> Snapshot:
        self._grid.require_home()
        shapes = replica_of(self._model).shapes
        tensors = {name: tensor.numpy().reshape(shapes[name]) for name, tensor in self._tensors.items()}
        state = {"parameters": tensors, "exponents": self._grid.exponents, "buffers": buffers_of(self._model)}
        state["shared"] = self._replicated.state_dict()
        return Snapshot(
            self.revision, state, self._layout, repr(self._options), unnamed=without_state_dict(self._model)
        )

    def _restore(self, state: dict[str, Any], revision: int) -> None:
        buffers = buffers_of(self._model)
        require_like(buffers, state.get("buffers", buffers))
        with self._replicated.taking_up(state.get("shared", {})):
            assign(buffers, state.get("buffers", buffers))
            for name, tensor in self._tensors.items():
                tensor.assign(state["parameters"][name].reshape(-1))
            self._grid.exponents[...] = state["exponents"]
        self._state.revision = revision
        self._recent.clear()
        self._grid.adopt()
