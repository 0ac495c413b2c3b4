"""Changes of view at the master's machine: flush, prepare, install."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind, OpRef
from pccl.types import Result
from tests.protocol.master.rig import TAG, Rig, flush_of


def test_losses_are_named_until_they_are_installed() -> None:
    rig = Rig(0, 0, 0)
    rig.lose(2, "reset")
    for peer in (1, 3):
        rig.hear(peer, m.FlushReply(flush_of(rig), []))
    rig.lose(3, "timed out")
    (prepare,) = [message for message in rig.told(1) if isinstance(message, m.Prepare)]
    assert prepare.lost == [(2, "reset"), (3, "timed out")]
    rig.answer()
    rig.hello()
    rig.update()
    assert all(not message.lost for message in rig.told(1) if isinstance(message, m.Prepare))


def test_install_waits_for_all_who_must_make_links() -> None:
    rig = Rig(0)
    rig.hello()
    rig.hear(1, m.GroupCall(1, Kind.UPDATE_TOPOLOGY))
    rig.hear(2, m.LinksReady(2))
    assert rig.effects == []
    rig.hear(1, m.LinksReady(2))
    assert rig.told(2) == [m.Install(2, True)]
    assert rig.told(1) == [m.Install(2, True), m.GroupCallResult(1, Result.SUCCESS)], "in this order"


def test_readiness_for_an_earlier_preparation_does_not_count() -> None:
    rig = Rig(0)
    rig.hello()
    rig.hello()
    rig.hear(1, m.GroupCall(1, Kind.UPDATE_TOPOLOGY))
    rig.lose(3)
    for peer in (1, 2):
        rig.hear(peer, m.LinksReady(2))
        assert rig.effects == []
    for peer in (1, 2):
        rig.hear(peer, m.LinksReady(3))
    assert m.Install(3, True) in rig.told(1)


def test_an_answer_counts_once_and_only_to_its_question() -> None:
    rig = Rig(0, 0, 0)
    rig.lose(3)
    flush = flush_of(rig)
    for words in (m.FlushReply(flush - 1, []), m.FlushReply(flush + 1, [])):
        rig.hear(1, words)
        rig.hear(2, words)
        assert rig.effects == []
    rig.hear(1, m.FlushReply(flush, []), m.FlushReply(flush, [OpRef(TAG, 0)]))
    rig.hear(2, m.FlushReply(flush, [OpRef(TAG, 0)]))
    (prepare,) = rig.told(1)
    assert isinstance(prepare, m.Prepare)
    assert prepare.commits == [], "the first answer stands"
    rig.hear(1, m.LinksReady(3), m.LinksReady(3, [(2, "refused")]))
    rig.hear(2, m.LinksReady(3))
    assert rig.told(1) == [m.Install(3, True)]


def test_done_in_a_ring_that_is_not_in_force_yet_does_not_count() -> None:
    rig = Rig(0, 0, 0)
    rig.lose(3)
    for peer in (1, 2):
        rig.hear(peer, m.FlushReply(flush_of(rig), []))
    for peer in (1, 2):
        rig.hear(peer, m.OpsDone(3, [OpRef(TAG, 0)]))
        assert rig.effects == []


def test_report_of_one_who_fetches_nothing_does_not_count() -> None:
    rig = Rig(0, 0)
    for peer, root in ((1, b"a"), (2, b"b")):
        rig.hear(peer, m.GroupCall(1, Kind.SYNC, m.SyncOffer("enforce_popular", 0, root, [])))
    (plan,) = rig.told(1)
    assert isinstance(plan, m.SyncPlan)
    assert not plan.fetch_content
    rig.hear(1, m.SyncReport(plan.sync, False, "out of malice"))
    assert rig.effects == []
    rig.hear(2, m.SyncReport(plan.sync, True))
    assert rig.told(1) == [m.GroupCallResult(1, Result.SUCCESS)]


def test_update_topology_during_a_change_returns_in_the_new_view() -> None:
    rig = Rig(0, 0, 0)
    rig.lose(3)
    for peer in (1, 2):
        rig.hear(peer, m.GroupCall(1, Kind.UPDATE_TOPOLOGY))
        assert rig.effects == []
    for peer in (1, 2):
        rig.hear(peer, m.FlushReply(flush_of(rig), []))
    rig.answer()
    told = rig.told(1)
    assert told.index(m.Install(3, True)) < told.index(m.GroupCallResult(1, Result.SUCCESS))
