"""Recovery reports as a new master judges them, beside a naive model of how a master came to die."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol import messages as m
from pccl.protocol.failover.durable_state import RecordedView, RunRecord, majority
from pccl.protocol.failover.recovery import quorum_of, rebuild, unheard
from pccl.protocol.messages import Kind, OpRef
from pccl.types import Result


def report_of(peer: int, installed: m.InstalledView | None, prepared: m.PreparedView | None = None, **rest: Any) -> Any:
    has_decided = prepared is not None and installed is not None and prepared.rings != installed.rings
    fields: dict[str, Any] = {
        "is_running": not has_decided and installed is not None,
        "has_decided": has_decided,
        "commits": [],
        "aborts": [],
        "waits_in": "",
        "outcomes": [],
        "joined_after": 0,
        "synced": None,
        "unlinked": [],
        "peer_timeout_s": 5.0,
        "engine_threads": 1,
    }
    return m.RecoveryReport(m.PeerInfo(peer, 0, ["10.0.0.1"], 1000, 2), installed, prepared, **{**fields, **rest})


def view(number: int, *peers: int, epoch: int = 0) -> m.InstalledView:
    return m.InstalledView(number, [m.Ring(0, epoch or number, list(peers))], True)


def prepared(number: int, *peers: int, answered: bool = True) -> m.PreparedView:
    return m.PreparedView(number, [m.Ring(0, number, list(peers))], answered)


def record(installed: RecordedView, *newer: RecordedView) -> RunRecord:
    return RunRecord("run", b"secret", 1, installed, list(newer))


# Who decides, and who goes on.


def test_nobody_decides_anything_alone_but_of_a_run_of_one() -> None:
    assert not quorum_of({}).has_majority
    assert not quorum_of({1: report_of(1, view(2, 1, 2))}).has_majority
    assert quorum_of({1: report_of(1, view(2, 1))}).is_complete


def test_all_back_and_nothing_changed_goes_on_as_it_stands() -> None:
    here = {peer: report_of(peer, view(4, 1, 2, 3)) for peer in (1, 2, 3)}
    found = rebuild(here)
    assert found.is_unchanged
    assert [group.is_steady for group in found.groups] == [True]
    assert found.missing == []


def test_who_is_missing_is_lost_and_the_group_is_flushed() -> None:
    here = {peer: report_of(peer, view(4, 1, 2, 3)) for peer in (3, 1)}
    assert quorum_of(here).has_majority
    assert not quorum_of(here).is_complete
    found = rebuild(here)
    (group,) = found.groups
    assert (found.missing, group.ring, group.former) == ([2], [1, 3], [1, 2, 3])
    assert group.unsettled == {1: 4, 3: 4}
    assert not group.is_steady
    assert not found.is_unchanged


def test_a_view_that_may_be_in_force_needs_its_majority_too() -> None:
    ring = 1, 2, 3, 5, 6, 7, 8
    here = {peer: report_of(peer, view(4, 1, 2, 3, 4), prepared(5, *ring)) for peer in (1, 2, 3)}
    assert not quorum_of(here).has_majority
    here[1] = report_of(1, view(4, 1, 2, 3, 4), prepared(5, *ring, answered=False))
    assert quorum_of(here).has_majority


def test_so_does_one_that_a_master_in_between_has_passed_over() -> None:
    """View 5 is in force at 3. A second master has heard so, and died when 2 had been told of view 6."""
    ring = 1, 2, 3, 4, 5
    here = {
        1: report_of(1, view(4, 1), prepared(5, *ring)),
        2: report_of(2, None, prepared(6, *ring), answered=[prepared(5, *ring)]),
    }
    assert not quorum_of(here).has_majority
    there = {peer: report_of(peer, None, prepared(5, *ring)) for peer in (4, 5)}
    there[3] = report_of(3, view(5, *ring))
    assert quorum_of(there).has_majority
    here[2] = report_of(2, None, prepared(6, *ring))
    assert quorum_of(here).has_majority, "the master of view 5 has told 2 of view 6, and so had not come to install it"


def test_whom_a_recorded_view_has_left_out_does_not_lead_on_from_an_earlier_one() -> None:
    here = {peer: report_of(peer, view(4, 1, 2, 3)) for peer in (1, 2)}
    assert quorum_of(here, has_rivals=False).has_majority
    assert not quorum_of(here, False, record(RecordedView.of(5, (2, 3)))).has_majority


def test_a_recorded_view_may_be_in_force_though_nobody_tells_of_it() -> None:
    here = {peer: report_of(peer, view(4, 1, 2, 3)) for peer in (1, 2)}
    recorded = record(RecordedView.of(4, (1, 2, 3)), RecordedView.of(5, (3,)))
    assert not quorum_of(here, False, recorded).has_majority
    assert not quorum_of(here, False, recorded, needs_majority=False).has_majority, "nobody may go on"


def test_those_who_do_not_go_on_must_be_no_majority() -> None:
    """3 was lost, and may not hear that it is: it and 2, if that lives, could go on with another master."""
    here = {1: report_of(1, view(4, 1, 2, 3), prepared(5, 1, 2, answered=False)), 3: report_of(3, view(4, 1, 2, 3))}
    assert not quorum_of(here).has_majority
    assert quorum_of(here, has_rivals=False).has_majority
    assert set(rebuild(here, has_rivals=False).members) == {1}
    here[2] = report_of(2, view(4, 1, 2, 3))
    assert set(rebuild(here).members) == {1, 2}


def test_so_does_one_before_the_newest_of_which_newcomers_know_alone() -> None:
    """3 has prepared view 5, which 2 and 200 have in force; 300 only knows of view 6."""
    here = {
        1: report_of(1, view(4, 1, 2, 3)),
        3: report_of(3, view(4, 1, 2, 3), prepared(5, 2, 3, 200)),
        300: report_of(300, None, prepared(6, 2, 3, 200, 300, answered=False)),
    }
    assert not quorum_of(here).has_majority
    there = {2: report_of(2, view(5, 2, 3, 200)), 200: report_of(200, view(5, 2, 3, 200))}
    assert quorum_of(there).has_majority
    here[2] = report_of(2, view(4, 1, 2, 3), prepared(6, 2, 3, 200, 300, answered=False))
    assert quorum_of(here).has_majority, "it was never in force: 2 would have heard"


def test_a_settled_survivor_speaks_for_the_peers_of_its_view_only() -> None:
    here = {
        1: report_of(1, view(4, 1, 2, 3), prepared(5, 1, 2), commits=[OpRef(7, 0)]),
        2: report_of(2, view(4, 1, 2, 3)),
        3: report_of(3, view(4, 1, 2, 3)),
    }
    found = rebuild(here)
    (group,) = found.groups
    assert set(found.members) == {1, 2}
    assert found.left_out == {3}
    assert (group.is_decided, group.commits, group.unsettled) == (True, {OpRef(7, 0)}, {2: 4})
    assert found.known_view == 5


def test_so_it_does_beside_an_older_view_that_may_be_in_force() -> None:
    """1 was told verdicts by a master that had lost 6, and died; 5 may have the view before that."""
    last, before = view(4, *range(1, 8)), prepared(5, *range(1, 7))
    here = {peer: report_of(peer, last, before) for peer in (2, 3, 4, 6)}
    here[1] = report_of(1, last, prepared(9, *range(1, 6), answered=False), answered=[before], commits=[OpRef(7, 0)])
    assert set(quorum_of(here).quorum_views) == {4, 5}
    found = rebuild(here)
    assert (set(found.members), found.left_out) == ({1, 2, 3, 4}, {6})


def test_whoever_was_to_be_accepted_begins_again_unless_another_has_been() -> None:
    old = view(4, 1)
    here = {1: report_of(1, old, prepared(5, 1, 2)), 2: report_of(2, None, prepared(5, 1, 2))}
    assert (rebuild(here).newcomers, set(rebuild(here).members)) == ({2}, {1})
    here[1] = report_of(1, view(5, 1, 2))
    assert (rebuild(here).newcomers, set(rebuild(here).members)) == (set(), {1, 2})


def test_a_settled_survivor_goes_on_though_a_later_view_was_prepared_without_it() -> None:
    """The peer that the later view lists has come, too, so that view is not in force anywhere."""
    here = {1: report_of(1, view(1, 1), prepared(2, 1, 200)), 200: report_of(200, None, prepared(4, 200))}
    assert quorum_of(here).is_complete
    assert set(rebuild(here).members) == {1}
    assert rebuild(here).newcomers == {200}


def test_a_run_of_newcomers_is_none() -> None:
    assert quorum_of({1: report_of(1, None, prepared(1, 1))}).peers == frozenset()


# What was heard.


def test_verdicts_that_some_have_heard_are_known() -> None:
    abort = m.Aborted(2, 0, Result.TIMEOUT, "its caller gave up")
    here = {
        1: report_of(1, view(4, 1, 2), commits=[OpRef(1, 3)]),
        2: report_of(2, view(4, 1, 2), commits=[OpRef(1, 3), OpRef(5, 0)], aborts=[abort]),
    }
    (group,) = rebuild(here).groups
    assert group.commits == {OpRef(1, 3), OpRef(5, 0)}
    assert group.aborts == {OpRef(2, 0): abort}


def test_verdicts_and_ops_of_an_earlier_epoch_are_about_others() -> None:
    lagging = report_of(2, view(3, 1, 2), commits=[OpRef(5, 0)], aborts=[m.Aborted(6, 0, Result.TIMEOUT, "late")])
    (group,) = rebuild({1: report_of(1, view(4, 1, 2), commits=[OpRef(1, 3)]), 2: lagging}).groups
    assert (group.commits, group.aborts, group.is_steady) == ({OpRef(1, 3)}, {}, False)


def test_a_run_of_which_a_newer_view_is_known_does_not_go_on_as_it_stands() -> None:
    """It leaves all rings as they are, so all ops run."""
    installed = view(4, 1, 2, 3)
    here = {peer: report_of(peer, installed) for peer in (1, 2)}
    here[3] = report_of(3, installed, m.PreparedView(5, installed.rings, False))
    found = rebuild(here)
    assert [group.is_steady for group in found.groups] == [True]
    assert not found.is_unchanged
    assert found.known_view == 5


def test_who_was_told_that_a_group_is_no_mesh_is_believed() -> None:
    mesh = view(4, 1, 2, 3)
    no_mesh = m.InstalledView(4, mesh.rings, False)

    def missing(*reports: m.RecoveryReport) -> set[tuple[int, int]]:
        (group,) = rebuild({report.me.peer: report for report in reports}).groups
        return set(group.missing)

    assert missing(*(report_of(peer, mesh, unlinked=[3]) for peer in (1, 2))) == set(), "it is told anew"
    assert missing(report_of(1, mesh), report_of(2, no_mesh, unlinked=[3])) == {(2, 3)}
    assert missing(report_of(1, no_mesh), report_of(2, no_mesh)) == {(1, 2)}, "all wait for the master's verdicts"


def test_the_end_of_a_call_is_told_to_who_waits_in_it() -> None:
    outcome = m.GroupCallOutcome(Kind.UPDATE_TOPOLOGY, 9, Result.SUCCESS, "", 0)
    here = {
        1: report_of(1, view(4, 1, 2, 3, 4), outcomes=[outcome]),
        2: report_of(2, view(4, 1, 2, 3, 4), waits_in=Kind.UPDATE_TOPOLOGY),
        3: report_of(3, view(4, 1, 2, 3, 4), waits_in=Kind.ARE_PEERS_PENDING),
        4: report_of(4, view(4, 1, 2, 3, 4), waits_in=Kind.UPDATE_TOPOLOGY, joined_after=9),
    }
    found = rebuild(here)
    assert found.call_number == 9
    assert [unheard(here[peer], found) for peer in here] == [None, outcome, None, None]


def test_incumbents_are_those_of_the_last_sync_also_who_has_not_heard_of_its_end() -> None:
    outcome = m.GroupCallOutcome(Kind.SYNC, 9, Result.SUCCESS, "", 30)
    here = {
        1: report_of(1, view(4, 1, 2, 3), outcomes=[outcome], synced=(9, 30)),
        2: report_of(2, view(4, 1, 2, 3), synced=(5, 20)),
        3: report_of(3, view(4, 1, 2, 3), joined_after=11),
    }
    (group,) = rebuild(here).groups
    assert (group.revision, group.synced) == (30, {1, 2})


def test_who_has_not_heard_that_it_is_accepted_is_no_incumbent() -> None:
    outcome = m.GroupCallOutcome(Kind.SYNC, 9, Result.SUCCESS, "", 30)
    here = {
        1: report_of(1, view(5, 1, 2), outcomes=[outcome], synced=(9, 30)),
        2: report_of(2, None, prepared(5, 1, 2)),
    }
    (group,) = rebuild(here).groups
    assert set(group.ring) == {1, 2}
    assert (group.revision, group.synced) == (30, {1})


# A naive model: how views came about, and what each peer had heard when the master died.


@dataclass
class Story:
    installed: dict[int, m.InstalledView] = field(default_factory=dict)
    prepared: dict[int, m.PreparedView] = field(default_factory=dict)
    newcomers: set[int] = field(default_factory=set)

    @property
    def peers(self) -> list[int]:
        return sorted({*self.installed, *self.prepared, *self.newcomers})

    def tell(self, peers: set[int]) -> dict[int, m.RecoveryReport]:
        return {peer: report_of(peer, self.installed.get(peer), self.prepared.get(peer)) for peer in peers}


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """A master that loses less than a majority at a time, as one that has rivals, and admits whom it likes."""
    story = Story()
    peers = set(range(1, draw(st.integers(1, 6)) + 1))
    number = 1
    in_force = view(number, *sorted(peers))
    for peer in peers:
        story.installed[peer] = in_force
    for _ in range(draw(st.integers(0, 3))):
        number += 1
        lost = draw(st.sets(st.sampled_from(sorted(peers)), max_size=majority(len(peers)) - 1))
        new = {100 * number + each for each in range(draw(st.integers(0, 3)))}
        story.newcomers |= new
        following = (peers - lost) | new
        if not following:
            break
        ring = sorted(following)
        answered = following if draw(st.booleans()) else draw(st.sets(st.sampled_from(ring)))
        heard = answered | draw(st.sets(st.sampled_from(ring)))
        for peer in heard:
            if peer in peers:  # what was said before is heard before
                story.installed[peer] = in_force
            story.prepared[peer] = prepared(number, *ring, answered=peer in answered)
        if answered != following:
            # It may only prepare another one, with others lost or not.
            continue
        in_force = view(number, *ring)
        for peer in following if draw(st.booleans()) else draw(st.sets(st.sampled_from(ring))):
            story.installed[peer] = in_force
            story.prepared.pop(peer, None)
        peers = following
    return story


@given(stories(), st.data())
def test_two_masters_never_both_have_a_majority(story: Story, data: st.DataObject) -> None:
    everybody = story.peers
    ours = data.draw(st.sets(st.sampled_from(everybody)))
    theirs = set(everybody) - ours
    assert not (quorum_of(story.tell(ours)).has_majority and quorum_of(story.tell(theirs)).has_majority)


@given(stories(), st.data())
def test_whoever_has_a_majority_can_rebuild(story: Story, data: st.DataObject) -> None:
    heard = data.draw(st.sets(st.sampled_from(story.peers)))
    told = story.tell(heard)
    quorum = quorum_of(told)
    if not quorum.has_majority:
        return
    found = rebuild(told)
    assert {*found.members, *found.newcomers, *found.left_out} == set(told)
    assert found.members
    assert set(found.members).isdisjoint(found.missing)
    assert found.known_view >= found.view
    for group in found.groups:
        assert set(group.ring) <= set(found.members)
        assert group.is_steady <= (group.ring == group.former)
        assert group.is_steady or not found.is_unchanged
        assert set(group.unsettled) <= set(group.ring)


@given(stories())
def test_all_together_have_a_majority(story: Story) -> None:
    told = story.tell(set(story.peers))
    assert quorum_of(told).has_majority


@given(stories(), st.data())
def test_more_survivors_never_undo_a_majority_of_the_same_view(story: Story, data: st.DataObject) -> None:
    everybody = story.peers
    some = data.draw(st.sets(st.sampled_from(everybody)))
    more = some | data.draw(st.sets(st.sampled_from(everybody)))
    before, after = quorum_of(story.tell(some)), quorum_of(story.tell(more))
    if before.has_majority and before.view == after.view and not any(peer in story.prepared for peer in more - some):
        assert after.has_majority


def test_report_survives_the_wire() -> None:
    metrics = [(m.LinkMetric(2, True, 1e6, 250), 30)]
    said = m.Vote(
        3, report_of(1, view(4, 1, 2), prepared(5, 1), commits=[OpRef(1, 2)], synced=(3, 4), link_metrics=metrics)
    )
    assert msgspec.convert(msgspec.to_builtins(said, builtin_types=(bytes,)), m.Vote) == said
