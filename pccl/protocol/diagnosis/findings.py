"""Findings: suspects that have been named, from when until when.

A finding begins when its suspect first comes up, because whoever brings it up has looked at several rounds. It ends
when the suspect has not come up for CLEAR_S. So it does not flap, and is over soon after its cause.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pccl.protocol.status import Finding

CLEAR_S = 4.0
"""Seconds after which a finding is over for which there is no more evidence."""


UPLINK, DOWNLINK = "uplink", "downlink"


class Kind:
    """The kinds of finding. Where `to` is said, it is about the way from `peer` to that one."""

    SILENT = "silent"
    """No heartbeat comes from the peer."""
    BLOCKED = "blocked"
    """Nothing gets from the peer to the other one."""
    MTU = "mtu"
    """Small packets get there, and large ones vanish."""
    LOSSY = "lossy"
    """Packets get lost on the way, or on all ways from the peer, or to it."""
    SLOW_WAY = "slow way"
    """The way, or the peer's way to or from all others, carries so little that ops wait for it."""
    SLOW = "slow"
    """The others wait for the peer in most ops."""
    ABSENT = "absent"
    """The peer has not made a call in which others wait."""


@dataclass(frozen=True)
class Suspect:
    """Somebody who is to be named, and why."""

    kind: str
    group: int
    peer: int
    """The culprit, or the sender where `to` is the receiver."""
    to: int | None
    text: str
    cause: str = ""
    """What is known of the cause besides, which is said once more when it becomes known later; part of the text."""
    line: str = ""
    """UPLINK or DOWNLINK, where it is about all ways from the peer, or to it."""

    @property
    def key(self) -> tuple[str, int, int | None]:
        return self.kind, self.peer, self.to

    def is_part_of(self, other: Suspect) -> bool:
        """Whether this is about the same way or line as the other, or about a way of that line."""
        if self.to is None or other.to is not None:
            return self.key[1:] == other.key[1:]
        return other.peer == (self.peer if other.line == UPLINK else self.to)


@dataclass(frozen=True)
class Change:
    """The beginning or the end of a finding."""

    suspect: Suspect
    is_over: bool
    for_s: float = 0.0
    """Seconds for which it has lasted, at its end."""


@dataclass
class _Open:
    suspect: Suspect
    since: float
    seen_at: float
    cause: str
    """The last that was told."""


class Findings:
    """The findings of one run."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int, int | None], _Open] = {}

    def note(self, suspects: Iterable[Suspect], now: float) -> list[Change]:
        """Take in all suspects there are now. Return what has begun or ended by that. A way is over as soon as all ways
        from its one end, or to the other, are named together."""
        changes = []
        for suspect in suspects:
            known = self._open.get(suspect.key)
            if known is None:
                self._open[suspect.key] = _Open(suspect, now, now, suspect.cause)
                changes.append(Change(suspect, is_over=False))
            else:
                if suspect.cause not in ("", known.cause):
                    known.cause = suspect.cause
                    changes.append(Change(suspect, is_over=False))
                known.suspect, known.seen_at = suspect, now
        lines = {key[:2] for key, known in self._open.items() if known.suspect.to is None and known.seen_at == now}
        for key, known in list(self._open.items()):
            kind, *ends = key
            is_in_line = known.suspect.to is not None and any((kind, end) in lines for end in ends)
            if is_in_line or now - known.seen_at >= CLEAR_S:
                del self._open[key]
                changes.append(Change(known.suspect, is_over=True, for_s=known.seen_at - known.since))
        return changes

    def drop(self, peer: int) -> None:
        """Forget what concerns a peer that is gone: its loss has been told."""
        for key in [key for key in self._open if peer in key[1:]]:
            del self._open[key]

    def has(self, kind: str, peer: int, to: int | None = None) -> bool:
        return (kind, peer, to) in self._open

    def of(self, group: int) -> list[Suspect]:
        return [each.suspect for each in self._open.values() if each.suspect.group == group]

    def status(self, now: float) -> list[Finding]:
        """Return them as they are shown, the oldest first."""
        return [
            Finding(
                each.suspect.kind,
                each.suspect.peer,
                each.suspect.to,
                each.suspect.group,
                each.suspect.text,
                now - each.since,
            )
            for each in self._open.values()
        ]
