"""A peer between two masters: what it reports to the next one, whom it follows, and whom it believes."""

from __future__ import annotations

import pytest

from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError
from pccl.protocol.messages import OpRef
from pccl.protocol.peer import effects as ps
from pccl.protocol.peer.machine import Peer
from pccl.types import Result
from tests.protocol.peer.rig import ME, TAG, Rig, completed, meshed, prepare, said


def test_report_has_aborts_of_flush() -> None:
    """Another peer might not hear of it before the master dies."""
    rig = meshed(outlives_masters=True)
    rig.launch(1, TAG)
    rig.hear(m.Flush(1, 1))
    rig.machine.frozen(1)
    aborted = m.Aborted(TAG, 0, Result.INVALID_USAGE, "never launched")
    rig.hear(prepare([1, 2, 3], 2, aborts=[aborted]))
    rig.machine.master_lost("gone")
    *_, follow = said(rig.hear(m.VoteRequest(2)))
    assert isinstance(follow, m.Vote)
    assert follow.report.has_decided
    assert follow.report.aborts == [aborted]


def test_report_has_answered_views() -> None:
    """Such a view may be in force elsewhere, until a newer one is here. The same master would have said so."""

    def report(term: int, *in_force: int) -> m.RecoveryReport:
        rig.machine.master_lost("gone")
        *_, follow = said(rig.hear(m.VoteRequest(term)))
        assert isinstance(follow, m.Vote)
        rig.hear(m.Resumed(term, 5.0, list(in_force)))
        return follow.report

    rig = Rig()
    rig.machine.outlives_masters = True
    rig.join([1, 2, 3])
    rig.hear(prepare([1, 2], 2), prepare([2], 3))
    assert report(2, 1, 3).answered == []
    rig.hear(prepare([2, 3], 10))
    third = report(3, 1, 3)
    assert third.prepared is not None
    assert (third.prepared.view, third.prepared.answered) == (10, False)
    assert [(each.view, each.answered) for each in third.answered] == [(3, True)]
    assert said(rig.connect(3)) == [], "another view follows"
    rig.hear(prepare([2], 20))
    assert [each.view for each in report(4, 1, 20).answered] == [3]
    rig.hear(prepare([2], 30))
    assert [each.view for each in report(5, 1, 20, 30).answered] == [20], "3 was ruled out"
    rig.hear(prepare([2], 40), m.Install(40))
    assert report(6, 40).answered == []


def test_excluded_view_is_not_reported() -> None:
    """It would need a majority of its own under the next master, though it is in force nowhere."""
    rig = Rig()
    rig.machine.outlives_masters = True
    rig.join([1, 2, 3])
    rig.hear(prepare([2], 3))
    rig.machine.master_lost("gone")
    rig.hear(m.VoteRequest(2), m.Resumed(2, 5.0, [1]))
    rig.machine.master_lost("gone, too")
    *_, summary = said(rig.hear(m.PreVoteRequest()))
    assert isinstance(summary, m.PreVote)
    assert summary.prepared is not None
    assert not summary.prepared.answered


def test_kept_ring_decides_no_ops() -> None:
    """They run on, and the next master has to flush them if its view changes the ring."""
    rig = Rig()
    rig.machine.outlives_masters = True
    rig.join([1, 2, 3])
    rig.hear(m.Prepare(2, [], [m.Ring(0, 1, [1, 2, 3])], [], [], [], []))
    rig.machine.master_lost("gone")
    *_, summary = said(rig.hear(m.PreVoteRequest()))
    assert isinstance(summary, m.PreVote)
    assert (summary.prepared is not None, summary.has_decided) == (True, False)


def test_pre_vote_promises_nothing() -> None:
    rig = Rig()
    rig.machine.outlives_masters = True
    rig.join([1, 2, 3])
    with pytest.raises(ProtocolError, match="PreVoteRequest from a master that leads"):
        rig.hear(m.PreVoteRequest())
    rig.machine.master_lost("gone")
    rig.effects()
    term = rig.machine.term
    installed = m.InstalledView(1, prepare([1, 2, 3], 1).rings, False)
    assert said(rig.hear(m.PreVoteRequest())) == [m.PreVote(installed, None, False)]
    assert rig.machine.term == term
    rig.hear(m.VoteRequest(term + 1))
    assert rig.machine.term == term + 1


