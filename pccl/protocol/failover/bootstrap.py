"""Bootstrap: when newcomers may begin a run at a master that leads none, and those who wait for that.

Two runs where there should be one cannot be joined again, so a master that leads none must not let newcomers found a
run while another might come back to it.

    1  A fresh master at an address where another may have been lets nobody found a run until `birth_at`. Peers of a run
       would have come by then, for they notice the silence of their master after a peer timeout.
    2  Nobody founds a run while peers of one are here, nor for a peer timeout after the last of them has left: they may
       be back in a moment. Newcomers that joined to found one with others, who have not come yet, have founded none. So
       they begin anew when peers of a run come, who would be sent away for good otherwise, and their run be lost.
    3  A master whose record names a run that is not over lets nobody found another for as long as peers of that run may
       look for a master. If nobody has come for END_TIMEOUTS, and as many newcomers are here as peers are missing, it
       is these peers that are cut off, or dead, and not this master: then that run is over. Peers whose
       master died long before this one started have given up by then, and are not waited for (`hold_s`).
    4  A standby founds none and tells newcomers to ask elsewhere. A newcomer that knows several masters founds a run
       only after all of them have said that they lead none (`Hello.may_found`). So does one that would wait with others
       until a run has all its founders: one of these may not have reached the master that leads a run already, and
       would have all who come later wait with it. The machine that holds this part (`failover`) sees to both.
    5  What a newcomer has heard from other masters is old once it has waited: peers of a run may have come to one of
       them since. So one that knows several and has waited here founds none, but asks them once more, and comes again.
    6  A record shows what its masters have led. Of a run that another one has led it says nothing, so where newcomers
       know several masters, a master that has no run on record waits as one without a record does.
    7  Newcomers that joined a run at a standby wait there in vain if the run ends and they are too few to found one:
       those who come later found it at another master. So they begin anew, as those later ones do.
    8  A newcomer that has waited for HOLD_S is sent away and may come again, lest it take the silence for that of
       something else than a master.
"""

from __future__ import annotations

from enum import Enum
from math import inf

from pccl.protocol import messages as m
from pccl.protocol.failover.durable_state import RunRecord
from pccl.protocol.master.effects import MasterLog
from pccl.protocol.master.run_state import MasterOptions
from pccl.types import Result

BIRTH_MARGIN_S = 2.0
"""Seconds that peers of a run have to dial this master after they have noticed the silence of their own."""
HOLD_S = 8.0
"""Seconds that a newcomer is kept waiting before it is sent away."""
IDLE_MARGIN_S = 60.0
"""Seconds by which the time without a master may be shorter than it seems: the last one noted that it lived some time
before it died."""
END_TIMEOUTS = 3.0
"""Number of peer timeouts after which rule 3 takes a run for over."""


class Start(Enum):
    """The knowledge of a run with which its master starts."""

    AUTO = "auto"
    NEW = "new"
    """There is no earlier run, or it is discarded."""
    RESUME = "resume"
    """There is an earlier run, which must continue before a new one may start."""


def hold_s(
    start: Start,
    options: MasterOptions,
    record: RunRecord | None,
    has_state: bool,
    idle_s: float = 0.0,
) -> float:
    """Return for how many seconds after its start a master lets nobody found a run.

    `has_state`: the process keeps a record on disk, so without one there was no run. Where that `is_default`, the last
    master may have kept its record elsewhere, or none: peers that look for a master get the time to find this one. For
    `idle_s` before its start no master has led the record's run: peers may have given up by now.
    """
    if start is not Start.AUTO:
        return 0.0 if start is Start.NEW else inf
    if not has_state:
        return options.peer_timeout_s + BIRTH_MARGIN_S
    if record is None:
        return 0.0
    if record.is_over and not record.newest.peers:
        return 0.0
    left_s = record.master_timeout_s + options.peer_timeout_s - max(0.0, idle_s - IDLE_MARGIN_S)
    if left_s < 0:
        return 0.0
    short_s = options.peer_timeout_s + BIRTH_MARGIN_S
    return short_s if record.is_over else max(short_s, left_s)


def hold_beside_s(start: Start, options: MasterOptions) -> float:
    """Return for how many seconds after its start a master lets nobody found a run that knows other masters, whatever
    is on record (rule 6)."""
    return options.peer_timeout_s + BIRTH_MARGIN_S if start is Start.AUTO else 0.0


