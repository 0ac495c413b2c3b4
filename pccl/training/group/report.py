"""Reports of steps to the training loop; `Step` and `OuterStep` differ in what they count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pccl.training.group.membership import Admission, Averaged

Report = TypeVar("Report", bound="StepReport")


@dataclass(frozen=True, slots=True)
class StepReport:
    """Bytes are payload between peers; those of the state, which newcomers get, are counted apart."""

    revision: int
    world_size: int
    admitted: bool
    """Whether newcomers were let in at the end of the step."""
    aborted: int
    """The number of times that losses aborted averages."""
    tx_bytes: int
    rx_bytes: int
    state_tx_bytes: int
    state_rx_bytes: int
    waited_s: float
    """Time that computing stood still for the network."""


def report_of(
    kind: type[Report],
    averages: Sequence[Averaged],
    *,
    revision: int,
    world_size: int,
    admission: Admission | None,
    waited_s: float,
) -> Report:
    """Return the report of a step that made these averages, and let newcomers in unless `admission` is None."""
    return kind(
        revision=revision,
        world_size=world_size,
        admitted=admission is not None,
        aborted=sum(each.aborted for each in averages),
        tx_bytes=sum(each.tx_bytes for each in averages),
        rx_bytes=sum(each.rx_bytes for each in averages),
        state_tx_bytes=admission.tx_bytes if admission is not None else 0,
        state_rx_bytes=admission.rx_bytes if admission is not None else 0,
        waited_s=waited_s,
    )
