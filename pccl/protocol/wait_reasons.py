"""Warnings about long waits: when they are due, what the call waits for, and how to word it.

A call that has waited for FIRST_S logs a warning that says what it waits for and where to look. Another warning
follows each time the wait has grown by the factor GROWTH, and a last line logs the end of the wait:

    update_topology has waited 10 s for peer 2 (vm:8141), which has not called update_topology; look at ...
    update_topology has ended after 34.2 s

The reason for a group call's wait comes from the run's status (`explain_wait`); the reason for an op's wait comes from
the counters of this peer's own links (`explain_op`). Callers supply the time and write the logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pccl.protocol.messages import Kind
from pccl.protocol.names import NAMED_MAX, NameOf, label, peer_named, peers_named
from pccl.protocol.status import MemberStatus, RunStatus

FIRST_S = 10.0
"""Seconds of waiting before the first warning."""
GROWTH = 3.0
"""Ratio of the waiting times at two successive warnings."""
FINDINGS_MAX = 3
STUCK_MS_MIN = 500
UNKNOWN = "a peer that is not known here"


class LongWait:
    """The schedule of warnings for one wait. Times are in seconds on any one clock."""

    def __init__(self, what: str, since: float, first_s: float | None = None, every_s: float | None = None) -> None:
        """`what` names the call. Warnings are due after `first_s` and then every `every_s`. By default, the first one
        is due after FIRST_S, and each further one once the wait has grown by the factor GROWTH."""
        self.what = what
        self.since = since
        self.is_told = False
        """Whether a warning was logged. If so, the end of the wait is logged, too."""
        self._due_s = FIRST_S if first_s is None else first_s
        self._every_s = every_s

    @property
    def due_at(self) -> float:
        """The time of the next warning."""
        return self.since + self._due_s

    def is_due(self, now: float) -> bool:
        """Return whether it is time for a warning, and schedule the next one if so."""
        if now < self.due_at:
            return False
        while now >= self.due_at:
            self._due_s = self._due_s * GROWTH if self._every_s is None else self._due_s + self._every_s
        return True

    def warning(self, now: float, whom: str, where: str) -> str:
        """Return the text of a warning and set `is_told`. `whom` names what the call waits for, `where` the place to
        look."""
        self.is_told = True
        return f"{self.what} has waited {now - self.since:.0f} s for {whom}; {where}"

    def ending(self, now: float) -> str:
        """Return the text that logs the end of a call after a warning."""
        return f"{self.what} has ended after {now - self.since:.1f} s"

    def over(self, now: float) -> str:
        """Return the text that logs the end of a wait if its call may still run."""
        return f"the wait for {self.what} is over, after {now - self.since:.1f} s"


def where_to_look(masters: str) -> str:
    """Return the advice for a wait for peers."""
    return f"look at `pccl status {masters}`, and at what the program does there"


def how_to_look(masters: str) -> str:
    """Return the advice for a master that does not answer."""
    return f"`pccl doctor {masters}` looks for the reason"


def explain_wait(status: RunStatus, peer: int, call: str) -> str:
    """Return what a peer waits for in a group call of kind `call`, or what a newcomer waits for if `call` is empty."""
    members = {member.peer: member for member in status.members}
    reason = _explain_admission(members) if not call else _explain_call(status, members, peer, call)
    found = [finding.text for finding in status.findings[:FINDINGS_MAX]]
    return reason + (f" (the master has found: {'; '.join(found)})" if found else "")


def _explain_admission(members: Mapping[int, MemberStatus]) -> str:
    missing = [
        member.peer
        for member in members.values()
        if member.state == "accepted" and (member.waiting is None or member.waiting.call != Kind.UPDATE_TOPOLOGY)
    ]
    if not missing:
        return "the view that admits this one"
    return (
        "the peers of the run, which have yet to admit this one by calling "
        f"{Kind.UPDATE_TOPOLOGY}: {_names(members, missing)}{_elsewhere(members, missing)}"
    )


def _explain_call(status: RunStatus, members: Mapping[int, MemberStatus], peer: int, call: str) -> str:
    own = members.get(peer)
    if own is None:
        return "a master that knows this peer; the one that answers does not"
    missing = own.waiting.missing if own.waiting is not None and own.waiting.call == call else []
    if missing:
        verb = "has" if len(missing) == 1 else "have"
        return f"{_names(members, missing)}, which {verb} not called {call}{_elsewhere(members, missing)}"
    due = [member.peer for member in status.members if member.answer_due_s is not None]
    if due:
        return f"{_names(members, due)} to answer the master's membership change"
    if call == Kind.SYNC and any(each.group == own.group and each.is_syncing for each in status.groups):
        return "all peers that lack the shared state to fetch it"
    return "the master, because all peers have called it"


def _names(members: Mapping[int, MemberStatus], peers: list[int]) -> str:
    return peers_named(peers, lambda each: members[each].name if each in members else "")


def _elsewhere(members: Mapping[int, MemberStatus], missing: list[int]) -> str:
    """Return the other calls that the missing peers wait in."""
    found = [
        f"{label(peer, '')} is in {wait.call}"
        for peer in missing[:NAMED_MAX]
        if peer in members and (wait := members[peer].waiting) is not None
    ]
    return f" ({', '.join(found)})" if found else ""


@dataclass(frozen=True)
class LinkWait:
    """What the oldest ops need from one peer: numbers of ops, and the time since its last acknowledgement."""

    unheard_ops: int
    """Number of ops that the peer has not announced."""
    inbound_ops: int
    """Number of ops that lack data from the peer."""
    undone_ops: int
    """Number of ops that lack DONE from the peer."""
    stuck_ms: int


def explain_op(waits: Mapping[int, LinkWait], name_of: NameOf) -> str:
    """Return the peers that the group's ops wait for, and why. In a ring, these peers may wait for other peers."""
    reasons = []
    for verb, peers in (
        ("has not called it", [peer for peer, wait in waits.items() if wait.unheard_ops]),
        ("has yet to send data, or to pass it on", [peer for peer, wait in waits.items() if wait.inbound_ops]),
        ("has not reported that it is done", [peer for peer, wait in waits.items() if wait.undone_ops]),
    ):
        if peers:
            verb = verb if len(peers) == 1 else verb.replace("has", "have", 1)
            reasons = [f"{peers_named(peers, name_of)}, which {verb}"]
            break
    reasons += [_stuck(peer, wait, name_of) for peer, wait in waits.items() if wait.stuck_ms >= STUCK_MS_MIN]
    return "; ".join(reasons) or UNKNOWN


def explain_pair(peer: int, is_sender: bool, waits: Mapping[int, LinkWait], name_of: NameOf) -> str:
    """Return what a send (`is_sender`) or recv waits for."""
    what = "called recv, or has not received all of it" if is_sender else "called send, or has not sent all of it"
    reasons = [f"{peer_named(peer, name_of(peer))}, which has not {what}"]
    wait = waits.get(peer)
    if wait is not None and wait.stuck_ms >= STUCK_MS_MIN:
        reasons.append(_stuck(peer, wait, name_of))
    return "; ".join(reasons)


def _stuck(peer: int, wait: LinkWait, name_of: NameOf) -> str:
    return f"{peer_named(peer, name_of(peer))} has not acknowledged data for {wait.stuck_ms / 1e3:.1f} s"
