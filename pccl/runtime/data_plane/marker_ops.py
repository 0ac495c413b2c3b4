"""Markers of this peer's ops in pieces, from their submission until the engine has given them back; see `staged_ops`.

A marker is over when all peers have sent theirs, when its op is aborted, or with its epoch. Nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pccl.protocol.peer import SubmitOp
from pccl.runtime.data_plane.engine import Verdict
from pccl.runtime.data_plane.events import OpDone, OpEnded, OpRefused
from pccl.runtime.data_plane.interfaces import OpEngine
from pccl.runtime.data_plane.op_spec import OpSpec
from pccl.runtime.data_plane.pieces import marker_of


@dataclass(slots=True)
class _Marker:
    op: int
    epoch: int
    is_closed: bool = False
    """Whether the engine was told to end it."""


class MarkerOps:
    """The markers that the engine has."""

    def __init__(self, engine: OpEngine, numbers: Iterator[int]) -> None:
        """`numbers` are the engine's names of markers."""
        self._engine = engine
        self._numbers = numbers
        self._markers: dict[int, _Marker] = {}

    def __bool__(self) -> bool:
        return bool(self._markers)

    def add(self, launch: SubmitOp, spec: OpSpec) -> None:
        """Submit the marker of an op. Errors as in `OpEngine.submit`."""
        number = next(self._numbers)
        self._engine.submit(replace(launch, op=number, is_mutual=False), marker_of(spec))
        self._markers[number] = _Marker(launch.op, launch.epoch)

    def op_of(self, number: int) -> int | None:
        """Return the op to which a marker belongs; None for a number that is none."""
        marker = self._markers.get(number)
        return marker.op if marker is not None else None

    def end_of(self, op: int) -> None:
        """End the marker of an op."""
        for number, marker in self._markers.items():
            if marker.op == op:
                self._end(number, marker)

    def end_up_to(self, epoch: int) -> None:
        """End the markers of this epoch and of those before it."""
        for number, marker in self._markers.items():
            if marker.epoch <= epoch:
                self._end(number, marker)

    def _end(self, number: int, marker: _Marker) -> None:
        if not marker.is_closed:
            marker.is_closed = True
            self._engine.end(number, Verdict.ABORT)

    def done(self, event: OpDone) -> None:
        """Handle an event: all peers have sent theirs."""
        self._end(event.op, self._markers[event.op])

    def gone(self, event: OpEnded | OpRefused) -> None:
        """Handle an event: the engine has no such op any more."""
        del self._markers[event.op]
