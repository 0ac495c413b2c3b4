"""Long waits, in one wording: when a call that waits is spoken of, and what is said.

No call waits in silence. Once it has waited for FIRST_S, a warning says in what it waits, for whom, and where to look;
more follow whenever it has waited GROWTH times as long, and a last line says when it is over:

    update_topology has waited 10 s for peer 2 (vm:8141), which has not called it; look at ...
    update_topology has ended after 34.2 s

Here is the schedule of one wait and the wording of all, without clocks and logs: those who wait bring both.
"""

from __future__ import annotations

FIRST_S = 10.0
"""Seconds after which a wait is warned of for the first time."""
GROWTH = 3.0
"""How many times as long it has lasted at each further warning."""


class LongWait:
    """The schedule of one wait. Times are of any one clock, in seconds."""

    def __init__(self, what: str, since: float, first_s: float | None = None, every_s: float | None = None) -> None:
        """`what` names the call, as its caller knows it. Warnings are given after `first_s` and from then on `every_s`,
        unless they are to follow FIRST_S and GROWTH."""
        self.what = what
        self.since = since
        self.is_told = False
        """Whether a warning was given, so that its end is to be told, too."""
        self._due_s = FIRST_S if first_s is None else first_s
        self._every_s = every_s

    @property
    def due_at(self) -> float:
        """The time of the next warning."""
        return self.since + self._due_s

    def is_due(self, now: float) -> bool:
        """Return whether it is time for a warning. The next one is due later, then."""
        if now < self.due_at:
            return False
        while now >= self.due_at:
            self._due_s = self._due_s * GROWTH if self._every_s is None else self._due_s + self._every_s
        return True

    def warning(self, now: float, whom: str, where: str) -> str:
        """Return the text of a warning, which then counts as given. `whom` says for whom it waits and why, `where`
        where to look."""
        self.is_told = True
        return f"{self.what} has waited {now - self.since:.0f} s for {whom}; {where}"

    def ending(self, now: float) -> str:
        """Return the text for the end of a wait that was warned of."""
        return f"{self.what} has ended after {now - self.since:.1f} s"

    def over(self, now: float) -> str:
        """Return the text for the end of a wait for what may not have ended: it may have been given up."""
        return f"the wait for {self.what} is over, after {now - self.since:.1f} s"


def where_to_look(masters: str) -> str:
    """Return where to look when peers are waited for, whose master is at one of these addresses."""
    return f"look at `pccl status {masters}`, and at what the program does there"


def how_to_look(masters: str) -> str:
    """Return where to look when a master does not answer at one of these addresses."""
    return f"`pccl doctor {masters}` looks for the reason"
