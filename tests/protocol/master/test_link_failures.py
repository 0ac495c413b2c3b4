"""Pairs that cannot connect, at the master's machine: whose word counts, and who has to go."""

from __future__ import annotations

import pytest

from pccl.protocol import messages as m
from pccl.protocol import topology
from pccl.protocol.master.link_failures import RELINKS_MAX
from pccl.protocol.messages import Kind, OpRef
from pccl.types import Result
from tests.protocol.master.rig import TAG, Rig, flush_of


def test_lost_link_outside_rings_is_ignored() -> None:
    rig = Rig(0)
    for _ in range(2):
        rig.hello(7)
    rig.hear(2, m.LinkLost(0, 3, "what link?"))
    assert rig.effects == []


@pytest.mark.parametrize("reporter", [1, 3])
def test_newcomer_is_evicted_for_failed_pair(reporter: int) -> None:
    rig = Rig(0, 0)
    rig.hello()
    for peer in (1, 2):
        rig.hear(peer, m.GroupCall(1, Kind.UPDATE_TOPOLOGY))
    other = {1: 3, 3: 1}[reporter]
    for peer in (1, 2, 3):
        rig.hear(peer, m.LinksReady(3, [(other, "refused")] if peer == reporter else []))
    (farewell,) = [message for message in rig.told(3) if isinstance(message, m.Goodbye)]
    assert farewell.code == Result.RANK_CONNECTION_FAILED
    assert farewell.reason.startswith("evicted: peers 1 and 3 cannot connect to each other: refused; peer 3 may ")
    rig.answer()
    assert rig.master.state.accepted == [1, 2]
    assert m.GroupCallResult(1, Result.SUCCESS) in rig.told(1)


@pytest.mark.parametrize(("reporter", "other"), [(3, 1), (1, 3)])
def test_dialer_report_suffices(reporter: int, other: int) -> None:
    """The newcomer dials, and has given up. Peer 1 may wait to be dialed for much longer; peer 3, if it is peer 1 that
    has given up, may still do so."""
    rig = Rig(0, 0)
    rig.hello()
    for peer in (1, 2):
        rig.hear(peer, m.GroupCall(1, Kind.UPDATE_TOPOLOGY))
    rig.hear(2, m.LinksReady(3))
    rig.hear(reporter, m.LinksReady(3, [(other, "no answer")]))
    assert rig.peers == ([1, 2] if reporter == 3 else [1, 2, 3])


def test_dialer_reason_is_used() -> None:
    """It has tried, where the other one has only waited, and may have said so before."""
    rig = Rig(0, 0)
    rig.hello()
    for peer in (1, 2):
        rig.hear(peer, m.GroupCall(1, Kind.UPDATE_TOPOLOGY))
    rig.hear(2, m.LinksReady(3))
    rig.hear(1, m.LinksReady(3, [(3, "it did not connect")]))
    rig.hear(3, m.LinksReady(3, [(1, "large packets vanish")]))
    (farewell,) = [message for message in rig.told(3) if isinstance(message, m.Goodbye)]
    assert "cannot connect to each other: large packets vanish" in farewell.reason


@pytest.mark.parametrize("other", [3, 4, 99])
def test_unneeded_links_evict_no_peer(other: int) -> None:
    rig = Rig(0, 0, 1)
    rig.hello()
    for peer in (1, 2, 3):
        rig.hear(peer, m.GroupCall(1, Kind.UPDATE_TOPOLOGY))
    rig.hear(4, m.LinksReady(3, [(other, "so they say")]))
    for peer in (1, 2, 3):
        rig.hear(peer, m.LinksReady(3))
    assert rig.master.state.accepted == [1, 2, 3, 4]
    assert rig.master.state.installed_view == 3


def test_relinks_are_counted_by_pair() -> None:
    rig = Rig(0, 0, 0)
    for _ in range(RELINKS_MAX):
        for a, b in ((1, 2), (2, 3)):
            rig.hear(a, m.LinkLost(rig.master.state.view, b, "reset"))
            rig.answer()
    assert rig.master.state.accepted == [1, 2, 3]
    rig.hear(3, m.LinkLost(rig.master.state.view, 1, "reset"))
    rig.answer()
    assert rig.master.state.accepted == [1, 2, 3]
    rig.hear(3, m.LinkLost(rig.master.state.view, 2, "reset"))
    rig.answer()
    assert rig.master.state.accepted == [1, 2]


