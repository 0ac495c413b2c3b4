"""A schedule of the outer optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from pccl.training import OuterNesterov, OuterOptimizer


@dataclass(frozen=True, kw_only=True)
class OuterSchedule(OuterNesterov):
    """Nesterov momentum that takes the settings of `end` from outer step `end_step` on."""

    end_step: int
    end: OuterNesterov

    def at(self, step: int) -> OuterOptimizer:
        return self if step < self.end_step else self.end
