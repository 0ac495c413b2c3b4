"""The status of a run, made from its master's machine."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from pccl.protocol.master.ledger import Ledger
from pccl.protocol.master.machine import Master
from pccl.protocol.master.run_state import NAMED_MAX, Group, Member, RunState
from pccl.protocol.messages import Kind
from pccl.protocol.point_to_point import callers_tag
from pccl.protocol.status import GroupStatus, LinkFigures, MemberStatus, RunStatus, StalledOp, Waiting
from pccl.protocol.topology import ring_links

STALLED_OPS_MAX = 8
"""Number of stalled ops that are named for one peer."""


def snapshot(master: Master, now: float, uptime_s: float, version: str) -> RunStatus:
    """Return how the run stands at `now`, the time of the last event or later."""
    state = master.state
    waiting = {kind for group in state.groups.values() for kind in group.waiting}
    absent = {kind: state.missing(state.accepted, kind) for kind in waiting.intersection(Kind.GLOBAL)}
    members: list[MemberStatus] = []
    for group in state.groups.values():
        absent[Kind.SYNC] = state.missing(group.ring, Kind.SYNC) if group.waiting[Kind.SYNC] else []
        stalled = _stalled(group)
        members += [
            _member(state, state.members[peer], absent, stalled.get(peer, []), now) for peer in sorted(group.ring)
        ]
    shown = {member.peer for member in members}
    members += [_member(state, member, {}, [], now) for peer, member in state.members.items() if peer not in shown]
    history = state.history
    return RunStatus(
        run=state.run,
        term=state.term,
        version=version,
        uptime_s=uptime_s,
        peer_timeout_s=state.options.peer_timeout_s,
        view=state.installed_view,
        is_changing=state.is_changing,
        groups=[_group(state, group, now) for group in state.groups.values()],
        members=members,
        totals=history.totals,
        course=history.course(now),
        losses=history.losses(now),
        events=history.events(now),
        findings=state.stragglers.findings(now),
    )


def _group(state: RunState, group: Group, now: float) -> GroupStatus:
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
            LinkFigures(*link, metric.bytes_per_s, metric.round_trip_s, now - metric.at, metric.source)
            for link in ring_links(group.ring)
            if (metric := state.link_metrics.get(link)) is not None and not metric.is_assumed
        ],
        decision=group.decision,
    )


def _member(
    state: RunState, member: Member, absent: dict[str, list[int]], stalled: list[StalledOp], now: float
) -> MemberStatus:
    wait = member.wait
    group = state.groups.get(member.hello.group)
    asked_at = state.asked_at.get(member.peer)
    if member.accepted:
        standing = "accepted"
    elif member.peer in state.change.admitting or (group is not None and member.peer in group.ring):
        standing = "joining"
    else:
        standing = "pending" if member.has_heartbeat else "connecting"
    host = member.hosts[0]
    return MemberStatus(
        peer=member.peer,
        name=member.hello.name,
        group=member.hello.group,
        address=f"[{host}]:{member.hello.port}" if ":" in host else f"{host}:{member.hello.port}",
        state=standing,
        known_s=now - member.since,
        waiting=None if wait is None else Waiting(wait.kind, now - wait.since, absent[wait.kind]),
        stalled_ops=stalled,
        answer_due_s=None if asked_at is None else now - asked_at,
        is_heard=member.heartbeat is not None,
        traffic=state.traffic.of(member.peer),
    )


def _stalled(group: Group) -> dict[int, list[StalledOp]]:
    found: dict[int, list[StalledOp]] = {}
    ledger: Ledger = group.ledger
    for op, stuck in ledger.stalled.items():
        for peer in stuck:
            ops = found.setdefault(peer, [])
            if len(ops) < STALLED_OPS_MAX:
                call, missing = ledger.missing(op, peer)
                ops.append(StalledOp(callers_tag(op.tag), op.sequence, _first(missing), call))
    return found


def _first(peers: Iterable[int]) -> list[int]:
    return list(islice(peers, NAMED_MAX))
