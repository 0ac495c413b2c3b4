"""optimize_topology: links are measured, rings searched, and groups whose ring gets better are formed anew.

`optimization` decides what is measured and which ring is better; this part asks the peers, and carries the decision
out. What comes of it changes a ring as a loss does. Otherwise a ring keeps its order: a lost peer is left out, and
newcomers come where they hurt least.

A pair that its group goes without a link for may have been measured while it had one. It counts as unreachable all the
same, and no ring is adopted that needs its link: one of the two would be evicted if it cannot be made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pccl.protocol import messages as m
from pccl.protocol import optimization, topology
from pccl.protocol.direct_limit import direct_limit, is_outdated
from pccl.protocol.master.effects import FindRings
from pccl.protocol.master.run_state import Group, Member, Pair, RunState
from pccl.protocol.optimization import Optimization
from pccl.protocol.ring_problem import RingProblem


class RingChange:
    """The optimize_topology of a run that is under way, if one is."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._course: Optimization | None = None

    @property
    def is_under_way(self) -> bool:
        return self._course is not None

    def forget_all(self) -> None:
        """End the call: nobody is left who could want it."""
        self._course = None

    def step(self) -> bool | None:
        """Take the next step. Return None if it has to wait for answers, True if the call is over."""
        state, course = self._state, self._course
        rings = {group.number: group.ring for group in state.groups.values()}
        if course is None:
            self._course = Optimization(state.link_metrics, rings, state.view, state.now)
            return False
        if course.is_waiting:
            return None
        if course.is_decided:
            self._course = None
            return True
        if course.rings is not None:
            self._decide(course, course.rings)
            return False
        number = state.number()
        asked = course.next_round(number, state.now)
        for peer, links in asked.items():
            told = [(receiver, False) if sender == peer else (sender, True) for sender, receiver in links]
            state.tell(peer, m.Probe(number, told))
        if not asked:
            problems = course.search(number, rings)
            state.outbox.append(FindRings(number, {at: self._with_linkless(at, each) for at, each in problems.items()}))
        return False

    def _with_linkless(self, group: int, problem: RingProblem) -> RingProblem:
        """Return the problem of a group in which pairs without a link are unreachable."""
        pairs = _kept_apart(self._state.groups[group])
        return replace(problem, unreachable=problem.unreachable | pairs | {(high, low) for low, high in pairs})

    def _decide(self, course: Optimization, rings: Mapping[int, Sequence[int]]) -> None:
        """Adopt the rings that are better by enough."""
        state = self._state
        course.is_decided = True
        seconds = state.now - course.begun_at
        cost = f"{course.measured} links measured, {course.failed} not measurable, {seconds:.1f} s"
        for group in state.groups.values():
            found = rings.get(group.number, group.ring)
            if topology.ring_pairs(found) & _kept_apart(group):
                found = group.ring
            ring, group.decision = optimization.decide(group.ring, found, state.link_metrics)
            state.log("info", f"group {group.number}: {group.decision}; {cost}", {"group": group.number})
            limit = direct_limit(ring, state.link_metrics)
            if ring != group.ring or (group.is_meshed and is_outdated(group.direct_limit, limit, len(ring))):
                state.stop(group)
                group.ring = ring

    def probed(self, member: Member, message: m.Probes) -> None:
        """Take in what a peer has measured."""
        course = self._course
        if course is None or not course.is_asked(message.probe, member.peer):
            return
        found = {link.link_of(member.peer): (link.bytes_per_s, link.round_trip_us / 1e6) for link in message.found}
        self._log_unmeasured(course.answered(member.peer, found, self._state.now))

    def found(self, search: int, rings: Mapping[int, Sequence[int]]) -> bool:
        """Take in the rings that a search has found, by group. Return False if nobody waits for them."""
        course = self._course
        if course is None or not course.is_searching or course.number != search:
            return False
        course.found(rings)
        return True

    def expire(self) -> None:
        if self._course is not None:
            self._log_unmeasured(self._course.expire(self._state.now))

    def _log_unmeasured(self, links: list[tuple[int, int]]) -> None:
        for sender, receiver in links:
            self._state.log("warning", f"the link {sender}->{receiver} could not be measured")

    def deadlines(self) -> list[float]:
        ends_at = self._course.deadline() if self._course is not None else None
        return [ends_at] if ends_at is not None else []

    def forget(self, peer: int) -> None:
        """Forget a peer that is gone."""
        if self._course is not None:
            self._course.lost(peer)


def _kept_apart(group: Group) -> set[Pair]:
    """Return the pairs that have no link and are no neighbours."""
    return group.linkless - topology.ring_pairs(group.ring)
