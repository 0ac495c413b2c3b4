"""The numbers of a demo run: what the command line sets, defaults that depend on each other, and their limits."""

from __future__ import annotations

import msgspec

QUANTIZE_CHOICES = ("none", "min-max", "zero-point")


class PlanError(ValueError):
    """Options contradict each other. The text names them as the command line does."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Steps are outer steps, numbered from 1; step 0 is the untrained model.

    Initial peers have the indices `0 .. peers-1`, the one that joins has the index `peers`.
    """

    peers: int = 4
    steps: int = 10
    inner_steps: int = 30
    seed: int = 0
    kill: bool = True
    join: bool = True
    quantize: str = "none"
    connections: int = 2
    context: int = 12
    embedding: int = 32
    hidden: int = 256
    sequences: int = 16
    """Stretches of text per inner step and peer."""
    positions: int = 32
    """Predictions asked for per stretch."""
    learning_rate: float = 4e-3
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.8
    """The paper's 0.9 is meant for hundreds of outer steps; with ten, its long memory overshoots at the end."""
    step_timeout_s: float = 60.0

    @property
    def kill_step(self) -> int:
        """The outer step whose all-reduce the victim begins and does not end. The newcomer is started in it, too."""
        return max(1, self.steps // 3)

    @property
    def join_step(self) -> int:
        """The outer step at whose start the newcomer is admitted."""
        return max(self.kill_step + 1, 2 * self.steps // 3)

    @property
    def victim(self) -> int | None:
        """The peer that is killed: the last one, because peer 0 measures the validation loss."""
        return self.peers - 1 if self.kill else None

    @property
    def newcomer(self) -> int | None:
        return self.peers if self.join else None

    @property
    def shards(self) -> int:
        """The number of shards of the text: one for each peer, the newcomer included."""
        return self.peers + self.join

    def check(self) -> None:
        """Raise PlanError if this cannot be run."""
        for name in ("peers", "steps", "inner_steps", "connections", "context", "embedding", "hidden", "sequences"):
            if getattr(self, name) < 1:
                raise PlanError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if self.peers > 64:
            raise PlanError(f"--peers {self.peers}: a demo on one machine has at most 64")
        if self.seed < 0:
            raise PlanError(f"--seed {self.seed}: must not be negative")
        if self.step_timeout_s <= 0:
            raise PlanError(f"--step-timeout {self.step_timeout_s:g}: must be positive")
        if self.quantize not in QUANTIZE_CHOICES:
            raise PlanError(f"--quantize {self.quantize}: must be one of {', '.join(QUANTIZE_CHOICES)}")
        if self.kill and self.peers < 2:
            raise PlanError("--kill needs --peers 2 or more: nobody would be left (or use --no-kill)")
        if self.join and self.join_step > self.steps:
            raise PlanError(
                f"--join needs --steps {self.join_step} or more: the newcomer is admitted at the start of "
                f"step {self.join_step} (or use --no-join)"
            )
