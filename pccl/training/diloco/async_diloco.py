"""Asynchronous DiLoCo: the network works while inner steps go on, and updates come an outer step late.

At the end of an outer step each peer launches the all-reduce of its pseudo-gradient g and goes on with inner steps; the
average is applied at the end of the next outer step.

*Looking ahead* (compare Kale et al. 2025, arXiv:2502.12996). Each peer goes on from the outer parameters moved by past
momentum, which is common, and by its own g. When the average is applied, the local parameters become the outer ones
plus what inner steps have moved them since.

*Fragments* take turns (as in Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512). With K fragments an outer step
is one fragment's; each is averaged once in H inner steps, and its average comes H / K inner steps late.

*Joins.* Newcomers are let in when it is the first fragment's turn: all apply the average that is due, make and apply
the next one at once, admit and synchronize.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np

from _pccl_torch import outside_graphs
from pccl import Communicator, QuantizationOptions
from pccl._floating_point import default_environment
from pccl._integers import as_int
from pccl.training.diloco.diloco import INNER_STEPS, OuterLoop, OuterNesterov, OuterStep
from pccl.training.diloco.weighted_average import NotedAverage
from pccl.training.group.membership import Admission
from pccl.training.group.relaunch import Relaunched
from pccl.training.group.site import Site
from pccl.training.state.buffers import AVERAGE
from pccl.training.state.replica import Part, Replica, Vector
from pccl.training.state.replicated_state import Stateful
from pccl.training.step import GroupStep, checked_weight


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
    """An average in flight."""

    fragment: Fragment
    vector: Vector
    average: Relaunched | NotedAverage


@outside_graphs
class AsyncDiLoCo(OuterLoop):
    """DiLoCo whose average travels during the next inner steps, and is applied one outer step late.

    Arguments are those of `DiLoCo`, and `fragments`: parts of the model that take turns, one in each outer step, the
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
        tag: int = 0,
        site: Site | None = None,
        shared: Mapping[str, Stateful] | None = None,
        buffers: str = AVERAGE,
        check_every: int | None = None,
        compare_inner: bool | None = None,
        fragments: int = 1,
        inner_steps: int = INNER_STEPS,
        steps: Literal["fixed", "by speed"] = "fixed",
    ) -> None:
        fragments = as_int("fragments", fragments, 1)
        super().__init__(
            communicator,
            model,
            inner,
            outer=outer,
            quantization=quantization,
            tag=tag,
            site=site,
            shared=shared,
            buffers=buffers,
            check_every=check_every,
            compare_inner=compare_inner,
            alike=("fragments", fragments),
            inner_steps=inner_steps,
            steps=steps,
        )
        self._fragments = _fragments(self._replica, fragments)
        self._flight: Flight | None = None
        self._weights = [0.0] * fragments  # since the last turn of each
        largest = max(fragment.part.count for fragment in self._fragments)
        self._gradient, self._flying, self._start = (np.empty(largest, self._replica.dtype) for _ in range(3))
        # The vector of the average in flight is to be left alone: it is in `_flying`, and `_gradient` is free. `_start`
        # is from where this peer's inner steps have moved the fragment in flight.

    @property
    def outer_steps(self) -> int:
        return self.revision + (self._flight is not None)

    def outer_step(self, *, weight: float | None = None, inner_steps: int | None = None) -> OuterStep:
        """Apply the average in flight, launch that of the next fragment, and show where to go on from.

        A group call; waits only as long as other peers or the network are slower than this peer's inner steps.
        Arguments and errors are those of `DiLoCo.outer_step`; a fragment counts by the sum of the weights since its
        last turn.
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
            with step.waiting():
                # In this order: a peer that has to relaunch an aborted average must not wait in a group call.
                step.begin()
                step.claim(in_flight=self._flight is not None)
                world_size = self._land(step)
                self._replicated.land_comparison()
                self._weights = weights  # a call that has failed before this gives the weight again
                if fragment is self._fragments[0] and step.are_peers_pending():
                    self._launch(fragment, gradient, weight)
                    world_size = self._land(step)
                    step.admit()
            if landing is not None and landing is not fragment:
                self._carry_on(landing)
            if step.admission is not None:
                part.write(outer)
            else:
                start = self._start[:count]
                self._outer.look_ahead(outer, self._momentum[fragment.place], gradient, start)
                part.write(start)
                self._launch(fragment, gradient, weight)
            step.end()
        self._inner_steps.start()
        return step.report(OuterStep, world_size)

    def finish(self) -> OuterStep:
        """Apply the average in flight and show the outer parameters, on all peers after the last outer step.

        What other fragments have moved since their last turn is left out. Raises as `outer_step`.
        """
        with self._group_step("AsyncDiLoCo.finish") as step:
            with step.waiting():
                self._replicated.discard()
                world_size = self._land(step)
            self._begin()
            self._replicated.check(self.revision)
        return step.report(OuterStep, world_size)

    def reconnect(self, communicator: Communicator, peers_min: int = 1) -> Admission:
        self._flight = None
        return super().reconnect(communicator, peers_min)

    def _begin(self) -> None:
        super()._begin()
        self._weights = [0.0] * len(self._fragments)

    def _launch(self, fragment: Fragment, gradient: Vector, weight: float | None) -> None:
        """Launch the average of `gradient`, which is in `_gradient`. All peers have the same revision."""
        assert self._flight is None
        self._gradient, self._flying = self._flying, self._gradient
        average = self._launch_average(gradient, weight)
        self._replicated.launch_buffers(self.revision)
        self._flight = Flight(fragment, gradient, average)

    def _land(self, step: GroupStep) -> int:
        """Apply the average in flight and its buffers. Return the number of its peers; 0: none in flight."""
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
        """Move what `fragment` has moved since the look-ahead to where its outer parameters are."""
        moved = self._start[: fragment.part.count]
        fragment.part.difference(moved, moved)
        np.subtract(self._parameters[fragment.place], moved, out=moved)
        fragment.part.write(moved)
