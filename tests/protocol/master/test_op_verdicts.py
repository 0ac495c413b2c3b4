"""The master's verdicts on ops: one each, in order, and none against what a peer has committed by itself."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.messages import OpRef
from pccl.types import Result
from tests.protocol.master.rig import TAG, Rig, flush_of


def test_commit_precedes_consequences() -> None:
    """A peer says done and dies: the verdict must reach the others before the flush."""
    rig = Rig(0, 0)
    rig.hear(1, m.OpsDone(2, [OpRef(TAG, 0)]))
    assert rig.effects == []
    rig.hear(2, m.OpsDone(2, [OpRef(TAG, 0)]), m.Leave())
    assert [type(message) for message in rig.told(1)] == [m.OpsCommit, m.Flush]


def test_done_during_flush_commits() -> None:
    rig = Rig(0, 0, 0)
    for peer in (1, 2):
        rig.hear(peer, m.OpsDone(2, [OpRef(TAG, 0)]))
    rig.lose(1)
    rig.hear(3, m.OpsDone(2, [OpRef(TAG, 0)]))
    assert rig.told(3) == [], "the ring is being flushed"
    rig.hear(2, m.FlushReply(flush_of(rig), []))
    rig.hear(3, m.FlushReply(flush_of(rig), []))
    (prepare,) = rig.told(2)
    assert isinstance(prepare, m.Prepare)
    assert prepare.commits == [OpRef(TAG, 0)]


def test_one_verdict_per_op() -> None:
    rig = Rig(0, 0)
    failed = m.OpFailed(2, TAG, 0, Result.TIMEOUT, "late")
    rig.hear(1, failed)
    assert rig.told(1) == rig.told(2) == [m.OpAbort(2, TAG, 0, Result.TIMEOUT, "late")]
    rig.hear(2, failed, m.OpsDone(2, [OpRef(TAG, 0)]))
    rig.hear(1, m.OpsDone(2, [OpRef(TAG, 0)]))
    assert rig.effects == []


def test_flush_verdicts_repeat_in_prepare() -> None:
    """A peer that has not heard of the first preparation has heard no verdict."""
    rig = Rig(0, 0, 0, 0)
    for peer in (1, 2, 3):
        rig.hear(peer, m.OpsDone(2, [OpRef(TAG, 0)]))
    rig.lose(4)
    rig.answer()
    rig = Rig(0, 0, 0, 0)
    for peer in (1, 2, 3):
        rig.hear(peer, m.OpsDone(2, [OpRef(TAG, 0)]))
    rig.lose(4)
    for peer in (1, 2, 3):
        rig.hear(peer, m.FlushReply(flush_of(rig), []))
    rig.lose(3)
    (again,) = rig.told(1)
    assert isinstance(again, m.Prepare)
    assert again.commits == [OpRef(TAG, 0)]
    rig.answer()
    rig.lose(2)
    rig.answer()
    prepares = [message for message in rig.told(1) if isinstance(message, m.Prepare)]
    assert [message.commits for message in prepares] == [[]], "but not after they were installed"


def give_up(rig: Rig, peer: int, may_be_done: bool = True) -> None:
    rig.hear(peer, m.OpFailed(2, TAG, 0, Result.TIMEOUT, "late", may_be_done))


def test_abort_vote_asks_all() -> None:
    rig = Rig(0, 0, 0)
    give_up(rig, 1)
    assert rig.told(1) == []
    assert rig.told(2) == rig.told(3) == [m.AbortVoteRequest(2, TAG, 0, Result.TIMEOUT, "late")]
    rig.hear(2, m.AbortVote(2, TAG, 0, False))
    assert rig.effects == []
    rig.hear(3, m.AbortVote(2, TAG, 0, False))
    assert rig.told(1) == rig.told(2) == rig.told(3) == [m.OpAbort(2, TAG, 0, Result.TIMEOUT, "late")]


def test_commit_vote_commits() -> None:
    rig = Rig(0, 0, 0)
    give_up(rig, 1)
    rig.hear(2, m.AbortVote(2, TAG, 0, False))
    rig.hear(3, m.AbortVote(2, TAG, 0, True))
    assert rig.told(1) == rig.told(2) == rig.told(3) == [m.OpsCommit(2, [OpRef(TAG, 0)])]
    give_up(rig, 2)
    assert rig.effects == []


def test_second_give_up_is_a_vote() -> None:
    rig = Rig(0, 0)
    give_up(rig, 1)
    give_up(rig, 2)
    assert rig.told(1) == [m.OpAbort(2, TAG, 0, Result.TIMEOUT, "late")]


def test_impossible_op_aborts_at_once() -> None:
    rig = Rig(0, 0, 0)
    give_up(rig, 1)
    give_up(rig, 2, may_be_done=False)
    assert rig.told(3) == [m.OpAbort(2, TAG, 0, Result.TIMEOUT, "late")]
    rig.hear(3, m.AbortVote(2, TAG, 0, False))
    assert rig.effects == []


def test_vote_timeout_evicts() -> None:
    rig = Rig(0, 0, 0)
    give_up(rig, 1)
    rig.hear(2, m.AbortVote(2, TAG, 0, False))
    rig.now += rig.master.state.options.answer_timeout_s
    rig.effects = rig.master.tick(rig.now)
    (goodbye,) = rig.told(3)
    assert isinstance(goodbye, m.Goodbye)
    rig.hear(1, m.FlushReply(flush_of(rig), [OpRef(TAG, 0)]))
    rig.hear(2, m.FlushReply(flush_of(rig), []))
    (prepare,) = rig.told(2)
    assert isinstance(prepare, m.Prepare)
    assert (prepare.commits, prepare.aborts) == ([], [m.Aborted(TAG, 0, Result.TIMEOUT, "late")])


def test_survivor_commit_beats_open_vote() -> None:
    rig = Rig(0, 0, 0)
    give_up(rig, 1)
    rig.lose(3)
    rig.hear(1, m.FlushReply(flush_of(rig), [OpRef(TAG, 0)]))
    rig.hear(2, m.FlushReply(flush_of(rig), [], [OpRef(TAG, 0)]))
    (prepare,) = rig.told(1)
    assert isinstance(prepare, m.Prepare)
    assert (prepare.commits, prepare.aborts) == ([OpRef(TAG, 0)], [])


def test_done_by_all_beats_open_vote() -> None:
    """It is over for everybody, and nobody has to be told; who leads next would hear both verdicts."""
    rig = Rig(0, 0, 0)
    give_up(rig, 1)
    rig.lose(3)
    for peer in (1, 2):
        rig.hear(peer, m.FlushReply(flush_of(rig), [], [OpRef(TAG, 0)]))
    (prepare,) = rig.told(1)
    assert isinstance(prepare, m.Prepare)
    assert (prepare.commits, prepare.aborts) == ([], [])


def test_vote_ends_with_epoch() -> None:
    """All wait in update_topology, so the op is over for them; one of the next epoch has the same tag and count."""
    rig = Rig(0, 0)
    give_up(rig, 1)
    rig.hello()
    rig.update()
    assert rig.peers == [1, 2, 3]
    rig.hear(1, m.OpFailed(rig.master.state.view, TAG, 0, Result.TIMEOUT, "late again", may_be_done=True))
    assert [type(message) for message in rig.told(2)] == [m.AbortVoteRequest]
    rig.lose(3)
    rig.answer()
    prepares = [message for message in rig.told(1) if isinstance(message, m.Prepare)]
    assert [op.reason for op in prepares[0].aborts] == ["late again"]


def test_survivor_commit_is_sent_to_others() -> None:
    """Nothing else of the many ops that it has committed is told."""
    rig = Rig(0, 0, 0)
    rig.lose(3)
    rig.hear(1, m.FlushReply(flush_of(rig), [], [OpRef(TAG, 4), OpRef(TAG + 1, 0)]))
    rig.hear(2, m.FlushReply(flush_of(rig), [OpRef(TAG, 4), OpRef(TAG + 2, 0)]))
    (prepare,) = rig.told(2)
    assert isinstance(prepare, m.Prepare)
    assert prepare.commits == [OpRef(TAG, 4)]


def test_survivor_abort_stands() -> None:
    rig = Rig(0, 0, 0)
    for peer in (1, 2):
        rig.hear(peer, m.OpsDone(2, [OpRef(TAG, 0)]))
    rig.lose(3)
    rig.hear(1, m.FlushReply(flush_of(rig), [], [], [m.Aborted(TAG, 0, Result.TIMEOUT, "late")]))
    rig.hear(2, m.FlushReply(flush_of(rig), [OpRef(TAG, 0)]))
    (prepare,) = rig.told(2)
    assert isinstance(prepare, m.Prepare)
    assert (prepare.commits, [op.reason for op in prepare.aborts]) == ([], ["late"])


def test_tags_used_starts_epoch() -> None:
    rig = Rig(0, 0)
    rig.hear(1, m.TagsUsed(2, 40_000))
    assert [type(message) for message in rig.told(2)] == [m.Flush]
    asked = rig.effects
    rig.hear(2, m.TagsUsed(2, 40_000))
    assert rig.effects == []
    rig.effects = asked
    rig.answer()
    assert rig.told(1)[-1] == m.Install(3, True)
