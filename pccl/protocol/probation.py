"""Probation: how soon a peer that was evicted for its links is let in again.

A peer whose links carry only small packets reaches the master, and the others at first sight, so it comes back at once.
And whoever is admitted has the others wait until its links have been tried. So it is let in after a delay that grows
with every eviction:

    1  The delay is one peer timeout after the first eviction, twice as long after each further one, and DELAY_S_MAX at
       most. A peer that has not been evicted again for WELL_S after its delay was over begins anew.
    2  A peer is known by its host and its name, without a process id at the end. What ails links is a host's way to the
       network as a rule, and a supervisor may start the process anew.
    3  All this is kept in memory only: another master begins with a clean slate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

DELAY_S_MAX = 300.0
WELL_S = 600.0
RECORDS_MAX = 1024
"""Number of peers that are remembered. The oldest is dropped for a further one."""

_PROCESS_ID = re.compile(r":\d+$")


@dataclass(frozen=True)
class Restraint:
    """A peer's evictions for its links, and the end of its delay."""

    evictions: int
    """Number of evictions."""
    until: float
    """The time from which on it may be let in."""


class Probation:
    """The peers that were evicted for their links."""

    def __init__(self, peer_timeout_s: float) -> None:
        self._first_s = peer_timeout_s
        self._records: dict[tuple[str, str], Restraint] = {}

    def evicted(self, host: str, name: str, now: float) -> float:
        """Note that a peer was evicted for its links. Return the seconds for which it is held back."""
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
        """Return what is known of a peer; None if it was never evicted for its links, or has been well for long."""
        who = _who(host, name)
        found = self._records.get(who)
        if found is not None and now >= found.until + WELL_S:
            del self._records[who]
            return None
        return found


def _who(host: str, name: str) -> tuple[str, str]:
    return host, _PROCESS_ID.sub("", name)
