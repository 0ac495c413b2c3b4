"""A schedule of the outer optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from pccl.training import OuterNesterov, OuterOptimizer


@dataclass(frozen=True)
class OuterSchedule(OuterNesterov):
    """Nesterov momentum with another learning rate and momentum from outer step `last` on, as few steps are left then
    to make up for what the momentum overshoots."""

    last: int = 0
    last_learning_rate: float = 0.5
    last_momentum: float = 0.6

    def at(self, step: int) -> OuterOptimizer:
        return self if step < self.last else OuterNesterov(self.last_learning_rate, self.last_momentum)
