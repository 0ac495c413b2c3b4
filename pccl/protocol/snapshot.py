"""Looks at a master and writes down what there is to see, as `status.RunStatus`. Changes nothing.

It reads the machine's own fields, so that the machine need not know how it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from pccl.protocol.ledger import Ledger
from pccl.protocol.master import NAMED_MAX, Master, _Group, _Member
from pccl.protocol.messages import Kind
from pccl.protocol.status import GroupStatus, LinkFigures, MemberStatus, RunStatus, StalledOp, Waiting
from pccl.protocol.topology import ring_links

STALLED_OPS_MAX = 8
"""Of one peer that are named."""


def snapshot(master: Master, now: float, uptime_s: float, version: str) -> RunStatus:
    """How it stands at `now`, the time of the last event or later."""
    absent = {kind: _named(master, master.accepted, kind) for kind in Kind.GLOBAL if master._waiting[kind]}
    members: list[MemberStatus] = []
    for group in master._groups.values():
        absent[Kind.SYNC] = _named(master, group.ring, Kind.SYNC) if group.waiting[Kind.SYNC] else []
        stalled = _stalled(group)
        members += [
            _member(master, master._members[peer], absent, stalled.get(peer, []), now) for peer in sorted(group.ring)
        ]
    shown = {member.peer for member in members}
    members += [_member(master, member, {}, [], now) for peer, member in master._members.items() if peer not in shown]
    history = master.history
    return RunStatus(
        run=master.run,
        term=master.term,
        version=version,
        uptime_s=uptime_s,
        peer_timeout_s=master.options.peer_timeout_s,
        view=master.installed_view,
        is_changing=master.is_changing,
        groups=[_group(master, group, now) for group in master._groups.values()],
        members=members,
        totals=history.totals,
        course=history.course(now),
        losses=history.losses(now),
        events=history.events(now),
    )


def _group(master: Master, group: _Group, now: float) -> GroupStatus:
    return GroupStatus(
        group=group.number,
        ring=list(group.ring),
        epoch=group.epoch,
        state="running" if group.running else "flushing" if group.awaiting_flush else "forming",
        is_meshed=group.is_meshed,
        revision=group.revision,
        undecided_ops=group.ledger.undecided,
        is_syncing=group.sync is not None,
        links=[
            LinkFigures(*link, figure.bytes_per_s, figure.round_trip_s, now - figure.at, figure.source)
            for link in ring_links(group.ring)
            if (figure := master.figures.get(link)) is not None and not figure.is_assumed
        ],
        decision=group.decision,
    )


def _member(
    master: Master, member: _Member, absent: dict[str, list[int]], stalled: list[StalledOp], now: float
) -> MemberStatus:
    wait = member.wait
    group = master._groups.get(member.hello.group)
    asked_at = master._asked_at.get(member.peer)
    if member.accepted:
        state = "accepted"
    elif member.peer in master._admitting or (group is not None and member.peer in group.ring):
        state = "joining"
    else:
        state = "pending" if member.has_beaten else "connecting"
    host = member.hosts[0]
    return MemberStatus(
        peer=member.peer,
        name=member.hello.name,
        group=member.hello.group,
        address=f"[{host}]:{member.hello.port}" if ":" in host else f"{host}:{member.hello.port}",
        state=state,
        known_s=now - member.since,
        waiting=None if wait is None else Waiting(wait.kind, now - wait.since, absent[wait.kind]),
        stalled_ops=stalled,
        answer_due_s=None if asked_at is None else now - asked_at,
        is_heard=member.beats is not None,
        traffic=master.traffic.of(member.peer),
    )


def _stalled(group: _Group) -> dict[int, list[StalledOp]]:
    """By the peer that waits."""
    found: dict[int, list[StalledOp]] = {}
    ledger: Ledger = group.ledger
    for op, stuck in ledger.stalled.items():
        holders = ledger.holders(op)
        stalled = StalledOp(op.tag, op.sequence, _first(peer for peer in group.ring if peer not in holders))
        for peer in stuck:
            ops = found.setdefault(peer, [])
            if len(ops) < STALLED_OPS_MAX:
                ops.append(stalled)
    return found


def _named(master: Master, circle: Iterable[int], kind: str) -> list[int]:
    """Those of the circle that have not made the call, the first of them."""
    return _first(peer for peer in circle if not master._waits_in(peer, kind))


def _first(peers: Iterable[int]) -> list[int]:
    return list(islice(peers, NAMED_MAX))
