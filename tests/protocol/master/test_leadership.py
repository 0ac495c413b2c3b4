"""The right of a master to lead: which views its record names, who must have heard of a view, and when it has lost too
many."""

from __future__ import annotations

import pytest

from pccl.protocol.failover.durable_state import RecordedView
from pccl.protocol.master.run_state import RunState
from pccl.protocol.master.views import Leadership, QuorumView


def leading(peers: int) -> Leadership:
    """A master whose last view has this many peers, all of whom are here."""
    here = frozenset(range(1, peers + 1))
    return Leadership(RunState("run"), RecordedView(3, here), (), [QuorumView(peers, here)], has_rivals=True)


@pytest.mark.parametrize(("lost", "unaware", "is_enough"), [(0, 2, True), (0, 3, False), (1, 1, True), (1, 2, False)])
def test_no_majority_may_be_left_that_has_not_heard_of_a_view(lost: int, unaware: int, is_enough: bool) -> None:
    leadership = leading(5)
    for peer in range(1, lost + 1):
        leadership.lose(peer, is_leaving=False)
    left = range(lost + 1, lost + 1 + unaware)
    assert leadership.is_known_to_enough(left) == is_enough


@pytest.mark.parametrize("is_leaving", [True, False])
def test_who_leaves_on_purpose_follows_nobody(is_leaving: bool) -> None:
    """Of five two are gone. If they have left, two more are a majority of the rest; else one more deposes."""
    leadership = leading(5)
    for peer in (1, 2):
        leadership.lose(peer, is_leaving)
    leadership.lose(3, is_leaving=False)
    assert bool(leadership.deposed) != is_leaving
    leadership.lose(4, is_leaving=False)
    assert leadership.deposed


def test_the_record_names_a_view_before_it_is_announced() -> None:
    state = RunState("run")
    state.view = 4
    record = Leadership(state, RecordedView.of(3, (1, 2, 3))).prepare([1, 2])
    assert (record.installed, record.prepared) == (RecordedView.of(3, (1, 2, 3)), [RecordedView.of(4, (1, 2))])


def test_a_lost_peer_counts_until_a_view_without_it_is_in_force() -> None:
    """It may count in a view of the master before, too. Where nobody is left, no view can come into force."""
    state = RunState("run")
    leadership = Leadership(state, RecordedView.of(3, (1, 2)), [RecordedView.of(4, (1, 2, 3))])
    state.accepted_count = 1
    assert [leadership.is_final_without(peer) for peer in (2, 3, 4)] == [False, False, True]
    state.accepted_count = 0
    assert leadership.is_final_without(2)
