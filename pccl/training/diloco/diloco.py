"""DiLoCo (Douillard et al. 2023, arXiv:2311.08105): many local steps, then one average.

All peers start an outer step from the same outer parameters. Each takes some *inner* steps on its own data with its own
optimizer. The movement of its parameters is its *pseudo-gradient*. The peers average these, and each applies the mean
to the outer parameters with the same outer optimizer. Outer parameters and momentum are the group's shared state.

*Inner steps by speed*, as in DyLU (Liu et al. 2024, arXiv:2401.09135): the fastest peer takes the configured number,
and every other peer takes `floor(inner_steps * seconds of the fastest / seconds of the peer)`, but at least 1.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Unpack

import numpy as np

from _pccl_torch import outside_graphs
from pccl import Communicator, PCCLError, QuantizationOptions, Result, SharedState, TensorInfo
from pccl._integers import as_int
from pccl.training.compression import Compressor, Owners
from pccl.training.diloco.outer import OuterNesterov, OuterOptimizer
from pccl.training.diloco.weighted_average import Average, CompressedAverage, NotedAverage, OwnedAverage, explained
from pccl.training.group.membership import Admission, Churn, Membership, fingerprint
from pccl.training.group.membership import alike as alike_quantization
from pccl.training.group.relaunch import Compression, CompressionWord, Outcome, Relaunched, average
from pccl.training.group.site import Site
from pccl.training.state import codec
from pccl.training.state.buffers import AVERAGE, exchanged_buffers
from pccl.training.state.checkpoint import Snapshot
from pccl.training.state.replica import Vector, local_shard, named_parts, replica_of
from pccl.training.state.replicated_state import ParamGroups, ReplicatedState, Stateful, frozen_parameters
from pccl.training.state.tensor_file import CheckpointError, Shard
from pccl.training.state.torch_state import (
    assign,
    buffers_of,
    class_of,
    distributed_like,
    optimizer_tensors,
    require_like,
    without_state_dict,
)
from pccl.training.step import (
    GroupStep,
    OnNonfinite,
    StepReport,
    TrainingLoop,
    checked_on_nonfinite,
    checked_weight,
    encoded_max,
    nonfinite_text,
)

logger = logging.getLogger(__name__)


UNKNOWN_S = math.inf
"""The `seconds` of a peer that has not measured its inner steps."""


class InnerSteps:
    """Measures the time of one peer's inner steps and decides how many steps it takes."""

    def __init__(self, inner_steps: int, site: Site | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._base = inner_steps
        self._site = site
        self.clock = clock
        self.forget()

    def forget(self) -> None:
        """Discard the measurements, as if the peer had just joined."""
        self.count = self._base
        self.seconds = UNKNOWN_S
        self._since_s = self.clock()

    def start(self) -> None:
        """Start measuring inner steps."""
        self._since_s = self.clock()

    def stop(self, made: int) -> None:
        """Update the measurement: `made` inner steps were taken since `start`."""
        if made < 1:
            return
        seconds = max((self.clock() - self._since_s) / made, 1e-9)
        self.seconds = seconds if math.isinf(self.seconds) else (self.seconds + seconds) / 2

    def adapt(self, seconds: Iterable[float], own: float) -> None:
        """Set the number of inner steps from each peer's seconds; `own` is this peer's value as sent to all peers."""
        fastest = min(seconds, default=UNKNOWN_S)
        wanted = self._base
        if math.isfinite(own) and math.isfinite(fastest):
            wanted = min(max(math.floor(self._base * (fastest / own)), 1), self._base)
        # The ranks of a site take their inner steps together.
        self.count = wanted if self._site is None else min(map(int, self._site.gather(str(wanted))))


def _is_finite(vector: Vector) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(np.dot(vector, vector)) or np.isfinite(vector).all())  # the product may overflow


NOTES = 2
"""Tag offset of the notes that accompany an average; the average itself uses offset 0."""
INNER_STEPS = 50


@dataclass(frozen=True, slots=True)
class OuterStep(StepReport):
    """The outcome of an outer step.

    `world_size` counts the peers whose pseudo-gradients are in the last update (1: only this peer, 0: no update).
    """

    is_skipped: bool = False
    """Whether the update was skipped because of `on_nonfinite`."""