@pytest.mark.parametrize("before", [0, 1])
def test_one_vote_per_term(before: int) -> None:
    rig = Rig()
    rig.machine.outlives_masters = True
    rig.join([1, 2, 3])
    rig.machine.master_lost("gone")
    rig.effects()
    with pytest.raises(ProtocolError, match="it asks to lead in term"):
        rig.hear(m.VoteRequest(rig.machine.term - before))


def test_goodbye_needs_secret() -> None:
    rig = Rig(secret=b"of the run")
    rig.machine.outlives_masters = True
    rig.join([1, 2, 3])
    rig.machine.master_lost("gone")
    rig.effects()
    for secret in (b"", b"another"):
        (seek,) = rig.hear(m.Goodbye(Result.MASTER_CONNECTION_FAILED, "your run is over", secret))
        assert seek == ps.SeekMaster("refused by a process that does not know the run: your run is over")
    (follow,) = said(rig.hear(m.VoteRequest(rig.machine.term + 1)))
    assert isinstance(follow, m.Vote)
    assert follow.report.secret == b"of the run"
    rig.hear(m.Goodbye(Result.MASTER_CONNECTION_FAILED, "evicted", b"of the run"))
    assert rig.machine.is_over


def test_promises_repeat_at_next_master() -> None:
    rig = meshed(outlives_masters=True)
    for op, tag in ((1, TAG), (2, TAG + 1), (3, TAG + 2)):
        rig.launch(op, tag)
    rig.hear(
        m.AbortVoteRequest(1, TAG, 0, Result.TIMEOUT, "late"), m.AbortVoteRequest(1, 99, 0, Result.TIMEOUT, "never")
    )
    rig.machine.cancel(2, Result.INTERNAL_ERROR, "mine")
    rig.machine.op_frozen(2)
    rig.done(3)
    rig.machine.master_lost("gone")
    completed(rig, 3)
    (follow,) = said(rig.hear(m.VoteRequest(2)))
    assert isinstance(follow, m.Vote)
    assert follow.report.commits == [OpRef(TAG + 2, 0)]
    assert said(rig.hear(m.Resumed(2, 5.0))) == [
        m.OpFailed(1, TAG, 0, Result.TIMEOUT, "late", True),
        m.OpFailed(1, TAG + 1, 0, Result.INTERNAL_ERROR, "mine", False),
        m.OpFailed(1, 99, 0, Result.TIMEOUT, "never", True),
    ]


def test_report_has_link_metrics(rig: Rig) -> None:
    def reported() -> list[tuple[m.LinkMetric, int]]:
        term = rig.machine.term + 1
        rig.machine.master_lost("gone")
        rig.machine.resume(1, now=100.0)
        *_, follow = said(rig.hear(m.VoteRequest(term)))
        assert isinstance(follow, m.Vote)
        rig.hear(m.Resumed(term, 5.0))
        return follow.report.link_metrics

    rig.machine.outlives_masters = True
    to_1, from_1, to_3 = (
        m.LinkMetric(1, False, 1e6, 250),
        m.LinkMetric(1, True, 2e6, 250),
        m.LinkMetric(3, False, 3e6, 9),
    )
    rig.hear(m.Probe(4, [(1, False), (1, True), (3, False)]))
    rig.machine.probed(4, [to_1, from_1], 40.0)
    rig.machine.probed(5, [to_3], 60.0)
    assert reported() == [(to_1, 60), (from_1, 60), (to_3, 40)]
    rig.hear(m.Probe(6, [(1, False), (1, True)]))
    rig.machine.probed(6, [to_1], 90.0)
    assert reported() == [(to_3, 40), (to_1, 10)]
    rig.join([ME, 3], view=2)
    assert reported() == [(to_3, 40)]
    rig.machine.probed(7, [m.LinkMetric(peer, True, 1e6, 9) for peer in range(10**4)], 90.0)
    assert [metric.peer for metric, _ in reported()] == list(range(10**4 - m.METRICS_KEPT_MAX, 10**4))


def test_newcomer_seeks_a_master_without_a_warning() -> None:
    """`connect` reports its search itself."""
    machine = Peer(0, 1, False)
    machine.outlives_masters = True
    machine.master_lost("it leads no run yet")
    assert machine.drain() == [ps.SeekMaster("it leads no run yet")]
