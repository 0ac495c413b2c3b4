"""The stress checker: a faithful log passes, every falsified one is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from pccl.tools.stress.checker import EXCUSED_S, SETTLE_S, Checker
from pccl.tools.stress.plan import Joined, Message, Outcome, SessionOver, Stepped, Synced, Trouble
from pccl.tools.stress.values import TAGS

SLOT = {1: 4, 2: 0, 3: 9}


@dataclass
class Log:
    """The reports of the peers of a small run, in order."""

    entries: list[tuple[int, Message]] = field(default_factory=list)

    def step(self, revision: int, peers: list[int], rx_bytes: int = 0) -> None:
        """All of these sync and reduce."""
        for peer in peers:
            self.entries.append((peer, Synced(100, revision, f"state {revision}", 100, revision, rx_bytes)))
        slots = sorted(SLOT[peer] for peer in peers)
        outcomes = [Outcome(tag, slots, len(slots), f"result {revision} {tag}", 0) for tag in range(TAGS)]
        for peer in peers:
            self.entries.append((peer, Stepped(100, revision, outcomes, True, False, 0, 0.1)))

    def change(self, peer: int, kind: type[Message], change: Callable[[Message], Message]) -> None:
        """Falsifies the last report of this kind."""
        at = max(i for i, (who, what) in enumerate(self.entries) if who == peer and isinstance(what, kind))
        self.entries[at] = peer, change(self.entries[at][1])


def faithful() -> Log:
    """Three peers; peer 3 is killed in its third step."""
    log = Log([(peer, Joined(1)) for peer in SLOT])
    log.step(0, [1, 2, 3])
    log.step(1, [1, 2, 3])
    log.entries.append((3, Synced(100, 2, "state 2", 100, 2, 0)))
    log.step(2, [1, 2])
    return log


def judge(log: Log, frozen: tuple[int, ...] = ()) -> Checker:
    checker = Checker()
    for peer, slot in SLOT.items():
        checker.started(peer, slot, group=0)
    for peer in frozen:
        checker.excuse(peer, 0.0)
    for peer, message in log.entries:
        checker.receive(peer, message, now=1.0)
    for peer in SLOT:
        checker.ended(peer, now=2.0)
    checker.settle(now=3.0, is_over=True)
    return checker


def test_correct_log() -> None:
    checker = judge(faithful())
    assert not checker.problems
    counts = checker.counts
    assert (counts.steps, counts.ops_committed, counts.results_checked) == (8, 3 * TAGS, 8 * TAGS)
    assert (counts.syncs, counts.sessions, counts.participants_max) == (9, 3, 3)


def altered(outcomes: list[Outcome], tag: int, **changes: object) -> list[Outcome]:
    return [msgspec.structs.replace(each, **changes) if each.tag == tag else each for each in outcomes]


def outcome_change(tag: int, **changes: object) -> Callable[[Message], Message]:
    def change(message: Message) -> Message:
        assert isinstance(message, Stepped)
        return msgspec.structs.replace(message, outcomes=altered(message.outcomes, tag, **changes))

    return change


def without_op(tag: int, is_whole: bool) -> Callable[[Message], Message]:
    def change(message: Message) -> Message:
        assert isinstance(message, Stepped)
        outcomes = [each for each in message.outcomes if each.tag != tag]
        return msgspec.structs.replace(message, outcomes=outcomes, is_whole=is_whole)

    return change


def sync_change(**changes: object) -> Callable[[Message], Message]:
    return lambda message: msgspec.structs.replace(message, **changes)


@pytest.mark.parametrize(
    ("kind", "change", "found"),
    [
        (Stepped, outcome_change(3, digest="other bytes"), r"revision 2, op 3: committed with different results"),
        (Stepped, outcome_change(0, participants=[0, 4, 9], world_size=3), r"op 0: committed with different results"),
        (Stepped, outcome_change(0, participants=[0], world_size=1), r"op 0: .*"),
        (Stepped, outcome_change(5, world_size=3), r"op 5: peer 1 reported 3 peers, but slots \[0, 4\]"),
        (Stepped, outcome_change(9, participants=[0, 4, 5], world_size=3), r"slot 5 is in the result, but no peer"),
        (Stepped, without_op(7, is_whole=False), r"op 7: peer 1 is in the result, but got the verdict abort"),
        (Stepped, without_op(7, is_whole=True), r"peer 1 \(slot 4, group 0\): a whole step without all ops"),
        (Synced, sync_change(digest="drifted"), r"revision 2: the state differs after the sync"),
        (Synced, sync_change(rx_bytes=1 << 20), r"peer 1 .* had to be brought from revision 2 to 2 with 1048576 bytes"),
        (Synced, sync_change(offered_revision=1), r"peer 1 .* had to be brought from revision 1 to 2"),
    ],
)
def test_falsified_log(kind: type[Message], change: Callable[[Message], Message], found: str) -> None:
    import re

    log = faithful()
    log.change(1, kind, change)
    problems = judge(log).problems
    assert any(re.search(found, problem) for problem in problems), problems


def test_revision_goes_back() -> None:
    log = faithful()
    log.step(1, [1, 2])
    assert any("went from revision 2 of lineage 100 to revision 1" in problem for problem in judge(log).problems)


def test_peer_left_alone() -> None:
    log = faithful()
    log.entries.append((1, Synced(100, 3, "state 3", 100, 3, 0)))
    log.entries.append((1, Stepped(100, 3, [], False, False, 4, 0.1)))
    assert not judge(log).problems
    log.entries.append((2, Synced(100, 3, "state 3", 100, 3, 0)))
    both = [Outcome(tag, [0, 4], 2, "r", 0) for tag in range(TAGS)]
    log.entries.append((2, Stepped(100, 3, both, True, False, 0, 0.1)))
    assert len(judge(log).problems) == TAGS


def test_unexplained_eviction() -> None:
    log = faithful()
    log.entries += [(2, SessionOver("evicted: no beat")), (2, Joined(2))]
    assert not judge(log, frozen=(2,)).problems
    assert any("but was neither frozen nor" in problem for problem in judge(log).problems)


def test_unknown_outcome() -> None:
    for slots in ([0, 4], [0, 4, 9]):
        log = Log([(peer, Joined(1)) for peer in SLOT])
        log.step(0, [1, 2, 3])
        log.entries.append((3, Synced(100, 1, "state 1", 100, 1, 0)))
        log.step(1, [1, 2])
        for peer in (1, 2):
            outcomes = [Outcome(tag, slots, len(slots), "r", 0) for tag in range(TAGS)]
            log.change(peer, Stepped, lambda _, outcomes=outcomes: Stepped(100, 1, outcomes, True, False, 0, 0.1))  # type: ignore[misc]
        log.entries += [(3, SessionOver("interrupted in all_reduce", is_own=True)), (3, Joined(2))]
        log.step(2, [1, 2, 3])
        checker = judge(log)
        assert not checker.problems
        assert (checker.counts.evictions, checker.counts.sessions_left) == (0, 1)


def test_eviction_in_a_partition() -> None:
    checker = Checker()
    checker.started(4, 1, 0)
    checker.receive(4, SessionOver("no master has taken over"), 1.0)
    assert not checker.problems, "a newcomer has no place to lose"
    checker.receive(4, Joined(2), 2.0)
    checker.excuse_all(3.0)
    checker.receive(4, SessionOver("evicted: silent for 5 s"), 3.0)
    assert not checker.problems
    checker.receive(4, Joined(3), 5.0)
    checker.receive(4, SessionOver("evicted: silent for 5 s"), 5.5)
    assert any("but was neither frozen nor cut off" in problem for problem in checker.problems)


@pytest.mark.parametrize(("later_s", "is_excused"), [(EXCUSED_S, True), (EXCUSED_S + 0.2, False)])
def test_step_ends_an_excuse(later_s: float, is_excused: bool) -> None:
    checker = Checker()
    for peer, slot in SLOT.items():
        checker.started(peer, slot, group=0)
    checker.excuse(2, 1.0)
    log = faithful()
    log.entries.append((2, SessionOver("evicted: silent for 5 s")))
    for peer, message in log.entries:
        checker.receive(peer, message, 1.0 + later_s)
    assert bool(checker.problems) is not is_excused


def test_trouble_of_a_peer() -> None:
    log = faithful()
    log.entries.append((2, Trouble("a wrong result")))
    assert judge(log).problems == ["peer 2 (slot 0, group 0): a wrong result"]


def test_step_is_judged_when_complete() -> None:
    checker = Checker()
    for peer, slot in SLOT.items():
        checker.started(peer, slot, group=0)
    log = faithful()
    log.change(1, Stepped, outcome_change(3, digest="other bytes"))
    for peer, message in log.entries:
        checker.receive(peer, message, now=1.0)
    checker.settle(now=1.0 + SETTLE_S)
    assert not checker.problems  # peer 3 has not told of its third step yet
    assert checker.counts.ops_committed == 2 * TAGS
    checker.ended(3, now=10.0)
    checker.settle(now=10.0)
    assert not checker.problems
    checker.settle(now=10.0 + SETTLE_S)
    assert len(checker.problems) == 1
