"""Refusing a step on all peers: the exchange, the reasons and their texts.

Before every step, one op gathers a few integers from each peer: zeros or a refusal, and the peer's weight. The op is
launched after the last gradient and waited for after the averages, so it adds no round trip.
"""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pccl import Communicator
from pccl.training.ddp.gradients import ALL, Bucket
from pccl.training.group.relaunch import Outcome, Relaunched, own_number
from pccl.training.state.torch_state import HeldTensors, optimized

FINE = (0, 0, 0)
UNLIKE = -1
"""The first integer of the refusal recorded for a peer whose options differ."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """One peer's refusal of a step."""

    peer: int
    is_own: bool
    what: tuple[int, int, int]


class RefusalExchange:
    """The exchange in flight. All peers of the group launch it with the same tag and step."""

    def __init__(
        self,
        communicator: Communicator,
        tag: int,
        step: int,
        what: tuple[int, int, int] = FINE,
        *,
        alike: str = "",
        number: float = math.nan,
        count: int = 0,
    ) -> None:
        """`alike` is a text that must be the same on all peers; `number` and `count` are sent to the others."""
        self._communicator = communicator
        self._what = what
        self._number = number
        self.numbers: dict[int, float] = {}
        self.counts: dict[int, int] = {}
        """The `number` and the `count` of each peer, after `wait` has returned."""
        row = np.array([*what, zlib.crc32(alike.encode()), count, 0], np.int64)
        row[-1:] = np.array([number]).view(np.int64)
        self._op = Relaunched(communicator, lambda: communicator.launch.all_gather(row, tag=tag, step=step))
        self._row = row

    def wait(self) -> tuple[list[Refusal], Outcome]:
        """Return all peers' refusals, the same on all, and the op's outcome. Raises PCCLError."""
        outcome = self._op.wait()
        rows = np.atleast_2d(self._op.info.array if self._op.info is not None else self._row)
        own = own_number(self._communicator)
        own_hook = int(self._row[3])
        self.numbers = dict(zip(outcome.peers, rows.view(np.float64)[:, -1].tolist(), strict=True))
        self.counts = dict(zip(outcome.peers, rows[:, -2].tolist(), strict=True))
        found = []
        for peer, (*what, hook, _, _) in zip(outcome.peers, rows.tolist(), strict=True):
            if tuple(what) != FINE:
                found.append(Refusal(peer, peer == own, tuple(what)))
            elif hook != own_hook:
                found.append(Refusal(peer, peer == own, (UNLIKE, 0, 0)))
        return found, outcome


CHANGED, NOT_AVERAGED, UNSCALED, REPLACED, UNWEIGHTED, ABANDONED, NONFINITE = range(1, 8)
"""Kinds of refusals. Two integers follow: for CHANGED, the bucket and an index in it; for others, an index or zeros."""

REASONS = {
    UNLIKE: "registered a different communication hook than this peer, or other options: register the same on all",
    CHANGED: (
        "has changed the gradient of {name} while it was being sent: call ddp.synchronize() before code that "
        "changes gradients, such as clip_grad_norm_ or scaler.unscale_; after it they are the averages"
    ),
    NOT_AVERAGED: (
        "has a gradient of {name}, which is not averaged because it did not require gradients or did not exist when "
        "the DDP was created: create the DDP after unfreezing or adding parameters"
    ),
    UNSCALED: (
        "has called scaler.unscale_(optimizer) before the gradients were averaged: call ddp.synchronize() first"
    ),
    REPLACED: (
        "has replaced the replicated tensor {name}, as module.to() does: move and convert the module before the DDP "
        "is created"
    ),
    ABANDONED: "has given up the step with ddp.abandon()",
    UNWEIGHTED: "gave no weight=, but others did: give one to ddp.step() or ddp.synchronize() on all peers or on none",
}
"""What a peer has done, where `{name}` is the affected tensor."""
SHOWN = 3


class StepRefusals:
    """Finds this peer's reason to refuse a step, and explains all peers' refusals. Not thread-safe."""

    def __init__(
        self,
        optimizer: Any,
        names: Mapping[int, str],
        buckets: Sequence[Bucket],
        held: HeldTensors,
        is_unscaled: Callable[[], bool],
    ) -> None:
        """`names` are the names of the module's parameters, by `id`; `is_unscaled` detects UNSCALED."""
        self._optimizer = optimizer
        self._names = names
        self._buckets = buckets
        self._held = held
        self._is_unscaled = is_unscaled
        self._averaged = {id(parameter) for bucket in buckets for parameter in bucket.parameters}

    def own(self) -> tuple[int, int, int]:
        """Return this peer's refusal, as three integers, or FINE."""
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

    def explained(self, objections: Sequence[Refusal]) -> str:
        """Return the text of the error that all peers raise. It names the same tensors on all, as modules are equal."""
        told = "; ".join(
            f"{'this peer' if each.is_own else f'peer {each.peer}'} {self._reason(*each.what)}"
            for each in objections[:SHOWN]
        )
        more = f" (and {len(objections) - SHOWN} more)" if len(objections) > SHOWN else ""
        return f"{told}{more}. No peer has taken this step, and its gradients are cleared on all"

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
                name += f" or of another parameter down to {self._names[id(parameters[-1])]!r}"
        return REASONS[kind].format(name=name)


def found_inf(scaler: Any, optimizer: Any) -> bool:
    """Return whether the scaler found infinities in this step; call it before the scaler's `update`."""
    return any(bool(found) for found in _state(scaler, optimizer).get("found_inf_per_device", {}).values())


def _state(scaler: Any, optimizer: Any) -> dict[str, Any]:
    states: dict[int, dict[str, Any]] = getattr(scaler, "_per_optimizer_states", {})
    return states.get(id(optimizer), {})


class GradScalers:
    """The GradScalers known to step this optimizer. Not thread-safe."""

    def __init__(self, optimizer: Any, shared: Iterable[object]) -> None:
        self._optimizer = optimizer
        self._known = weakref.WeakSet[Any](each for each in shared if hasattr(each, "_per_optimizer_states"))

    def is_unscaled(self) -> bool:
        """Return whether one of them has unscaled this step's gradients."""
        stages = (_state(each, self._optimizer).get("stage") for each in self._known)
        return any(getattr(stage, "name", "") == "UNSCALED" for stage in stages)

    def forget(self) -> None:
        """Forget a step that was given up, so that scalers may unscale the next step's gradients."""
        for each in self._known:
            getattr(each, "_per_optimizer_states", {}).pop(id(self._optimizer), None)

    def add(self, scaler: Any) -> None:
        """Add a scaler that was passed to a step."""
        self._known.add(scaler)