def break_link(rig: Rig, by: int, other: int, committed_by: int = 0) -> None:
    """A link breaks in the view in force, and all is well again. `committed_by` is the one peer that has committed ops
    in that epoch, if any has."""
    rig.hear(by, m.LinkLost(rig.master.state.view, other, "reset"))
    for peer in rig.peers:
        for flush in [message for message in rig.told(peer) if isinstance(message, m.Flush)]:
            effects = rig.effects
            rig.hear(peer, m.FlushReply(flush.flush, [], [OpRef(TAG, 0)] if peer == committed_by else []))
            rig.effects = effects + rig.effects
    rig.answer()


@pytest.mark.parametrize("committed_by", [1, 2, 3])
def test_links_with_commits_may_break_repeatedly(committed_by: int) -> None:
    """An op is not committed at all peers at the same time: neither the end that reports first may have it yet, nor the
    other one, whose report may come when the link has been made anew."""
    rig = Rig(0, 0, 0)
    for _ in range(3 * RELINKS_MAX):
        break_link(rig, 1, 2, committed_by)
    assert rig.master.state.accepted == [1, 2, 3]


@pytest.mark.parametrize("committed_by", [1, 2, 3])
def test_commit_resets_relink_count(committed_by: int) -> None:
    rig = Rig(0, 0, 0)
    for _ in range(RELINKS_MAX):
        break_link(rig, 1, 2)
    for _ in range(RELINKS_MAX):
        break_link(rig, 1, 3)
    break_link(rig, 1, 2, committed_by)
    assert rig.master.state.accepted == [1, 2, 3]
    for _ in range(RELINKS_MAX):
        break_link(rig, 1, 3)
    for _ in range(RELINKS_MAX - 1):
        break_link(rig, 1, 2)
    assert rig.master.state.accepted == [1, 2, 3]
    break_link(rig, 1, 2)
    assert len(rig.master.state.accepted) == 2


def test_unreliable_unneeded_link_is_dropped() -> None:
    rig = Rig(0, 0, 0, 0)
    for _ in range(RELINKS_MAX + 1):
        break_link(rig, 4, 2)
    assert rig.master.state.accepted == [1, 2, 3, 4]
    assert rig.master.state.groups[0].unreliable == {(2, 4)}


def test_doubted_link_is_not_a_relink() -> None:
    """A state sync that fails has the links of its receiver tried; what the flush for that tells of went through
    them."""
    rig = Rig(0, 0, 0)
    for _ in range(RELINKS_MAX):
        break_link(rig, 1, 2)
    for peer in (1, 2, 3):
        rig.hear(peer, m.GroupCall(1, Kind.SYNC, m.SyncOffer("enforce_popular", 0, b"b" if peer == 2 else b"a", [])))
    (plan,) = [message for message in rig.told(2) if isinstance(message, m.SyncPlan)]
    view = rig.master.state.view
    rig.hear(2, m.SyncReport(plan.sync, False, "no donor is left", [(1, "no answer")]))
    for peer in (1, 2, 3):
        rig.hear(peer, m.FlushReply(flush_of(rig), [], [OpRef(TAG, 0)]))
    rig.answer()
    assert rig.master.state.made_in[1, 2] > view, "the doubted link is not tried"
    for _ in range(RELINKS_MAX):
        break_link(rig, 1, 2)
        assert rig.master.state.accepted == [1, 2, 3]
    break_link(rig, 1, 2)
    assert len(rig.master.state.accepted) == 2


def test_old_epoch_commits_do_not_reset_relinks() -> None:
    """The view that they are made for never comes into force, and nothing goes through them."""
    rig = Rig(0, 0, 0)
    break_link(rig, 1, 2, committed_by=2)
    rig.hear(1, m.LinkLost(rig.master.state.view, 2, "reset"))
    for peer in (1, 2, 3):
        rig.hear(peer, m.FlushReply(flush_of(rig), [], [OpRef(TAG, 0)]))
    for _ in range(RELINKS_MAX):
        rig.hear(2, m.LinkLost(rig.master.state.view, 1, "reset"))
    rig.answer()
    assert len(rig.master.state.accepted) == 2


