"""Why a step of `DDP` is refused: the kinds of objections that peers tell each other (`pccl.training.group.veto`), and
what they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pccl.training.ddp.gradient_buckets import ALL, Bucket
from pccl.training.group.veto import FINE, UNLIKE, Objection
from pccl.training.tensors.held_tensors import HeldTensors, optimized

# Kinds; the two integers that follow:
CHANGED = 1
"""Gradients in flight were written: bucket, and place in it."""
NOT_AVERAGED = 2
"""A parameter of the optimizer has a gradient and is in no bucket: its number."""
UNSCALED = 3
"""A GradScaler has looked for infinities among gradients that were not averages."""
REPLACED = 4
"""A tensor that peers have in common is not in use: its place among them."""
UNWEIGHTED = 5
"""Gave no weight, where others did."""
ABANDONED = 6
"""Gave up the step."""

REASONS = {
    UNLIKE: "has another communication hook than this peer, or other options of it: register the same on all",
    CHANGED: (
        "has changed the gradient of {name} while it was on its way to the others: write ddp.synchronize() before what "
        "changes gradients, such as clip_grad_norm_ or scaler.unscale_; from then on they are the averages"
    ),
    NOT_AVERAGED: (
        "has a gradient of {name}, which is not averaged, since it did not require gradients or was not there when the "
        "DDP was made: make it anew after what unfreezes or adds parameters"
    ),
    UNSCALED: (
        "has called scaler.unscale_(optimizer) before the gradients were averaged: write ddp.synchronize() before it"
    ),
    REPLACED: (
        "has replaced the tensor {name}, which peers have in common, as module.to() does: move and convert the module "
        "before the DDP is made"
    ),
    ABANDONED: "has given up the step, by ddp.abandon()",
    UNWEIGHTED: "gave no weight=, as others did: all give one to ddp.step() or ddp.synchronize(), or none does",
}
"""The texts of what a peer has done, with a `{name}` of what it has done it to."""
SHOWN = 3


class Objections:
    """The reasons why this peer must not make a step, found before each, and the text of all peers' reasons. Not
    thread-safe."""

    def __init__(
        self,
        optimizer: Any,
        names: Mapping[int, str],
        buckets: Sequence[Bucket],
        held: HeldTensors,
        is_unscaled: Callable[[], bool],
    ) -> None:
        """`names` are those of the module's parameters, by `id`; `is_unscaled` tells of UNSCALED."""
        self._optimizer = optimizer
        self._names = names
        self._buckets = buckets
        self._held = held
        self._is_unscaled = is_unscaled
        self._averaged = {id(parameter) for bucket in buckets for parameter in bucket.parameters}

    def own(self) -> tuple[int, int, int]:
        """Return this peer's objection, as three integers for the others, or FINE."""
        for number, bucket in enumerate(self._buckets):
            place = bucket.changed()
            if place is not None:
                return CHANGED, number, place
        for number, parameter in enumerate(optimized(self._optimizer)):
            if parameter.grad is not None and id(parameter) not in self._averaged:
                return NOT_AVERAGED, number, 0
        if self._is_unscaled():
            return UNSCALED, 0, 0
        place = self._held.replaced()
        return (REPLACED, place, 0) if place is not None else FINE

    def explained(self, objections: Sequence[Objection]) -> str:
        """Return the text that all peers raise; it names the same tensors everywhere, as all have the same module."""
        told = "; ".join(
            f"{'this peer' if each.is_own else f'peer {each.peer}'} {self._reason(*each.what)}"
            for each in objections[:SHOWN]
        )
        more = f" (and {len(objections) - SHOWN} more)" if len(objections) > SHOWN else ""
        return f"{told}{more}. No peer has made this step, and its gradients are cleared on all"

    def _reason(self, kind: int, number: int, place: int) -> str:
        name = ""
        if kind == NOT_AVERAGED:
            parameter = optimized(self._optimizer)[number]
            name = repr(self._names.get(id(parameter), f"number {number} of the optimizer"))
        elif kind == REPLACED:
            name = repr(self._held.name(number))
        elif kind == CHANGED:
            parameters = self._buckets[number].parameters
            name = repr(self._names[id(parameters[0 if place == ALL else place])])
            if place == ALL and len(parameters) > 1:
                name += f" or of another one down to {self._names[id(parameters[-1])]!r}"
        return REASONS[kind].format(name=name)
