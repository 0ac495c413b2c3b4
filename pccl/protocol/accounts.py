"""Accounts of a wait: whom a peer waits for, as the status of its run tells it.

The master knows of every joint call who has not made it, and what these peers do instead. So a peer that has waited for
long in one asks for the status, as `pccl status` does, and says what that holds.
"""

from __future__ import annotations

from collections.abc import Mapping

from pccl.protocol.messages import Kind
from pccl.protocol.names import NAMED_MAX, label, peers_named
from pccl.protocol.status import MemberStatus, RunStatus

FINDINGS_MAX = 3


def of_call(status: RunStatus, peer: int, kind: str) -> str:
    """Return whom a peer waits for in a joint call of this kind, and what else the master has found."""
    members = {member.peer: member for member in status.members}
    own = members.get(peer)
    waiting = own.waiting if own is not None else None
    if own is None:
        whom = "a master that knows this peer: the one that answers does not"
    elif waiting is not None and waiting.call == kind and waiting.missing:
        whom = _missing(members, waiting.missing, kind)
    elif waiting is None:
        # The status may be half a second old.
        known = [member for member in status.members if member.state == "accepted" and member.peer != peer]
        if kind == Kind.SYNC:
            known = [member for member in known if member.group == own.group]
        missing = [member.peer for member in known if member.waiting is None or member.waiting.call != kind]
        whom = _missing(members, missing, kind) if missing else "the master, for all others have called it"
    else:
        whom = _carried_out(status, members, own.group, kind)
    return whom + _found(status)


def of_admission(status: RunStatus) -> str:
    """Return whom a newcomer waits for: the peers that have yet to call update_topology."""
    members = {member.peer: member for member in status.members}
    missing = [
        member.peer
        for member in status.members
        if member.state == "accepted" and (member.waiting is None or member.waiting.call != Kind.UPDATE_TOPOLOGY)
    ]
    if not missing:
        return "the view that lets this one in" + _found(status)
    peers, also = _named(members, missing)
    return (
        f"the peers of the run, which have yet to let this one in; they do so by calling {Kind.UPDATE_TOPOLOGY}: "
        f"{peers}{also}{_found(status)}"
    )


def _missing(members: Mapping[int, MemberStatus], missing: list[int], kind: str) -> str:
    peers, also = _named(members, missing)
    return f"{peers}, which {'has' if len(missing) == 1 else 'have'} not called {kind}{also}"


def _named(members: Mapping[int, MemberStatus], missing: list[int]) -> tuple[str, str]:
    """Return the names of peers, and what they wait in themselves."""
    peers = peers_named(missing, lambda peer: members[peer].name if peer in members else "")
    elsewhere = [
        f"{label(peer, '')} is in {wait.call}"
        for peer in missing[:NAMED_MAX]
        if peer in members and (wait := members[peer].waiting) is not None
    ]
    return peers, f" ({', '.join(elsewhere)})" if elsewhere else ""


def _carried_out(status: RunStatus, members: Mapping[int, MemberStatus], group: int, kind: str) -> str:
    """Return what a call that all have made still needs."""
    due = [member.peer for member in status.members if member.answer_due_s is not None]
    if due:
        return f"{peers_named(due, lambda peer: members[peer].name)} to answer the master's change of membership"
    if kind == Kind.SYNC and any(each.group == group and each.is_syncing for each in status.groups):
        return "the shared state to be fetched by all who need it"
    return "the master, for all have called it"


def _found(status: RunStatus) -> str:
    texts = [finding.text for finding in status.findings[:FINDINGS_MAX]]
    return f" (the master has found: {'; '.join(texts)})" if texts else ""
