"""Votes that are late, majorities that come and go, and what a master keeps that has led before."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.master.run_state import Persist
from tests.protocol.test_failover import Rig
from tests.protocol.test_recovery_report import report_of, view

ALL = (1, 2, 3, 4, 5)


def test_stale_vote_is_ignored() -> None:
    rig = Rig()
    for peer in (1, 2, 3):
        rig.resume(peer)
        rig.quorum_of(report_of(peer, view(7, *ALL)))
    for peer in (2, 3):
        rig.machine.disconnected(peer, "reset", rig.now)
    rig.resume(4, term=5)
    rig.say(1, m.Vote(2, report_of(1, view(7, *ALL))))
    rig.quorum_of(report_of(4, view(7, *ALL)))
    rig.resume(5)
    rig.quorum_of(report_of(5, view(7, *ALL)))
    assert rig.told(1) == [m.VoteRequest(6)]
    for peer in (4, 5):
        rig.say(peer, m.Vote(6, report_of(peer, view(7, *ALL))))
    rig.wait(4.0)
    rig.wait(1.0)
    assert not rig.machine.is_leading
    rig.say(1, m.Vote(6, report_of(1, view(7, *ALL))))
    rig.wait(4.0)
    assert rig.machine.master.state.accepted == [1, 4, 5]


def test_late_peer_after_new_majority_is_in_time() -> None:
    rig = Rig()
    for peer in (1, 2, 3):
        rig.resume(peer)
        rig.deliver(report_of(peer, view(7, *ALL)))
    rig.wait(2.0)
    rig.machine.disconnected(2, "reset", rig.now)
    rig.wait(9.0)
    rig.resume(4)
    rig.deliver(report_of(4, view(7, *ALL)))
    rig.wait(1.5)
    assert not rig.machine.is_leading
    rig.resume(5)
    rig.deliver(report_of(5, view(7, *ALL)))
    rig.wait(4.0)
    assert rig.machine.master.state.accepted == [1, 3, 4, 5]


def test_voters_are_released_if_majority_leaves() -> None:
    """It would stay until that has led the others on without it, so it is asked for its views once more, after which it
    stays for as long as any peer does."""
    rig = Rig()
    for peer in (1, 2, 3):
        rig.resume(peer, masters=2)
        rig.quorum_of(report_of(peer, view(7, *ALL)))
    rig.say(1, m.Vote(2, report_of(1, view(7, *ALL))))
    rig.effects = rig.machine.disconnected(2, "reset", rig.now)
    assert rig.told(1) == rig.told(3) == [m.PreVoteRequest()]
    for peer in (1, 3):
        rig.quorum_of(report_of(peer, view(7, *ALL)))
        assert rig.told(peer) == []
    rig.resume(4, masters=2)
    rig.quorum_of(report_of(4, view(7, *ALL)))
    assert rig.told(1) == rig.told(3) == rig.told(4) == [m.VoteRequest(3)]


def test_late_peer_after_newer_view_is_in_time() -> None:
    rig = Rig()
    for peer in (1, 2, 3, 4):
        rig.resume(peer)
        rig.deliver(report_of(peer, view(6, 1, 2, 3, 4, 5, 6, 7)))
    rig.wait(2.0)
    rig.resume(5)
    rig.deliver(report_of(5, view(7, 5, 6, 7)))
    rig.wait(9.0)
    rig.resume(6)
    rig.deliver(report_of(6, view(7, 5, 6, 7)))
    rig.wait(1.5)
    assert not rig.machine.is_leading
    rig.resume(7)
    rig.deliver(report_of(7, view(7, 5, 6, 7)))
    assert rig.machine.master.state.accepted == [5, 6, 7]


def test_deposed_master_records_unfinished_run() -> None:
    rig = Rig()
    rig.masters = 1
    rig.recover(1, 2)
    rig.machine.stood_still(9.0, rig.now)
    for peer in (1, 2):
        rig.resume(peer, term=2)
        rig.quorum_of(report_of(peer, view(7, 1, 2)))
    records = [each.record for each in rig.effects if isinstance(each, Persist)]
    assert [(each.term, each.is_over) for each in records] == [(3, False)]


def test_same_term_uses_new_number_block() -> None:
    """It has led another one meanwhile, and its record is of that."""
    rig = Rig()
    rig.recover(1, 2, masters=2)
    before = rig.machine.master.state.view, rig.machine.master.state.next_peer
    rig.machine.stood_still(9.0, rig.now)
    for peer in (8, 9):
        rig.resume(peer, run="other", masters=2)
        rig.deliver(report_of(peer, view(7, 8, 9)))
    assert rig.machine.run == "other"
    rig.machine.stood_still(9.0, rig.now)
    rig.recover(1, 2, masters=2)
    assert (rig.machine.run, rig.machine.master.state.term) == ("old", 2)
    assert rig.machine.master.state.view != before[0]
    assert rig.machine.master.state.next_peer != before[1]
