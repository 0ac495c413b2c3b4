"""The status that a master shows to whoever asks: made anew at most every REFRESH_S, however many ask and in whatever
form."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pccl._version import __version__
from pccl.protocol import messages as m
from pccl.protocol.codec import encode
from pccl.protocol.failover import Failover
from pccl.protocol.snapshot import snapshot
from pccl.protocol.status import RunStatus

REFRESH_S = 0.5


class StatusBoard:
    def __init__(self, machine: Failover, now: Callable[[], float]) -> None:
        self._machine = machine
        self._now = now
        self._started_at: float | None = None
        self._made_at = float("-inf")
        self._status: RunStatus | None = None
        self._frame: bytes | None = None
        self._json: bytes | None = None

    def begin(self) -> None:
        """Note when the master begins to serve."""
        self._started_at = self._now()

    def status(self) -> RunStatus:
        """Return the run's status. After `begin`."""
        assert self._started_at is not None
        now = self._now()
        if self._status is None or now >= self._made_at + REFRESH_S:
            machine = self._machine
            role = "leading" if machine.is_leading else "standby" if machine.is_standby else "vacant"
            found = snapshot(machine.master, now, now - self._started_at, __version__)
            held, held_for = machine.holding(now)
            self._status = msgspec.structs.replace(found, role=role, held=held, held_for=held_for)
            self._made_at = now
            self._frame = self._json = None
        return self._status

    def frame(self) -> bytes:
        """Return the status as an encoded message."""
        status = self.status()
        if self._frame is None:
            self._frame = encode(m.Status(status))
        return self._frame

    def json(self) -> bytes:
        status = self.status()
        if self._json is None:
            self._json = msgspec.json.encode(status)
        return self._json
