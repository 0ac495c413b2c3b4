"""`Diagnosis`: takes in what peers report, and says who is to be named.

Whoever owns it calls `reported` for every report, and `judge` a few times a second with the scene as it is then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from pccl.protocol.diagnosis import symptoms
from pccl.protocol.diagnosis.evidence import GroupEvidence
from pccl.protocol.diagnosis.findings import Change, Findings, Kind, Suspect
from pccl.protocol.messages import OpRef, Report
from pccl.protocol.status import Finding

STOPS_ALL = frozenset({Kind.SILENT, Kind.BLOCKED, Kind.MTU})
"""Kinds of fault that stop all ops of a group: nothing else is named while there is one."""


@dataclass(frozen=True)
class GroupScene:
    """A group as it stands."""

    group: int
    ring: Sequence[int]
    epoch: int
    is_running: bool
    """Whether ops may be in flight."""
    waits: Mapping[str, tuple[float, int, Sequence[int]]] = field(default_factory=dict)
    """Joint calls in which peers wait: for how long the first has, how many do, and who is missing."""
    stalled: Mapping[OpRef, Set[int]] = field(default_factory=dict)
    """Ops that peers have waited in for a while, and who does."""


@dataclass(frozen=True)
class Scene:
    """What is known beside the reports."""

    groups: Sequence[GroupScene]
    silent_s: Mapping[int, float]
    """Peers of which no heartbeat comes, and for how long."""
    unheard: frozenset[int]
    """These, and peers whose heartbeats are only late."""
    name: Callable[[int], str] = lambda peer: f"peer {peer}"


class Diagnosis:
    """The diagnosis of one run."""

    def __init__(self) -> None:
        self._groups: dict[int, GroupEvidence] = {}
        self._findings = Findings()

    def reported(self, peer: int, group: int, report: Report, now: float) -> None:
        """Take in a report of a peer."""
        if group in self._groups:
            self._groups[group].reported(peer, report, now)

    def gone(self, peer: int) -> None:
        """Forget a peer that was lost or has left, which others have said."""
        self._findings.drop(peer)

    def judge(self, scene: Scene, now: float) -> list[Change]:
        """Return what is to be named from now on, and what no more."""
        suspects: list[Suspect] = []
        for group in list(self._groups):
            if all(group != each.group for each in scene.groups):
                del self._groups[group]
        for each in scene.groups:
            evidence = self._groups.get(each.group)
            if evidence is None or evidence.epoch != each.epoch or evidence.ring != tuple(each.ring):
                evidence = self._groups[each.group] = GroupEvidence(tuple(each.ring), each.epoch, now)
            evidence.advance(now)
            suspects += self._suspects(each, evidence, scene, now)
        return self._findings.note(suspects, now)

    def findings(self, now: float) -> list[Finding]:
        """Return who is named now."""
        return self._findings.status(now)

    def _suspects(self, group: GroupScene, evidence: GroupEvidence, scene: Scene, now: float) -> list[Suspect]:
        number, named, name = group.group, self._findings.has, scene.name
        found = symptoms.silent(number, scene.silent_s, evidence, name)
        if group.is_running:
            found += symptoms.dead_ways(number, evidence, scene.unheard, now, name)
        if found or not scene.unheard.isdisjoint(evidence.ring):
            return found
        if any(each.kind in STOPS_ALL for each in self._findings.of(number)):
            return found
        found += symptoms.absent_from_calls(number, group.waits, scene.silent_s, name)
        if not group.is_running:
            return found
        slow = [each for each in self._findings.of(number) if each.kind == Kind.SLOW_WAY]
        # A slow way loses packets when its queue is full, and a lossy one is slow: the first that was found counts, as
        # long as it is no queue that stays (`slow_ways`).
        lossy = [
            each
            for each in symptoms.lossy_ways(number, evidence, named, name)
            if not any(each.is_part_of(other) for other in slow)
        ]
        found += lossy
        if slow or not lossy:
            found += symptoms.slow_ways(number, evidence, named, name)
        late = symptoms.slow_peers(number, evidence, named, now, name)
        found += late or symptoms.starved_peers(number, evidence, named, name)
        found += symptoms.absent(number, evidence, scene.silent_s, now, name)
        found += symptoms.astray(number, evidence, group.stalled, now, name)
        return found
