"""Asynchronous DiLoCo: communication overlaps with inner steps, and updates are applied one outer step late.

At the end of an outer step each peer launches the all-reduce of its pseudo-gradient g and continues with inner steps.
The average is applied at the end of the next outer step.

*Look-ahead* (compare Kale et al. 2025, arXiv:2502.12996). Each peer continues from the outer parameters moved by past
momentum, which all peers share, and by its own g. When the average is applied, the local parameters become the outer
parameters plus the movement of the inner steps since the look-ahead.

*Fragments* take turns (as in Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512). With K fragments, each outer
step handles one of them. Each fragment is averaged once every H inner steps, and its average is H / K steps late.

*Joins.* Newcomers are admitted on the first fragment's turn: all peers apply the average in flight, compute and apply
the next one at once, admit the newcomers and synchronize.
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
from pccl.training.diloco.diloco import INNER_STEPS, OuterLoop, OuterNesterov, OuterStep
from pccl.training.diloco.weighted_average import Average
from pccl.training.group.membership import Admission, Churn
from pccl.training.group.relaunch import CompressionWord
from pccl.training.group.site import Site
from pccl.training.state.buffers import AVERAGE
from pccl.training.state.replica import Part, Replica, Vector
from pccl.training.state.replicated_state import Stateful
from pccl.training.step import GroupStep, OnNonfinite, checked_weight


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
    """

    def __init__(
        self,
        communicator: Communicator,
        model: Any,
        inner: Stateful | None = None,
        *,
        outer: OuterNesterov | None = None,
        quantization: QuantizationOptions | None = None,
        compression: CompressionWord | Compressor | Owners | None = None,
        tag: int = 0,
        site: Site | None = None,
        shared: Mapping[str, Stateful] | None = None,
        buffers: str = AVERAGE,
        check_every: int | None = None,
        compare_inner: bool | None = None,
        fragments: int = 1,
        inner_steps: int = INNER_STEPS,
        steps: Literal["fixed", "by speed"] = "fixed",
        on_nonfinite: OnNonfinite | None = None,
        **churn: Unpack[Churn],
    ) -> None:
        fragments = as_int("fragments", fragments, 1)
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
            alike=("fragments", fragments),
            inner_steps=inner_steps,
            steps=steps,
            on_nonfinite=on_nonfinite,
            **churn,
        )
        self._fragments = _fragments(self._replica, fragments)
        self._feedback *= fragments  # `_enter` replaces them by separate ones
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

    def outer_step(self, *, weight: float | None = None, inner_steps: int | None = None) -> OuterStep:
        """Apply the average in flight, launch the next fragment's, and write the parameters to continue from.

        A group call. It waits only if other peers or the network are slower than this peer's inner steps. Arguments
        and errors are those of `DiLoCo.outer_step`, but a fragment's weight is the sum of the weights since its last
        turn.
        """
        weight = checked_weight(weight)
        made = self.inner_steps if inner_steps is None else as_int("inner_steps", inner_steps, 0)
        self._inner_steps.stop(made)
        with self._group_step("AsyncDiLoCo.outer_step") as step:
            turn = self.outer_steps % len(self._fragments)
            fragment = self._fragments[turn]
            weights = self._weights
            if weight is not None:
                weights = [each + weight for each in weights]
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
                self._weights = weights  # if the call failed before this line, a retry passes the weight again
                if fragment is self._fragments[0] and step.must_admit():
                    self._launch(fragment, gradient, weight, is_finite)
                    step.world_size = self._land(step)
                    step.admit()
            if landing is not None and landing is not fragment:
                self._carry_on(landing)
            if step.admission is not None:
                part.write(outer)
            else:
                start = self._start[:count]
                self._outer.look_ahead(outer, self._momentum[fragment.place], gradient, start)
                part.write(start)
                self._launch(fragment, gradient, weight, is_finite)
            step.end()
        self._inner_steps.start()
        return self._reported(step)

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
        if self._flight is not None:  # `_carry_on` then finds no movement since the look-ahead
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
        """Set `fragment` to its outer parameters plus its local movement since the look-ahead."""
        moved = self._start[: fragment.part.count]
        fragment.part.difference(moved, moved)
        np.subtract(self._parameters[fragment.place], moved, out=moved)
        fragment.part.write(moved)