class Bootstrap:
    """The newcomers that wait at one master, and the time when they may found a run."""

    def __init__(self, peer_timeout_s: float, birth_at: float) -> None:
        self.birth_at = birth_at
        """The time from which newcomers may found a run, unless peers of one come first."""
        self.ended: RunRecord | None = None
        """The record of a run that was taken for over by rule 3, although some of its peers may still come."""
        self._peer_timeout_s = peer_timeout_s
        self._beside_at = 0.0
        self._missed_since = inf
        """The time since which the peers of the record's run could have come here."""
        self._back_by = 0.0
        self._held: dict[int, tuple[str, m.Hello, float]] = {}
        """The newcomers that wait, by connection, longest first: host, Hello, and the time when it came."""
        self._is_told = False
        """Whether a warning has told of newcomers that wait, since all could go on last."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, connection: int) -> bool:
        return connection in self._held

    # When a run may be founded.

    def wait(self, now: float, hold_s: float, hold_beside_s: float = 0.0) -> None:
        """Let nobody found a run for `hold_s` from now on, nor, if there are other masters, for `hold_beside_s`: the
        process starts, or leads no further."""
        self.birth_at = now + hold_s
        self._beside_at = now + hold_beside_s
        self._missed_since = now

    def note_masters(self, masters: int) -> None:
        """Note how many masters somebody knows: one of several waits for what others may have led (rule 6)."""
        if masters > 1:
            self.birth_at = max(self.birth_at, self._beside_at)

    def allow(self, now: float) -> None:
        """Wait no longer: the run that was waited for is led, or cannot come back."""
        self.birth_at = min(self.birth_at, now)
        self._beside_at = min(self._beside_at, now)

    def peers_have_left(self, now: float) -> None:
        """Note that the last peer of a run that was here has left (rule 2)."""
        self._back_by = now + self._peer_timeout_s
        self.birth_at = max(self.birth_at, self._back_by)

    def is_waiting(self, now: float) -> bool:
        return now < self.birth_at

    def try_to_found(self, record: RunRecord | None, now: float) -> bool:
        """Return whether newcomers are here that found a run now. If rule 3 lets them, the record's run is over."""
        if not self._held or now < self._founds_at(record):
            return False
        if now < self.birth_at:
            self.ended = record
            self.birth_at = now
        return True

    def _founds_at(self, record: RunRecord | None) -> float:
        if record is None or self.birth_at == inf or len(self._held) < len(record.newest.peers):
            return self.birth_at
        ends_at = self._missed_since + END_TIMEOUTS * self._peer_timeout_s
        return min(self.birth_at, max(ends_at, self._back_by))

    def deadlines(self, record: RunRecord | None, is_missed: bool) -> list[float]:
        """Return the times at which something is due for those who wait. `is_missed`: no peers of a run are here."""
        if not self._held:
            return []
        _, _, since = next(iter(self._held.values()))
        return [since + HOLD_S, self._founds_at(record)] if is_missed else [since + HOLD_S]

    def whom_it_waits_for(self, record: RunRecord | None, now: float) -> str:
        """Say for which peers this master waits, for how long and what skips that, in a log or in an answer."""
        left_s = max(0.0, self._founds_at(record) - now)
        if left_s == inf:
            return (
                f"the peers of {record}, as long as it takes" if record is not None else "the peers of an earlier run"
            )
        if record is not None and not record.is_over:
            return (
                f"the peers of {record}, for {left_s:.0f} s more; if it is over, `pccl master --start new` skips this"
            )
        return f"peers of an earlier run, if any, for {left_s:.0f} s more; `pccl master --start new` skips this"

    # Newcomers that wait.

    def hold(self, connection: int, host: str, hello: m.Hello, now: float, whom: str) -> MasterLog:
        """Have a newcomer wait. Return the log line, which is a warning for the first one."""
        self._held[connection] = host, hello, now
        text = f"a newcomer from {host} is held: this master waits for {whom}"
        was_told, self._is_told = self._is_told, True
        return MasterLog("info" if was_told else "warning", text, was_told, is_shown_unasked=not was_told)

    def discard(self, connection: int) -> bool:
        """Forget a newcomer. Return False if this connection is of none that waits."""
        return self._held.pop(connection, None) is not None

    def refusal(self, message: m.Resume) -> m.Goodbye | None:
        """Return what a peer of a run is told that was taken for over (rule 3)."""
        ended = self.ended
        if ended is None or ended.run != message.run or message.term > ended.term or message.masters > 1:
            return None
        text = f"evicted: run {message.run!r} is over, since none of its peers came for long; connect again"
        return m.Goodbye(Result.MASTER_CONNECTION_FAILED, text, ended.secret)

    def take_all(self) -> dict[int, tuple[str, m.Hello]]:
        """Forget all newcomers that wait. Return their hosts and Hellos by connection, longest first."""
        held, self._held = self._held, {}
        self._is_told = False
        return {connection: (host, hello) for connection, (host, hello, _) in held.items()}

    def take_those_with_others(self) -> list[int]:
        """Forget the newcomers that know other masters. Return their connections."""
        found = [connection for connection, (_, hello, _) in self._held.items() if hello.masters > 1]
        for connection in found:
            del self._held[connection]
        return found

    def overdue(self, now: float) -> list[int]:
        """Forget the newcomers that have waited for HOLD_S. Return their connections."""
        found = [connection for connection, (_, _, since) in self._held.items() if now >= since + HOLD_S]
        for connection in found:
            del self._held[connection]
        return found
