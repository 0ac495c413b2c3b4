"""Bootstrap: when newcomers may start a run at a master that does not lead one.

Two runs cannot be merged later, so a master without a run does not start one while peers of an earlier run may return:

    1  A master without a record waits until `birth_at`, because peers of a run notice the loss of their master only
       after a peer timeout.
    2  No run starts while peers of a run are connected, nor for a peer timeout after the last of them has left.
       Newcomers that wait for more first peers (`founders`) start over when accepted peers of a run connect.
    3  A master with the record of an unfinished run waits as long as that run's peers may search for one. The run is
       over if none of them has connected for END_TIMEOUTS and at least as many newcomers wait as peers are missing, or
       if its last master stopped so long ago that they no longer search (`hold_s`).
    4  A standby starts no run. A newcomer that knows several masters, or waits for other first peers, starts a run only
       after all masters have replied that they lead none (`Hello.may_found`). If it had to wait, it asks them again.
    5  A record covers only the runs of its own masters. If newcomers know other masters, a master without a recorded
       run waits as in rule 1.
    6  A newcomer that has waited for HOLD_S is dismissed and may connect again.
"""

from __future__ import annotations

from enum import Enum
from math import inf

from pccl.protocol import messages as m
from pccl.protocol.failover.durable_state import RunRecord
from pccl.protocol.master.run_state import MasterLog, MasterOptions
from pccl.types import Result

BIRTH_MARGIN_S = 2.0
"""Time for a run's peers to dial this master after they notice that their own is silent."""
HOLD_S = 8.0
IDLE_MARGIN_S = 60.0
"""Subtracted from the measured time since the last master, because a master's last update precedes its death."""
END_TIMEOUTS = 3.0
"""Number of peer timeouts after which rule 3 considers a run over."""


class Start(Enum):
    """What a master assumes about earlier runs when it starts."""

    AUTO = "auto"
    NEW = "new"
    RESUME = "resume"


def hold_s(
    start: Start,
    options: MasterOptions,
    record: RunRecord | None,
    has_state: bool,
    idle_s: float = 0.0,
) -> float:
    """Return how long after its start a master starts no run, in seconds. `has_state` says whether the master has a
    state directory; `idle_s` is the time since a master last used it."""
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
    """Return the lower bound of `hold_s` for newcomers that know other masters (rule 5)."""
    return options.peer_timeout_s + BIRTH_MARGIN_S if start is Start.AUTO else 0.0


class Bootstrap:
    """The newcomers that wait at one master. Decides when they may start a run."""

    def __init__(self, peer_timeout_s: float) -> None:
        self.birth_at = 0.0
        self.ended: RunRecord | None = None
        self._peer_timeout_s = peer_timeout_s
        self._beside_at = 0.0
        self._missed_since = inf
        self._back_by = 0.0
        self._held: dict[int, tuple[str, m.Hello, float]] = {}
        """Each waiting newcomer's host, Hello and arrival time, by connection, the longest wait first."""
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, connection: int) -> bool:
        return connection in self._held

    # When a run may start.

    def wait(self, now: float, hold_s: float, hold_beside_s: float = 0.0) -> None:
        self.birth_at = now + hold_s
        self._beside_at = now + hold_beside_s
        self._missed_since = now

    def note_masters(self, masters: int) -> None:
        if masters > 1:
            self.birth_at = max(self.birth_at, self._beside_at)

    def allow(self, now: float) -> None:
        self.birth_at = min(self.birth_at, now)
        self._beside_at = min(self._beside_at, now)

    def peers_have_left(self, now: float) -> None:
        self._back_by = now + self._peer_timeout_s
        self.birth_at = max(self.birth_at, self._back_by)

    def is_waiting(self, now: float) -> bool:
        return now < self.birth_at

    def try_to_found(self, record: RunRecord | None, now: float) -> bool:
        """Return whether waiting newcomers start a run now. Rule 3 may declare the recorded run over."""
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
        """Return the times of the next changes. `is_missed` means that no peers of a run are connected."""
        if not self._held:
            return []
        _, _, since = next(iter(self._held.values()))
        return [since + HOLD_S, self._founds_at(record)] if is_missed else [since + HOLD_S]

    def awaited_peers(self, record: RunRecord | None, now: float) -> str:
        left_s = max(0.0, self._founds_at(record) - now)
        if left_s == inf:
            return f"the peers of {record}, without a limit" if record is not None else "the peers of an earlier run"
        if record is not None and not record.is_over:
            return (
                f"the peers of {record}, for {left_s:.0f} s more, or {self._peer_timeout_s:g} s once most of them are "
                f"back; if it is over, `pccl master --start new` skips this"
            )
        return f"peers of an earlier run, if any, for {left_s:.0f} s more; `pccl master --start new` skips this"

    # Waiting newcomers.

    def hold(self, connection: int, host: str, hello: m.Hello, now: float, peers: str) -> MasterLog:
        """Hold a newcomer. Return the log line, which is a warning for the first one."""
        self._held[connection] = host, hello, now
        text = f"a newcomer from {host} is held: this master waits for {peers}"
        had_warned, self._has_warned = self._has_warned, True
        return MasterLog("info" if had_warned else "warning", text, had_warned)

    def discard(self, connection: int) -> bool:
        return self._held.pop(connection, None) is not None

    def refusal(self, message: m.Resume) -> m.Goodbye | None:
        """Return the rejection of a peer whose run rule 3 has declared over."""
        ended = self.ended
        if ended is None or ended.run != message.run or message.term > ended.term or message.masters > 1:
            return None
        text = f"evicted: run {message.run!r} is over, because none of its peers connected for too long; connect again"
        return m.Goodbye(Result.MASTER_CONNECTION_FAILED, text, ended.secret)

    def take_all(self) -> dict[int, tuple[str, m.Hello]]:
        held, self._held = self._held, {}
        self._has_warned = False
        return {connection: (host, hello) for connection, (host, hello, _) in held.items()}

    def take_those_with_others(self) -> list[int]:
        found = [connection for connection, (_, hello, _) in self._held.items() if hello.masters > 1]
        for connection in found:
            del self._held[connection]
        return found

    def overdue(self, now: float) -> list[int]:
        found = [connection for connection, (_, _, since) in self._held.items() if now >= since + HOLD_S]
        for connection in found:
            del self._held[connection]
        return found
