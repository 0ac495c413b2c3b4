"""A peer's ops between two epochs: what was committed or promised before they were stopped stands, and nothing new
starts."""

from __future__ import annotations

import pytest

from pccl.protocol import completion
from pccl.protocol import messages as m
from pccl.protocol.messages import OpRef
from pccl.protocol.peer import effects as ps
from pccl.types import Result
from tests.protocol.peer.rig import TAG, Rig, completed, meshed, of, prepare, said

REF = OpRef(TAG, 0)
ABORT_VOTE_REQUEST = m.AbortVoteRequest(1, TAG, 0, Result.TIMEOUT, "late")


def committed_before_it_was_done(rig: Rig) -> None:
    """The master's commit comes first, then a flush, and then the engine says that the op is done."""
    rig.launch(1)
    rig.hear(ABORT_VOTE_REQUEST)
    rig.hear(m.OpsCommit(1, [REF]))
    rig.hear(m.Flush(8, 1))


def test_flush_reply_has_commit_before_done(mesh: Rig) -> None:
    committed_before_it_was_done(mesh)
    assert mesh.done(1) == [], "its caller hears of it with the next view"
    mesh.machine.frozen(1)
    assert said(mesh.effects()) == [m.FlushReply(8, [REF], [REF])]


def test_commit_before_done_stands(mesh: Rig) -> None:
    committed_before_it_was_done(mesh)
    mesh.done(1)
    mesh.machine.frozen(1)
    assert of(ps.EndOp, mesh.hear(prepare([1, 2, 3], 2))) == [ps.EndOp(1, True)]


def test_vote_after_abort_says_not_committed(mesh: Rig) -> None:
    """A master that does not know of the abort asks once more."""
    mesh.launch(1)
    mesh.hear(m.OpAbort(1, TAG, 0, Result.TIMEOUT, "late"))
    assert said(mesh.hear(ABORT_VOTE_REQUEST)) == [m.AbortVote(1, TAG, 0, False)]


def test_no_starts_after_prepare(mesh: Rig) -> None:
    mesh.hear(prepare([1, 2, 3], 2))
    assert of(ps.SubmitOp, mesh.launch(1)) == []
    assert mesh.machine.plain_start() is None


def test_fast_path_commit_is_reported(mesh: Rig) -> None:
    mesh.machine.op_fast_completed(TAG, 0)
    mesh.machine.link_lost(mesh.links[3], "reset")
    (lost,) = said(mesh.effects())
    assert isinstance(lost, m.LinkLost)
    mesh.hear(m.Flush(8, 1))
    mesh.machine.frozen(1)
    assert said(mesh.effects()) == [m.FlushReply(8, [], [REF])]


def test_report_has_commits_of_prepared_view(rig: Rig) -> None:
    rig.machine.outlives_masters = True
    rig.launch(1)
    rig.done(1)
    rig.hear(m.Flush(8, 1))
    rig.machine.frozen(1)
    rig.hear(prepare([1, 2, 3], 2, commits=[REF]))
    rig.machine.master_lost("gone")
    *_, vote = said(rig.hear(m.VoteRequest(2)))
    assert isinstance(vote, m.Vote)
    assert vote.report.commits == [REF]


def test_master_loss_starts_waiting_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "TAGS_MAX", 2)
    rig = meshed(outlives_masters=True)
    for op in (1, 2):
        rig.launch(op, tag=op)
        rig.done(op)
        completed(rig, op)
    assert said(rig.launch(3, tag=3)) == [m.TagsUsed(1, 2)]
    rig.machine.master_lost("gone")
    assert [submitted.op for submitted in of(ps.SubmitOp, rig.effects())] == [3]


def test_send_completes_without_mesh(rig: Rig) -> None:
    assert [submitted.is_mutual for submitted in of(ps.SubmitOp, rig.launch(1))] == [False]
    assert [submitted.is_mutual for submitted in of(ps.SubmitOp, rig.launch(2, pair=(3, True)))] == [True]
