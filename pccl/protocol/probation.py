"""How soon somebody who was evicted for its links is let in again: after a delay that grows with every time.

A peer whose links carry small packets only reaches the master, and the others at first sight, so it comes back at once;
and whoever is admitted has the others wait until its links have been tried. The delay is one peer timeout after the
first eviction, twice as long after each further one, and DELAY_S_MAX at most. Whoever has not been evicted again for
WELL_S after its delay was over begins anew.

It is known by its host and its name, without a process id at the end: what ails links is a host's way to the network as
a rule, and a supervisor may start the process anew. Kept in memory: another master begins with a clean slate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DELAY_S_MAX = 300.0
WELL_S = 600.0
RECORDS_MAX = 1024
"""The oldest is dropped for a further one."""

_PROCESS_ID = re.compile(r":\d+$")


@dataclass(frozen=True)
class Restraint:
    evictions: int
    until: float
    """When it may be let in."""


class Probation:
    def __init__(self, peer_timeout_s: float) -> None:
        self._first_s = peer_timeout_s
        self._records: dict[tuple[str, str], Restraint] = {}

    def evicted(self, host: str, name: str, now: float) -> float:
        """It was, for its links. Returns the seconds for which it is held back."""
        known = self.record(host, name, now)
        evictions = 1 + (known.evictions if known is not None else 0)
        # The exponent is bounded, for a float is.
        delay_s = min(self._first_s * 2.0 ** min(evictions - 1, 64), max(DELAY_S_MAX, self._first_s))
        who = _who(host, name)
        self._records.pop(who, None)
        self._records[who] = Restraint(evictions, now + delay_s)
        if len(self._records) > RECORDS_MAX:
            del self._records[next(iter(self._records))]
        return delay_s

    def record(self, host: str, name: str, now: float) -> Restraint | None:
        """None if it was never evicted for its links, or has been well for long."""
        who = _who(host, name)
        found = self._records.get(who)
        if found is not None and now >= found.until + WELL_S:
            del self._records[who]
            return None
        return found


def _who(host: str, name: str) -> tuple[str, str]:
    return host, _PROCESS_ID.sub("", name)