def test_no_deadline_while_waiting_for_absent_peer() -> None:
    """Two say that they cannot be linked, and one of them loses its control connection before more is known."""
    rig = Rig(0, 0, 0, 0)
    rig.hear(1, m.LinkLost(rig.master.state.view, 2, "reset"))
    for peer in rig.master.state.accepted:
        flushes = [message for message in rig.told(peer) if isinstance(message, m.Flush)]
        for flush in flushes:
            effects = rig.effects
            rig.hear(peer, m.FlushReply(flush.flush, []))
            rig.effects = effects + rig.effects
    rig.hear(2, m.LinkFailed(rig.master.state.view, 1, "no answer"))
    assert rig.master.links.evidence_due_at is not None
    rig.effects = rig.master.detached(2, "reset", rig.now)
    assert rig.master.links.evidence_due_at is None
    until = rig.now + rig.master.state.options.peer_timeout_s
    while (due := rig.master.deadline()) is not None and due < until:
        assert due > rig.now
        rig.tick(due)
    assert 2 in rig.master.state.accepted
    rig.tick(until)
    assert 2 not in rig.master.state.accepted


def test_no_deadline_while_other_group_flushes() -> None:
    """Two say that they cannot be linked, and somebody of another group dies before more is known. The rest of that
    group is slow to stop its ops, and the time passes at which one of the two would have been evicted."""
    rig = Rig(0, 0, 0, 0, 1, 1)
    rig.hear(1, m.LinkLost(rig.master.state.view, 2, "reset"))
    for peer in rig.master.state.accepted:
        for flush in [message for message in rig.told(peer) if isinstance(message, m.Flush)]:
            effects = rig.effects
            rig.hear(peer, m.FlushReply(flush.flush, []))
            rig.effects = effects + rig.effects
    rig.hear(2, m.LinkFailed(rig.master.state.view, 1, "no answer"))
    due_at = rig.master.links.evidence_due_at
    assert due_at is not None
    rig.lose(6)
    assert any(isinstance(message, m.Flush) for message in rig.told(5))
    rig.tick(due_at + 0.5)
    assert rig.peers == [1, 2, 3, 4, 5]
    due = rig.master.deadline()
    assert due is None or due > rig.now


def test_links_of_leaving_peer_are_not_logged() -> None:
    """The others notice that it closes its links before the master reads its goodbye."""
    rig = Rig(0, 0, 0)
    rig.hear(2, m.LinkLost(rig.master.state.view, 1, "closed by the other side"))
    asked = rig.effects
    rig.hear(1, m.Leave(""))
    rig.effects = asked + rig.effects
    rig.answer()
    assert rig.master.state.groups[0].ring == [2, 3]
    assert not rig.master.state.is_changing
    assert not [text for text in rig.logged if "lost its link" in text]


def test_lost_links_are_logged() -> None:
    rig = Rig(0, 0, 0)
    rig.hear(2, m.LinkLost(rig.master.state.view, 1, "reset"))
    rig.answer()
    assert "peer 2 (n2) lost its link to peer 1 (n1): reset" in rig.logged


def test_broken_link_made_on_demand_begins_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers 1 and 3 are not neighbors in a ring that counts as large."""
    monkeypatch.setattr(topology, "MESH_PEERS_MAX", 3)
    rig = Rig(0, 0, 0, 0)
    for _ in range(2 * RELINKS_MAX):
        view = rig.master.state.view
        rig.hear(1, m.LinkLost(view, 3, "reset"))
        effects = rig.effects
        assert any(isinstance(message, m.Flush) for message in rig.told(2))
        rig.hear(3, m.LinkLost(view, 1, "reset"))
        rig.effects = effects + rig.effects
        rig.answer()
        assert rig.master.state.installed_view == view + 1
    assert rig.master.state.accepted == [1, 2, 3, 4]
