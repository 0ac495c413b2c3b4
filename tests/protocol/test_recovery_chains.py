"""Masters that follow one another, or would at the same time: a model of what peers hear, beside what `stand` and
`rebuild` make of it. Whoever has come to a majority could lead; two groups of peers never can.

Any of the masters that have ever led may go on as long as peers follow it. Messages to a peer arrive in order or not at
all, and who is sent away may not hear of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from pccl.protocol import messages as m
from pccl.protocol.failover.durable_state import majority
from pccl.protocol.failover.recovery import quorum_of, rebuild
from tests.protocol.test_recovery_report import prepared, report_of, view

FOUNDERS_MAX = 5
STEPS = 14
SPLITS = 10
"""Ways in which all are parted into two, after each step."""
BLOCK = 1000


@dataclass
class _Peer:
    term: int
    installed: m.InstalledView | None = None
    prepared: m.PreparedView | None = None
    prepared_in: int = 0
    answered: list[m.PreparedView] = field(default_factory=list)

    def prepare(self, view: m.PreparedView, term: int) -> None:
        if self.prepared is not None and self.prepared.answered and self.prepared_in != term:
            self.answered.append(self.prepared)
        self.prepared, self.prepared_in = view, term

    def install(self, view: m.InstalledView) -> None:
        if self.prepared is not None and (self.prepared.view, self.prepared_in) == (view.view, self.term):
            self.installed, self.prepared = view, None
            self.answered.clear()

    def resume(self, in_force: set[int]) -> None:
        self.answered = [each for each in self.answered if each.view in in_force]
        if self.prepared is not None and self.prepared.view not in in_force:
            self.prepared = m.PreparedView(self.prepared.view, self.prepared.rings, False)


@dataclass
class _Master:
    term: int
    number: int
    """The number of the last view."""
    in_force: m.InstalledView
    accepted: set[int]
    members: set[int]
    """The members of the next view: with newcomers, without the lost."""
    circles: list[tuple[int, set[int]]]
    """The peers of views that count, how many and who is left."""
    awaiting: set[int] = field(default_factory=set)
    """Peers that have not answered the view that is prepared."""

    @property
    def may_lose(self) -> int:
        return max(0, min(majority(size) - 1 - (size - len(here)) for size, here in self.circles))


class _Story:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        founders = set(range(1, self.rng.randint(1, FOUNDERS_MAX) + 1))
        first = view(1, *founders)
        self.peers = {peer: _Peer(1, first) for peer in founders}
        self.masters = [_Master(1, 1, first, set(founders), set(founders), [(len(founders), set(founders))])]
        self.terms = 1
        self.next_peer = len(founders) + 1

    def play(self) -> None:
        for _ in range(self.rng.randint(1, STEPS)):
            master = self.rng.choice(self.masters)
            action = self.rng.choices((self.prepare, self.answer, self.install, self.succeed), (3, 4, 1, 3))[0]
            action(master)
            for _ in range(SPLITS):
                self.check()

    def check(self) -> None:
        ours = self.some(self.peers, self.rng.choice((0.3, 0.5, 0.7)))
        theirs = set(self.peers) - ours
        both = [quorum_of(self.tell(peers)).has_majority for peers in (ours, theirs)]
        assert not all(both), (ours, theirs)

    def tell(self, peers: set[int]) -> dict[int, m.RecoveryReport]:
        return {
            peer: report_of(peer, each.installed, each.prepared, answered=list(each.answered))
            for peer, each in self.peers.items()
            if peer in peers
        }

    def some(self, peers: set[int] | dict[int, _Peer], share: float) -> set[int]:
        return {peer for peer in sorted(peers) if self.rng.random() < share}

    def followers(self, master: _Master) -> dict[int, _Peer]:
        return {
            peer: self.peers[peer]
            for peer in sorted(master.members)
            if peer in self.peers and self.peers[peer].term == master.term
        }

    def prepare(self, master: _Master) -> None:
        """Prepare a view that has lost some and admits others, more often than it could in truth."""
        losses = min(self.rng.randint(0, 2), master.may_lose)
        lost = set(self.rng.sample(sorted(master.members), min(losses, len(master.members))))
        for _, here in master.circles:
            here -= lost
        left = master.members - lost
        new = set(range(self.next_peer, self.next_peer + self.rng.choice((0, 0, 1, 2, 3, 4))))
        self.peers |= {peer: _Peer(master.term) for peer in new}
        self.next_peer += len(new)
        if left | new:
            master.number += 1
            master.members = left | new
            master.awaiting = set(master.members)

    def answer(self, master: _Master) -> None:
        """Let some hear of the view that is prepared, and some of these answer."""
        followers = self.followers(master)
        for peer in sorted(self.some(master.awaiting & followers.keys(), 0.7)):
            is_answered = self.rng.random() < 0.8
            followers[peer].install(master.in_force)  # it was said before
            followers[peer].prepare(prepared(master.number, *sorted(master.members), answered=is_answered), master.term)
            if is_answered:
                master.awaiting.discard(peer)
                if not master.awaiting:
                    master.in_force = view(master.number, *sorted(master.members))
                    master.accepted = set(master.members)
                    master.circles = [(len(master.members), set(master.members))]

    def install(self, master: _Master) -> None:
        """Let some hear that the last view is in force."""
        followers = self.followers(master)
        for peer in self.some(master.accepted & followers.keys(), 0.5):
            followers[peer].install(master.in_force)

    def succeed(self, _: _Master) -> None:
        """Let some come to another master, which leads if it may."""
        told = self.tell(self.some(self.peers, 0.6))
        quorum = quorum_of(told)
        if not quorum.has_majority:
            return
        self.terms += 1
        found = rebuild(told)
        members = set(found.members)
        for peer in told:
            self.peers[peer].term = self.terms
        for peer in self.some(members, 0.7):
            self.peers[peer].resume(set(found.quorum_views))
        for peer in self.some(found.newcomers | found.left_out, 0.3):
            del self.peers[peer]
        last = max((each.installed for each in told.values() if each.installed), key=lambda each: each.view)
        circles = [(len(listed), set(listed) & members) for listed in found.quorum_views.values()]
        accepted = {peer for peer in members if found.members[peer].installed is not None}
        number = max(found.view_heard, self.terms * BLOCK)
        next_master = _Master(self.terms, number, last, accepted, members, circles)
        if not found.is_unchanged:
            next_master.number += 1
            next_master.awaiting = set(members)
        self.masters.append(next_master)


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(250, 2000, 250))]
)
def test_two_never_lead_whatever_was_before(first: int) -> None:
    for seed in range(first, first + 250):
        story = _Story(seed)
        try:
            story.play()
        except AssertionError as error:
            error.add_note(f"story {seed}: {story.peers}")
            raise
