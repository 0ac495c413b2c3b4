"""Asynchronous DiLoCo: communication overlaps with inner steps, and updates are applied one outer step late.

At the end of an outer step each peer launches the all-reduce of its pseudo-gradient g and continues with inner steps.
The average is applied at the end of the next outer step.

*Look-ahead.* Each peer continues from the outer parameters moved by past momentum, which all peers share, and by its
own g, its estimate of the average. When the average is applied, the local parameters become the outer parameters plus
the movement of the inner steps since the look-ahead.

*Eager updates* (Kale et al. 2025, arXiv:2502.12996) estimate the average by the own g and the others' previous ones, so
that a peer replaces only its own share, g / M of M peers. In the paper, every peer then applies this estimate to its
own outer state. Here the outer state is common and has all earlier averages, so that only the share g / M is missing:
`ahead="share"` continues from an outer step with it.

*Fragments* take turns (as in Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512). With K fragments, each outer
step handles one of them. Each fragment is averaged once every H inner steps, and its average is H / K steps late.

*Overlap and mixing* are from the same paper: the average is applied `overlap` inner steps after its launch, and with
`mixing` alpha, the local parameters become alpha * local + (1 - alpha) * outer, without a look-ahead.

*Joins.* Newcomers are admitted on the first fragment's turn: all peers apply the average in flight, compute and apply
the next one at once, admit the newcomers and synchronize. With `overlap`, no average is in flight after the last
fragment's has been applied, and newcomers are admitted there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, Unpack

import numpy as np

from _pccl_torch import outside_graphs
from pccl import Communicator, QuantizationOptions
from pccl._floating_point import default_environment
from pccl._integers import as_int
from pccl.training.compression import Compressor, Owners
from pccl.training.diloco.diloco import INNER_STEPS, OuterLoop, OuterStep
from pccl.training.diloco.outer import OuterNesterov, OuterOptimizer
from pccl.training.diloco.weighted_average import Average
from pccl.training.group.membership import Admission, Churn
from pccl.training.group.relaunch import CompressionWord
from pccl.training.group.site import Site
from pccl.training.state.buffers import AVERAGE
from pccl.training.state.replica import Part, Replica, Vector
from pccl.training.state.replicated_state import Stateful
from pccl.training.step import GroupStep, OnNonfinite, as_float, checked_weight


@dataclass(frozen=True, eq=False, slots=True)
class Fragment:
    part: Part
    place: slice


def _fragments(replica: Replica, count: int) -> list[Fragment]:
    parts: Sequence[Part] = replica.split(count)
    ends = accumulate((part.count for part in parts), initial=0)
    return [Fragment(part, slice(*place)) for part, place in zip(parts, pairwise(ends), strict=True)]


@dataclass(frozen=True, slots=True)
class Flight:
    """A fragment's average in flight."""

    fragment: Fragment
    vector: Vector
    average: Average


