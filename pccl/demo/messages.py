"""The messages of workers to the supervisor, a JSON object a line on standard output, and the options of a worker.

The other way there is a single command: the line `connect` on the newcomer's standard input.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from pccl.demo.plan import Plan

CONNECT = "connect"

Doing: TypeAlias = Literal[
    "starting", "connecting", "gathering", "admitting", "syncing", "training", "reducing", "evaluating"
]


class WorkerOptions(msgspec.Struct, frozen=True):
    """The one argument of `python -m pccl.demo.worker`, as JSON."""

    master: str
    peer: int
    plan: Plan


class _Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    peer: int


class Ready(_Message, frozen=True):
    """The newcomer has loaded everything and waits for the command to connect."""


class At(_Message, frozen=True):
    """The position of a peer in its loop: shown live, and in the message when nothing moves any more."""

    step: int
    doing: Doing
    done: float = 0.0
    """The fraction of this step's inner steps that are done."""
    launched: int = 0
    """The number of the step's all-reduces that are in flight now."""


class Synced(_Message, frozen=True):
    """A peer has returned from sync_shared_state."""

    step: int
    """Outer steps contained in the state."""
    sent_bytes: int
    received_bytes: int
    seconds: float


class StepDone(_Message, frozen=True):
    """An outer step has ended here. Bytes are those of its all-reduces and of a sync at its start."""

    step: int
    world_size: int
    """Peers left at its end: those that made its last all-reduces."""
    admitted: int
    """Peers that were admitted at the beginning of this step."""
    aborted: int
    """All-reduces of this step that were aborted and launched again."""
    sent_bytes: int
    received_bytes: int
    seconds: float
    """Wall time, without the validation."""
    bits_per_byte: float | None = None
    """Validation loss after the step, from the one peer that measures it."""


class Finished(_Message, frozen=True):
    """A peer has done all steps. The message has the digest of its shared state."""

    step: int
    revision: int
    digest: str


Message: TypeAlias = Ready | At | Synced | StepDone | Finished
