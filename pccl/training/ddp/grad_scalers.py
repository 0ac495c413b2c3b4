"""GradScalers beside `DDP`: whether one has looked at gradients before they were the averages, or has skipped a step.

A scaler that looks for infinities among a peer's own gradients decides about the step by them, and peers part. Scalers
are known that are shared, or were given to a former step; a peer whose scaler has looked too early says so to all. Of a
scaler that is given to the very first step alone it is seen by gradients that it has not changed since they were given
out as averages.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from pccl import PCCLError, Result
from pccl.training.ddp.gradient_buckets import Bucket
from pccl.training.ddp.objections import REASONS, UNSCALED


def found_inf(scaler: Any, optimizer: Any) -> bool:
    """Whether the scaler has found infinities in this step, before its `update`."""
    return any(bool(found) for found in _state(scaler, optimizer).get("found_inf_per_device", {}).values())


def _state(scaler: Any, optimizer: Any) -> dict[str, Any]:
    states: dict[int, dict[str, Any]] = getattr(scaler, "_per_optimizer_states", {})
    return states.get(id(optimizer), {})


def _has_unscaled(scaler: Any, optimizer: Any) -> bool:
    return getattr(_state(scaler, optimizer).get("stage"), "name", "") == "UNSCALED"


class GradScalers:
    """The GradScalers that are known to step this optimizer. Not thread-safe."""

    def __init__(self, optimizer: Any, shared: Iterable[object]) -> None:
        self._optimizer = optimizer
        self._known = weakref.WeakSet[Any](each for each in shared if hasattr(each, "_per_optimizer_states"))
        self._has_stepped = False
        self._is_noted = False

    def is_unscaled(self) -> bool:
        """Whether one of them has unscaled the gradients of this step."""
        return any(_has_unscaled(each, self._optimizer) for each in self._known)

    def forget(self) -> None:
        """Forget a step that is given up: scalers may unscale the next one's gradients."""
        for each in self._known:
            getattr(each, "_per_optimizer_states", {}).pop(id(self._optimizer), None)

    def note(self, buckets: Sequence[Bucket]) -> None:
        """The buckets have given out averages."""
        if not self._has_stepped and not self._is_noted and not self._known:
            self._is_noted = True
            for bucket in buckets:
                bucket.note_given()

    def require_order(self, scaler: Any, buckets: Sequence[Bucket], *, is_averaged: bool) -> None:
        """Knows `scaler` from here on. PCCLError INVALID_USAGE where it has unscaled before `synchronize`."""
        is_early = (
            self._is_noted
            and is_averaged
            and scaler not in self._known
            and _has_unscaled(scaler, self._optimizer)
            and float(scaler.get_scale()) != 1
            and all(bucket.is_as_given() for bucket in buckets)
            and any(bucket.has_movable() for bucket in buckets)
        )
        self._known.add(scaler)
        self._has_stepped, self._is_noted = True, False
        if is_early:
            self.forget()
            text = f"this peer {REASONS[UNSCALED]}, and ddp.zero_grad() on all peers to give up this step"
            raise PCCLError(Result.INVALID_USAGE, "DDP.step", text)