@outside_graphs
class AsyncDiLoCo(OuterLoop):
    """DiLoCo that averages during the next inner steps and applies the average one outer step late.

    Takes the arguments of `DiLoCo`, and `fragments`: the number of model parts that take turns, one per outer step, the
    same on all peers. With two, call `outer_step` twice as often. `finish` ends a run. Not thread-safe.

    Args:
        overlap: Apply an average after this many inner steps, fewer than `inner_steps`. Calls of `outer_step` then
            launch and apply averages in turn, and the property `inner_steps` has the number until the next call. None:
            apply it when the next one is launched.
        mixing: Continue from the local parameters, and keep this share of them when the average is applied, at least
            0 and below 1. Needs `overlap` or several fragments. None: look ahead.
        ahead: The estimate of the average for the look-ahead: the "own" pseudo-gradient, or its "share" of the average.
    """

    OUTER = OuterNesterov()
    """The faster one of `DiLoCo` loses much if updates are late."""

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
        fragments: int = 1,
        overlap: int | None = None,
        mixing: float | None = None,
        ahead: Literal["own", "share"] = "own",
        inner_steps: int = INNER_STEPS,
        steps: Literal["fixed", "by speed"] = "fixed",
        on_nonfinite: OnNonfinite | None = None,
        **churn: Unpack[Churn],
    ) -> None:
        fragments = as_int("fragments", fragments, 1)
        if overlap is not None:
            overlap = as_int("overlap", overlap, 1, as_int("inner_steps", inner_steps, 2) - 1)
        if overlap is not None and steps != "fixed":
            raise ValueError('overlap needs steps="fixed"')
        if ahead not in ("own", "share"):
            raise ValueError(f'ahead {ahead!r}: must be "own" or "share"')
        if mixing is not None:
            mixing = as_float("mixing", mixing)
            if not 0 <= mixing < 1 or ahead != "own":
                raise ValueError(f"mixing {mixing}: must be at least 0 and below 1, without ahead=")
            if overlap is None and fragments == 1:
                raise ValueError("mixing needs overlap= or several fragments")
        super().__init__(
            communicator,
            model,
            inner,
            outer=outer,
            quantization=quantization,
            compression=compression,
            tag=tag,
            site=site,
            shared=shared,
            buffers=buffers,
            check_every=check_every,
            compare_inner=compare_inner,
            alike=f"fragments={fragments}, overlap={overlap}, mixing={mixing}, ahead={ahead}",
            inner_steps=inner_steps,
            steps=steps,
            on_nonfinite=on_nonfinite,
            **churn,
        )
        self._fragments = _fragments(self._replica, fragments)
        self._feedback *= fragments  # `_enter` replaces them by separate ones
        self._overlap, self._mixing, self._ahead = overlap, mixing, ahead
        self._coders = [copy.deepcopy(each) for each in self._coders for _ in self._fragments]
        for coder, fragment in zip(self._coders, self._fragments, strict=False):
            if isinstance(coder, Compressor):
                coder.prepare(fragment.part.part_shapes())
        self._flight: Flight | None = None
        self._weights = [0.0] * fragments  # since each fragment's last turn
        largest = max(fragment.part.count for fragment in self._fragments)
        self._gradient, self._flying, self._start = (np.empty(largest, self._replica.dtype) for _ in range(3))
        # `_flying` holds the vector of the average in flight, which must not be touched; `_gradient` is free. `_start`
        # is the point from which this peer's inner steps have moved the fragment in flight.

    @property
    def outer_steps(self) -> int:
        return self.revision + (self._flight is not None)

    @property
    def inner_steps(self) -> int:
        whole = super().inner_steps
        if self._overlap is None:
            return whole
        return whole - self._overlap if self._flight is None else self._overlap

    def outer_step(self, *, weight: float | None = None, inner_steps: int | None = None) -> OuterStep:
        """Apply the average in flight, launch the next fragment's, and write the parameters to continue from.

        With `overlap`, a call does only one of the first two. A group call. It waits only if other peers or the network
        are slower than this peer's inner steps. Arguments and errors are those of `DiLoCo.outer_step`, but a fragment's
        weight is the sum of the weights since its last turn.
        """
        weight = checked_weight(weight)
        made = self.inner_steps if inner_steps is None else as_int("inner_steps", inner_steps, 0)
        self._inner_steps.stop(made)
        with self._group_step("AsyncDiLoCo.outer_step") as step:
            weights = None if weight is None else [each + weight for each in self._weights]
            if self._overlap is not None and self._flight is not None:
                self._land_only(step, weights)
            else:
                self._take_turn(step, weights)
            step.end()
        self._inner_steps.start()
        return self._reported(step)

    def _land_only(self, step: GroupStep, weights: list[float] | None) -> None:
        assert self._flight is not None
        landing = self._flight.fragment
        with step.waiting():
            step.begin()
            step.world_size = self._land(step)
            self._replicated.land_comparison()
            self._weights = weights or self._weights
            if landing is self._fragments[-1]:
                step.admit()
        self._carry_on(landing)

    def _take_turn(self, step: GroupStep, weights: list[float] | None) -> None:
        """Apply the average in flight, if any, and launch the next one."""
        turn = self.outer_steps % len(self._fragments)
        fragment = self._fragments[turn]
        weight = None
        if weights is not None:
            weight, weights[turn] = weights[turn], 0.0
        part, outer, count = fragment.part, self._parameters[fragment.place], fragment.part.count
        landing = self._flight.fragment if self._flight is not None else None
        gradient = self._gradient[:count]
        part.difference(self._start[:count] if landing is fragment else outer, gradient)
        is_finite = self._drop_nonfinite(gradient)
        with step.waiting():
            # This order matters: no peer may wait in a group call while others relaunch an aborted average.
            step.begin()
            step.claim(in_flight=self._flight is not None)
            step.world_size = self._land(step)
            self._replicated.land_comparison()
            self._weights = weights or self._weights  # if the call failed before, a retry passes the weight again
            if self._overlap is None and fragment is self._fragments[0] and step.must_admit():
                self._launch(fragment, gradient, weight, is_finite)
                step.world_size = self._land(step)
                step.admit()
        if landing is not None and landing is not fragment:
            self._carry_on(landing)
        if step.admission is not None:
            part.write(outer)
            return
        if self._mixing is None:
            start, momentum = self._start[:count], self._momentum[..., fragment.place]
            if self._ahead == "own":
                self._outer.at(self.revision).look_ahead(outer, momentum, gradient, start)
            else:
                np.copyto(start, outer)
                share = gradient / gradient.dtype.type(self._communicator.world_size)
                self._outer.at(self.revision).step(start, momentum.copy(), share)
            part.write(start)
        self._launch(fragment, gradient, weight, is_finite)

    def finish(self) -> OuterStep:
        """Apply the average in flight and write the outer parameters to the model. All peers call it at the end.

        Movement of other fragments since their last turn is discarded. Raises the errors of `outer_step`.
        """
        with self._group_step("AsyncDiLoCo.finish", rejoins=False) as step:
            with step.waiting():
                self._replicated.discard()
                step.world_size = self._land(step)
            self._begin()
            self._replicated.check(self.revision)
        return self._reported(step)

    def reconnect(self, communicator: Communicator, peers_min: int = 1) -> Admission:
        self._flight = None
        return super().reconnect(communicator, peers_min)

    def _drop(self) -> None:
        super()._drop()
        self._flight = None

    def _begin(self) -> None:
        super()._begin()
        self._weights = [0.0] * len(self._fragments)

    def _reset_model(self) -> None:
        super()._reset_model()
        if self._flight is not None and self._mixing is None:  # `_carry_on` then finds no movement since the look-ahead
            self._flight.fragment.part.write(self._start[: self._flight.fragment.part.count])

    def _launch(self, fragment: Fragment, gradient: Vector, weight: float | None, is_finite: bool | None) -> None:
        """Launch the average of `gradient`, a view of `_gradient`. All peers have the same revision."""
        assert self._flight is None
        self._gradient, self._flying = self._flying, self._gradient
        part = self._fragments.index(fragment)
        average = self._launch_average(gradient, weight, is_finite, part)
        self._replicated.launch_buffers(self.revision)
        self._flight = Flight(fragment, gradient, average)

    def _land(self, step: GroupStep) -> int:
        """Apply the average in flight and its buffers. Return its number of peers, or 0 if none is in flight."""
        if self._flight is None:
            return 0
        outcome = self._wait_for(self._flight.average, step)
        step.land_buffers(keep_going=True)
        step.commit(outcome.peers)
        self._update(self._flight.vector, self._flight.fragment.place)
        self._flight = None
        return outcome.world_size

    @default_environment()
    def _carry_on(self, fragment: Fragment) -> None:
        """Set `fragment` to its outer parameters plus its local movement since the look-ahead, or mix it with them."""
        outer, local = self._parameters[fragment.place], self._start[: fragment.part.count]
        if self._mixing is None:
            fragment.part.difference(local, local)
            np.subtract(outer, local, out=local)
        else:
            fragment.part.read(local)
            local *= self._mixing
            local += (1 - self._mixing) * outer
        fragment.part.write(local)
