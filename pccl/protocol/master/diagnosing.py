"""Diagnosing: shows the diagnosis how the run stands, and logs what it names, for programs without logging, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pccl.protocol.diagnosis import Change, GroupScene, Scene
from pccl.protocol.failover.durable_state import majority
from pccl.protocol.master.run_state import Group, RunState
from pccl.protocol.messages import Kind

JOINT_CALLS = (Kind.UPDATE_TOPOLOGY, Kind.OPTIMIZE_TOPOLOGY, Kind.SYNC)


def look(state: RunState, heartbeats: Mapping[int, int], late: Iterable[int], silent: Mapping[int, float]) -> None:
    """Judge who is to be named now. `heartbeats` are peers by their connections for these; over those in `late` a
    heartbeat is late, and over those in `silent` none comes."""
    late_peers = {heartbeats[each] for each in late if each in heartbeats}
    silent_peers = {heartbeats[each]: seconds for each, seconds in silent.items() if each in heartbeats}
    if state.accepted_count > 1 and len(silent_peers) >= majority(state.accepted_count):
        silent_peers = {}  # it is rather this master that hears nobody
    scene = Scene(
        [_group_scene(state, group) for group in state.groups.values() if len(group.ring) > 1],
        silent_peers,
        frozenset(late_peers.union(silent_peers)),
        lambda peer: str(state.members.get(peer, f"peer {peer}")),
    )
    for change in state.diagnosis.judge(scene, state.now):
        _log(state, change)


def _group_scene(state: RunState, group: Group) -> GroupScene:
    waits = {}
    for kind in JOINT_CALLS:
        if not group.waiting[kind] or (kind == Kind.SYNC and group.sync is not None):
            continue
        peers = group.ring if kind == Kind.SYNC else state.accepted
        missing = state.missing((peer for peer in peers if state.is_accepted(peer)), kind)
        since = [
            member.wait.since
            for peer in group.ring
            if (member := state.members.get(peer)) is not None and member.wait is not None and member.wait.kind == kind
        ]
        if missing and since:
            waits[kind] = state.now - min(since), len(since), missing
    is_running = group.running and not state.is_changing
    return GroupScene(group.number, group.ring, group.epoch, is_running, waits, group.ledger.stalled)


def _log(state: RunState, change: Change) -> None:
    suspect = change.suspect
    about = {"group": suspect.group, "peer": suspect.peer}
    if suspect.to is not None:
        about["other"] = suspect.to
    if change.is_over:
        state.log("info", f"over after {change.for_s:.1f} s: {suspect.text}", about)
    else:
        state.log("warning", suspect.text, about, is_shown_unasked=True)