class OuterLoop(TrainingLoop):
    """The base of `DiLoCo` and `AsyncDiLoCo`. Not thread-safe."""

    LOADS = ("DiLoCo", "AsyncDiLoCo")
    OUTER = OuterNesterov(1.0, 0.8)
    """The default outer optimizer, which did better than the paper's in each of three runs (docs/training.md)."""

    def __init__(
        self,
        communicator: Communicator,
        model: Any,
        inner: Stateful | None = None,
        *,
        outer: OuterOptimizer | None = None,
        quantization: QuantizationOptions | None = None,
        compression: CompressionWord | Compressor | Owners | None = None,
        tag: int = 0,
        site: Site | None = None,
        shared: Mapping[str, Stateful] | None = None,
        buffers: str = AVERAGE,
        check_every: int | None = None,
        compare_inner: bool | None = None,
        alike: object = None,
        inner_steps: int = INNER_STEPS,
        steps: Literal["fixed", "by speed"] = "fixed",
        on_nonfinite: OnNonfinite | None = None,
        **churn: Unpack[Churn],
    ) -> None:
        """`join` compares all arguments between peers, except `communicator`, `inner` and `site`.

        Args:
            model: A torch module on the CPU or CUDA devices, or a mapping of names to NumPy arrays.
            inner: The inner optimizer, saved in checkpoints. Newcomers receive its `param_groups`, if it has any.
            outer: The outer optimizer. The default is `OuterNesterov(1.0, 0.8)`, in `AsyncDiLoCo` `OuterNesterov()`.
            quantization: How to quantize the pseudo-gradients that are sent.
            compression: A word that sets quantization and error feedback (`pccl.ErrorFeedback`), for float32. "8bit":
                MIN_MAX codes of 8 bits, no feedback. "4bit": MIN_MAX codes of 4 bits, decay 1. "2bit": LLOYD_MAX,
                decay 0.4. "1bit": the same with SIGN. Or a compressor or `Owners` from `pccl.training.compression`,
                which is copied.
            tag: The first of three tags.
            site: The site, if this peer trains one shard; `communicator` must come from it.
            shared: Objects whose `state_dict()` is replicated, such as schedulers.
            buffers: "average" (mean of floats, maximum of others), "first" (from rank 0) or "local".
            check_every: Compare digests after this many outer steps; None compares as often as possible at a cost
                below 0.1 % of the time.
            compare_inner: Whether `param_groups` must be equal. None means True, except with steps "by speed".
            alike: Any other object whose `repr` must be equal on all peers.
            inner_steps: The number of inner steps of every peer, or of the fastest with steps "by speed".
            steps: "fixed", or "by speed": as many inner steps as fit in the fastest peer's time.
            on_nonfinite: What all peers do if a peer's movement or buffers have NaN or infinity: "raise" an error,
                "skip" the update, or "leave out" that peer. All name the peer, and its model, buffers and inner
                optimizer return to finite values. None does not check.
            churn: `rejoin`, `hold_below` and `on_older_run`: see `pccl.training.group.membership.Churn`.

        Raises TypeError or ValueError if the model cannot be trained or an argument is invalid.
        """
        tag, inner_steps = as_int("tag", tag), as_int("inner_steps", inner_steps, 1)
        if steps not in ("fixed", "by speed"):
            raise ValueError(f'steps {steps!r}: must be "fixed" or "by speed"')
        if steps == "by speed":
            alike = (alike, steps, inner_steps)
        word = None if isinstance(compression, Compressor | Owners) else compression
        self._coders = [copy.deepcopy(compression)] if isinstance(compression, Compressor | Owners) else []
        if self._coders and quantization is not None:
            raise ValueError("give either quantization= or a compressor")
        for coder in self._coders:
            for each in (coder.up, coder.down) if isinstance(coder, Owners) else (coder,):
                if not (each is not None and 0 <= each.decay <= 1):
                    raise ValueError(f"{each!r}: decay must be from 0 to 1")
        self._on_nonfinite = checked_on_nonfinite(on_nonfinite)
        if on_nonfinite is not None:
            alike = (alike, "on_nonfinite", on_nonfinite)
        self._nonfinite = ""
        self._is_skipped = False
        self._left_out = 0
        """The number of peers that the last average left out."""
        self._compression = Compression.of(word, quantization)
        quantization = self._compression.quantization
        self._is_by_speed = steps == "by speed"
        self._inner_steps = InnerSteps(inner_steps, site)
        self._has_begun = False
        self._communicator = communicator
        self._model = model
        self._replica = replica = replica_of(model)
        self._inner = inner
        self._feedback = [self._compression.feedback(replica.dtype)]
        self._outer: OuterOptimizer = outer or self.OUTER
        for coder in self._coders:
            if isinstance(coder, Compressor):
                coder.prepare(list(replica.shapes.values()))
        self._tag = tag
        self._parameters = np.empty(replica.count, replica.dtype)
        replica.read(self._parameters)
        self._momentum = self._outer.state(self._parameters)
        self._gradient = np.empty_like(self._parameters)
        run = f"{type(self).__name__} {fingerprint(quantization, self._outer, replica.layout, alike, *self._coders)}"
        compares_inner = not self._is_by_speed if compare_inner is None else compare_inner
        inner_name = type(inner).__qualname__ if hasattr(inner, "param_groups") else None
        self._alike = {
            "steps": steps,
            "inner": inner_name if compares_inner else "not compared",
            "alike": alike,
            "outer": self._outer,
            **(
                {"quantization": alike_quantization(quantization)}
                if compression is None
                else {"compression": compression}
            ),
        }
        self._replicated = ReplicatedState(
            communicator,
            tensors=self._compared,
            frozen=frozen_parameters(model),
            buffers=exchanged_buffers(model, buffers),
            shared=shared,
            groups=ParamGroups(inner) if hasattr(inner, "param_groups") else None,
            compares_groups=compares_inner,
            check_every=check_every,
            tag=tag,
        )
        outer_state = {f"parameters of {run}": self._parameters, f"momentum of {run}": self._momentum.reshape(-1)}
        self._outer_infos = [TensorInfo.from_numpy(vector, name) for name, vector in outer_state.items()]
        self._state = SharedState([*self._outer_infos, *self._replicated.infos()])
        self._site = site
        self._churn = churn
        self._membership = self._new_membership()

    def share(self, objects: Mapping[str, Stateful]) -> None:
        """Add objects to `shared`. Raises ValueError, TypeError, and PCCLError INVALID_USAGE after `join`."""
        if self.has_joined:
            raise PCCLError(Result.INVALID_USAGE, "share", "this peer has joined: call share before")
        self._replicated.share(objects)
        revision = self.revision
        self._state = SharedState([*self._outer_infos, *self._replicated.infos()])
        self._state.revision = revision
        self._membership = self._new_membership()

    def _new_membership(self) -> Membership:
        options = {"class": type(self).__name__, **self._replicated.options(), **self._alike}
        return Membership(
            self._communicator, self._state, options, site=self._site, joint=self._replicated, churn=self._churn
        )

    def _compared(self) -> Iterator[tuple[str, Any]]:
        vectors = {"outer parameter": self._parameters}
        for number, row in enumerate(np.atleast_2d(self._momentum)):
            vectors[f"outer state {number} of" if number else "momentum of"] = row
        for what, vector in vectors.items():
            for name, part in named_parts(vector, self._replica.shapes).items():
                yield f"{what} {name}", part.reshape(-1)
        yield from self._replicated.buffers.tensors()

    @property
    def has_joined(self) -> bool:
        """Whether this peer has joined a run with its current communicator."""
        return self._membership.is_under_way

    @property
    def outer_steps(self) -> int:
        """The number of outer steps in the whole run, including one in flight. The same on all peers."""
        return self.revision

    @property
    def inner(self) -> Stateful | None:
        """The inner optimizer, as given to the constructor."""
        return self._inner

    @property
    def inner_steps(self) -> int:
        """How many inner steps precede the next outer step. With `steps="by speed"`, outer steps may change it."""
        return self._inner_steps.count

    def digest(self) -> str:
        self._read_model()
        return super().digest()

    def show_outer(self) -> None:
        """Write the outer parameters and the common buffers into the model to evaluate or publish it."""
        self._replica.write(self._parameters)
        self._replicated.buffers.show()

    def trains(self, parameter: Any) -> bool:
        """Return whether `parameter` is averaged."""
        return self._replica.holds(parameter)

    def connect(self) -> None:
        """Connect the communicator unless it is connected. Call `join` immediately afterwards. Raises PCCLError."""
        try:
            self._communicator.world_size  # noqa: B018
        except PCCLError as error:
            if error.result is not Result.NOT_INITIALIZED:
                raise
            self._communicator.connect()

    def join(self, peers_min: int = 1) -> Admission:
        """Join the run. Call it right after the communicator has connected, because the other peers wait for it.

        Return when `peers_min` peers are present, or immediately if others already train; all then have the same outer
        state. Closes the communicator and raises PCCLError if the state cannot be obtained or options differ
        (INVALID_ARGUMENT).
        """
        self._read_model()
        return super().join(peers_min)

    def _enter(self, admission: Admission) -> None:
        self._has_begun = True
        self._feedback = [self._compression.feedback(self._replica.dtype) for _ in self._feedback]
        self._begin()
        self._inner_steps.forget()
        for coder in self._coders:
            coder.forget()

    @property
    def came_late(self) -> bool:
        """Whether others were already training when this peer joined."""
        return self._membership.came_late

    def _read_model(self) -> None:
        """Read the model, whose weights may have changed, unless outer state has been loaded or trained."""
        if not self._has_begun:
            self._replica.read(self._parameters)
            self._replicated.buffers.adopt()

    def reconnect(self, communicator: Communicator, peers_min: int = 1) -> Admission:
        """Rejoin with a newly connected communicator, after the master was lost or this peer was evicted.

        Inner steps that are not yet in an outer update are lost. Same result and errors as `join`.
        """
        self._communicator = communicator
        self._replicated.renew(communicator)
        self._membership = self._new_membership()
        return self.join(peers_min)

    def _drop_nonfinite(self, gradient: Vector) -> bool | None:
        """Return whether this peer's movement is finite, or None if it is not checked. Discard it if it is not."""
        if self._on_nonfinite is None:
            return None
        is_finite = _is_finite(gradient) and self._replicated.buffers.is_finite()
        options = self._compression.quantization
        if is_finite and options is not None:  # what becomes NaN or infinity on the network counts as such
            largest = max(gradient.max(), -gradient.min()) * self._communicator.world_size
            is_finite = bool(largest <= encoded_max(options))
        if self._site is not None:
            is_finite = self._site.agree(is_finite)
        if not is_finite:
            gradient[...] = 0
            self._reset_model()
            self._replicated.buffers.show()
            for tensor in optimizer_tensors(self._inner).values() if hasattr(self._inner, "param_groups") else ():
                held = local_shard(tensor)
                if not held.isfinite().all():
                    held.zero_()
        return is_finite

    def _reset_model(self) -> None:
        self._replica.write(self._parameters)

    def _launch_average(self, gradient: Vector, weight: float | None, is_finite: bool | None, part: int = 0) -> Average:
        """Launch the average of one of the parts that take turns."""
        communicator, tag, revision, feedback = self._communicator, self._tag, self.revision, self._feedback[part]
        quantization, seconds = self._compression.quantization, self._inner_steps.seconds
        if self._coders:
            coder = self._coders[part]
            if isinstance(coder, Owners):
                return OwnedAverage(
                    communicator, gradient, tag, tag + NOTES, revision, coder, weight, seconds, is_finite
                )
            return CompressedAverage(communicator, gradient, tag, revision, coder, weight, seconds, is_finite)
        if weight is None and not self._is_by_speed and is_finite is None:
            return average(communicator, gradient, tag, revision, quantization, feedback=feedback)
        return NotedAverage(
            communicator, gradient, tag, tag + NOTES, revision, quantization, weight, seconds, is_finite, feedback
        )

    def _wait_for(self, average: Average, step: GroupStep) -> Outcome:
        try:
            outcome = average.wait()
        except PCCLError as error:
            raise explained(error) from error.__cause__
        if self._is_by_speed and not isinstance(average, Relaunched):
            self._inner_steps.adapt(average.seconds, average.own_seconds)
        step.outcomes.append(outcome)
        peers = () if isinstance(average, Relaunched) else average.nonfinite
        self._left_out = len(peers)
        self._is_skipped = bool(peers) and (self._on_nonfinite != "leave out" or len(peers) == outcome.world_size)
        if peers:
            self._nonfinite = nonfinite_text(self._communicator, peers, "the movement", self._is_skipped)
            logger.warning("revision %d: %s", self.revision, self._nonfinite)
        return outcome

    def _reported(self, step: GroupStep) -> OuterStep:
        """Return the step's report, or raise the error of a step that ended with a peer that was not finite."""
        is_skipped, text, self._is_skipped, self._nonfinite = self._is_skipped, self._nonfinite, False, ""
        if text and self._on_nonfinite == "raise" and not step.rejoined:
            raise PCCLError(Result.INVALID_USAGE, f"{type(self).__name__}.outer_step", text)
        left_out, self._left_out = self._left_out, 0
        step.world_size = 0 if is_skipped else step.world_size - left_out
        return step.report(OuterStep, is_skipped=is_skipped)

    def _begin(self) -> None:
        self.show_outer()

    @property
    def outer_parameters(self) -> Vector:
        """A read-only view of the outer parameters, flat, in the model's order."""
        self._read_model()
        view = self._parameters.view()
        view.flags.writeable = False
        return view

    def outer_state(self) -> dict[str, Any]:
        """Return the revision, the outer parameters and outer optimizer's state (not copied), and the state of each
        `shared` object."""
        self._read_model()
        return {
            "revision": self.revision,
            "parameters": self._parameters,
            "momentum": self._momentum,
            "shared": self._replicated.state_dict(),
        }

    def take_outer_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of `outer_state`, before `join`, and write the outer parameters into the model.

        Raises CheckpointError, or ValueError if it is from another model, has other objects, or this peer has joined.
        On an error, no state has changed.
        """
        here = self.outer_state()
        shared = state.get("shared", here["shared"])
        for name in sorted(shared.keys() ^ here["shared"].keys()):
            text = "it has {}, which is not shared here" if name in shared else "it lacks {}, which is shared here"
            raise ValueError(
                f"the outer state does not fit: {text.format(repr(name.removeprefix('shared ')))}; give the same "
                "shared= (or call share before loading) as where it was saved"
            )
        vectors = [(name, np.asarray(state[name])) for name in ("parameters", "momentum")]
        for name, vector in vectors:
            if vector.shape != here[name].shape:
                what = "model" if name == "parameters" else "outer optimizer"
                raise ValueError(f"the outer state is from another {what}: {vector.size} {name}, not {here[name].size}")
        is_like_ours = codec.encode(shared) == codec.encode(here["shared"])
        is_like_ours = is_like_ours and state["revision"] == self.revision
        if is_like_ours and all(np.array_equal(vector, here[name]) for name, vector in vectors):
            return
        if self.has_joined:
            raise ValueError(
                f"the outer state has revision {state['revision']}, but all peers have revision "
                f"{self.revision}: load it before the first step, or before join"
            )
        with self._replicated.taking_up(shared):
            for name, vector in vectors:
                here[name][...] = vector
        self._state.revision = int(state["revision"])
        self._has_begun = True
        self.show_outer()

    def _update(self, gradient: Vector, place: slice = slice(None)) -> None:
        """Apply one outer update to the elements at `place`, overwriting `gradient`, unless it is to be skipped."""
        if not self._is_skipped:
            self._outer.at(self.revision).step(self._parameters[place], self._momentum[..., place], gradient)
        self._state.revision += 1

    def _snapshot(self) -> Snapshot:
        self._read_model()
        state: dict[str, Any] = {
            "parameters": named_parts(self._parameters, self._replica.shapes),
            "momentum": self._momentum,
            "buffers": buffers_of(self._model),
            "common buffers": dict(self._replicated.buffers.tensors()),
            "shared": self._replicated.state_dict(),
            "inner": self.inner.state_dict() if self.inner is not None else None,
        }
        if hasattr(self.inner, "param_groups"):
            state["optimizer class"] = class_of(self.inner)
        return Snapshot(self.revision, state, self._replica.layout, unnamed=without_state_dict(self._model))

    def _restore(self, state: dict[str, Any], revision: int) -> None:
        buffers = buffers_of(self._model)
        saved = state["parameters"]
        if isinstance(saved, dict):  # older versions saved one flat vector
            saved = np.concatenate([saved[name].reshape(-1) for name in self._replica.shapes])
        if self._parameters.shape != saved.shape:
            raise CheckpointError(f"it has {saved.size} parameters, not {self._parameters.size} as here")
        if self._momentum.shape != state["momentum"].shape:
            raise CheckpointError(f"it is from another outer optimizer, not from {self._outer!r}")
        require_like(buffers, state.get("buffers", buffers))
        with self._replicated.taking_up(state.get("shared", {})):
            if self.inner is not None and state["inner"] is not None:
                try:
                    self.inner.load_state_dict(state["inner"])
                except (ValueError, KeyError) as error:
                    raise CheckpointError(f"the inner optimizer rejects its saved state: {error}") from error
            assign(buffers, state.get("buffers", buffers))
            self._parameters[...] = saved
            self._momentum[...] = state["momentum"]
            self._state.revision = revision
        for name, vector in self._replicated.buffers.tensors():
            vector[...] = state.get("common buffers", {}).get(name, vector)
        self._has_begun = True
        self.show_outer()

    def _shard(self, tensor: Any, shard: Shard) -> Any:
        return distributed_like(self._model, tensor, shard)


@outside_graphs
class DiLoCo(OuterLoop):
    """DiLoCo (arXiv:2311.08105): peers train independently for some steps, then average how far their models moved.

    Arguments are those of `OuterLoop`. Between calls, the user may train the model with any optimizer. Peers may take
    different numbers of inner steps. Not thread-safe. Example::

        with Communicator() as communicator:
            diloco = DiLoCo(communicator, model, optimizer)
            diloco.join(peers_min=4)
            while diloco.revision < 100:
                for batch in batches(diloco.inner_steps):
                    train(model, optimizer, batch)
                print(diloco.outer_step())
    """

    def outer_step(self, *, weight: float | None = None, inner_steps: int | None = None) -> OuterStep:
        """Average the peers' movements, update the outer state, admit newcomers, and write the result to the model.

        A group call that waits for all other peers.

        Args:
            weight: This peer's weight in the average, at least 0, such as its number of tokens. Either all peers give
                a weight or none does.
            inner_steps: The number of inner steps taken, if it differs from the property `inner_steps`.

        Raises:
            ValueError: An argument is invalid; `outer_step` can be called again.
            PCCLError: The master was lost or this peer was evicted, and it could not rejoin (or `rejoin` is False); or
                an earlier call was interrupted (INVALID_USAGE): call `reconnect`. Also INVALID_USAGE if `join` was not
                called, and on all peers with `on_nonfinite="raise"`, where the step then counts without an update.
            DivergenceError: Replicated state differs between peers.
        """
        weight = checked_weight(weight)
        made = self.inner_steps if inner_steps is None else as_int("inner_steps", inner_steps, 0)
        self._inner_steps.stop(made)
        with self._group_step("DiLoCo.outer_step") as step:
            gradient = self._gradient
            self._replica.difference(self._parameters, gradient)
            is_finite = self._drop_nonfinite(gradient)
            with step.waiting():
                step.begin()
                step.claim()
                average = self._launch_average(gradient, weight, is_finite)
                step.launch_buffers()
                outcome = self._wait_for(average, step)
                step.land()
            step.world_size = outcome.world_size
            step.commit(outcome.peers)
            self._update(gradient)
            with step.waiting():
                step.admit()
            self._begin()
            step.end()
        self._inner_steps.start()
        return self._reported(step)

    def finish(self) -> OuterStep:
        """Compare the final state and write it to the model. A group call. Raises the errors of `outer_step`."""
        with self._group_step("DiLoCo.finish", rejoins=False) as step, step.waiting():
            self._replicated.discard()
            self._begin()
            self._replicated.check(self.revision)
        return step.report(OuterStep)
