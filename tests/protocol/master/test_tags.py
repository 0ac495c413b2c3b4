"""Groups that have used many tags begin a new epoch."""

from __future__ import annotations

import pytest

from pccl.protocol import completion
from pccl.protocol import messages as m
from pccl.protocol.master.effects import Effect
from pccl.protocol.messages import Kind, OpRef
from pccl.types import Result
from tests.protocol.master.rig import Rig, measure


def reduce(rig: Rig, tag: int, epoch: int, sequence: int = 0) -> None:
    effects: list[Effect] = []
    for peer in (1, 2):
        rig.hear(peer, m.OpsDone(epoch, [OpRef(tag, sequence)]))
        effects += rig.effects
    rig.effects = effects


def test_a_group_that_has_used_many_tags_begins_a_new_epoch_when_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "TAGS_MAX", 20)
    rig = Rig(0, 0)
    for tag in range(10):
        reduce(rig, tag, 2)
        reduce(rig, tag, 2, sequence=1)  # no further tag
        assert [type(message) for message in rig.told(1)] == [m.OpsCommit]
    rig.hear(1, m.OpsDone(2, [OpRef(99, 0)]))
    reduce(rig, 10, 2)
    assert [type(message) for message in rig.told(1)] == [m.OpsCommit], "an op is in flight"
    rig.hear(2, m.OpsDone(2, [OpRef(99, 0)]))
    assert [type(message) for message in rig.told(1)] == [m.OpsCommit, m.Flush]
    rig.answer()
    prepare, install = rig.told(2)[-2:]
    assert isinstance(prepare, m.Prepare)
    assert (prepare.rings, prepare.lost, prepare.commits) == ([m.Ring(0, 3, [1, 2])], [], [])
    assert install == m.Install(3, True)
    reduce(rig, 10, 3)
    assert rig.told(1) == [m.OpsCommit(3, [OpRef(10, 0)])]


def test_a_group_that_is_never_quiet_begins_a_new_epoch_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion, "TAGS_MAX", 20)
    rig = Rig(0, 0)
    rig.hear(1, m.OpsDone(2, [OpRef(99, 0)]))
    for tag in range(20):
        rig.hear(1, m.OpFailed(2, tag, 0, Result.TIMEOUT, "late"))
        assert [type(message) for message in rig.told(1)] == [m.OpAbort]
    rig.hear(1, m.OpFailed(2, 20, 0, Result.TIMEOUT, "late"))
    assert [type(message) for message in rig.told(1)] == [m.OpAbort, m.Flush]


@pytest.mark.parametrize("kind", [Kind.UPDATE_TOPOLOGY, Kind.OPTIMIZE_TOPOLOGY, Kind.SYNC])
def test_a_group_call_that_excludes_ops_is_a_quiet_moment(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    rig = Rig(0, 0)
    for tag in range(11):
        reduce(rig, tag, 2)
    monkeypatch.setattr(completion, "TAGS_MAX", 20)
    offer = m.SyncOffer("enforce_popular", 0, b"root", []) if kind == Kind.SYNC else None
    for peer in (1, 2):
        rig.hear(peer, m.GroupCall(5, kind, offer))
    if kind == Kind.OPTIMIZE_TOPOLOGY:
        (search,) = measure(rig, lambda sender, receiver: 1e6)
        rig.effects = rig.master.rings_found(search.search, {0: [1, 2]}, rig.now)
    assert [type(message) for message in rig.told(1)][-2:] == [m.Flush, m.GroupCallResult]
    rig.answer()
    assert rig.told(1)[-1] == m.Install(3, True)
