"""The options of a demo run, and the messages between its workers and the supervisor."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from pccl.tools.report import PlanError

Doing: TypeAlias = Literal[
    "starting", "connecting", "gathering", "admitting", "syncing", "training", "reducing", "evaluating"
]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Steps are outer steps, numbered from 1; step 0 is the untrained model.

    The initial peers have the indices 0 to `peers - 1`; the newcomer has the index `peers`.
    """

    peers: int = 4
    steps: int = 10
    inner_steps: int = 30
    seed: int = 0
    kill: bool = True
    join: bool = True
    quantize: str = "none"
    optimizer: str = "adamw"
    connections: int = 2
    context: int = 12
    embedding: int = 32
    hidden: int = 256
    sequences: int = 16
    positions: int = 32
    learning_rate: float = 4e-3
    outer_learning_rate: float = 0.7
    outer_momentum: float = 0.8
    """The DiLoCo paper's 0.9 suits hundreds of outer steps but overshoots with ten."""
    step_timeout_s: float = 60.0

    @property
    def kill_step(self) -> int:
        """The outer step in whose all-reduce the victim is killed. The newcomer's process starts after this step."""
        return max(1, self.steps // 3)

    @property
    def join_step(self) -> int:
        """The outer step that starts with the newcomer's admission."""
        return max(self.kill_step + 1, 2 * self.steps // 3)

    @property
    def victim(self) -> int | None:
        """The last peer, because peer 0 measures the validation loss."""
        return self.peers - 1 if self.kill else None

    @property
    def newcomer(self) -> int | None:
        return self.peers if self.join else None

    @property
    def shards(self) -> int:
        """The number of text shards, one per peer including the newcomer."""
        return self.peers + self.join

    def check(self) -> None:
        for name in ("peers", "steps", "inner_steps", "connections", "context", "hidden"):
            if getattr(self, name) < 1:
                raise PlanError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if self.peers > 64:
            raise PlanError(f"--peers {self.peers}: must be at most 64 on one machine")
        if self.seed < 0:
            raise PlanError(f"--seed {self.seed}: must not be negative")
        if self.step_timeout_s <= 0:
            raise PlanError(f"--step-timeout {self.step_timeout_s:g}: must be positive")
        if self.kill and self.peers < 2:
            raise PlanError("--kill needs --peers 2 or more, so that peers are left (or use --no-kill)")
        if self.join and self.join_step > self.steps:
            raise PlanError(
                f"--join needs --steps {self.join_step} or more: the newcomer is admitted at the start of "
                f"step {self.join_step} (or use --no-join)"
            )


class WorkerOptions(msgspec.Struct, frozen=True):
    """The argument of `python -m pccl.tools.demo.worker`, as JSON."""

    master: str
    peer: int
    plan: Plan


class _Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    peer: int


class At(_Message, frozen=True):
    step: int
    doing: Doing
    done: float = 0.0
    """The completed fraction of this step's inner steps."""
    launched: int = 0
    """The number of the step's all-reduces in flight."""


class StepDone(_Message, frozen=True):
    """An outer step has ended. Byte counts include its all-reduces and a sync at its start."""

    step: int
    world_size: int
    """The number of peers in its last all-reduces."""
    admitted: int
    aborted: int
    """The number of all-reduces that were aborted and relaunched."""
    sent_bytes: int
    received_bytes: int
    seconds: float
    """The duration without the validation."""
    state_bytes: int = 0
    """Bytes received in the sync."""
    sync_seconds: float = 0.0
    bits_per_byte: float | None = None
    """The validation loss, which only peer 0 measures."""


class Finished(_Message, frozen=True):
    step: int
    revision: int
    digest: str


Message: TypeAlias = At | StepDone | Finished
