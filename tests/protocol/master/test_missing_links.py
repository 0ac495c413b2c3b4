"""Pairs of a group that go without a link, at the master's machine: they are tried again, and nobody waits for it."""

from __future__ import annotations

import pytest

from pccl.protocol import messages as m
from pccl.protocol.master.link_failures import RELINKS_MAX
from pccl.protocol.master.views import RETRY_S, RETRY_S_MAX
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.protocol.master.rig import Rig


def rig_without_a_link() -> Rig:
    """Four peers, of which 2 and 4 are no neighbours and have no link."""
    rig = Rig(0, 0, 0)
    rig.hello()
    for peer in (1, 2, 3):
        rig.hear(peer, m.GroupCall(1, Kind.UPDATE_TOPOLOGY))
    ready(rig, missing=True)
    assert not rig.master.state.groups[0].is_meshed
    return rig


def ready(rig: Rig, missing: bool) -> None:
    """All say that they have made their links, but for 2 and 4 perhaps."""
    view, effects = rig.master.state.view, []
    for peer in (1, 2, 3, 4):
        other = {2: 4, 4: 2}.get(peer)
        rig.hear(peer, m.LinksReady(view, [], [(other, "refused")] if missing and other else []))
        effects += rig.effects
    rig.effects = effects


def tried(rig: Rig) -> list[int]:
    """Return the peers that peer 4 is asked to connect to, when the next try is due."""
    due = rig.master.deadline()
    assert due is not None
    assert due > rig.now
    rig.tick(due)
    return [member.peer for trial in rig.told(4) if isinstance(trial, m.Trial) for member in trial.members]


def meet(rig: Rig, kind: str = Kind.UPDATE_TOPOLOGY) -> list[m.FromMaster]:
    """All make a group call. Return what peer 1 is told in the end."""
    offer = m.SyncOffer("enforce_popular", 0, b"", []) if kind == Kind.SYNC else None
    for peer in (1, 2, 3, 4):
        rig.hear(peer, m.GroupCall(2, kind, offer))
    effects = rig.effects
    for peer in (1, 2, 3, 4):
        for flush in [message for message in told_in(effects, peer) if isinstance(message, m.Flush)]:
            rig.hear(peer, m.FlushReply(flush.flush, []))
    if rig.master.state.is_changing:
        before = effects + rig.effects
        ready(rig, missing=False)
        rig.effects = before + rig.effects
    else:
        rig.effects = effects
    return rig.told(1)


def told_in(effects: list[object], peer: int) -> list[object]:
    return [each.message for each in effects if getattr(each, "connection", None) == peer and hasattr(each, "message")]


@pytest.mark.parametrize("kind", [Kind.UPDATE_TOPOLOGY, Kind.SYNC])
def test_group_becomes_mesh_after_trial_and_group_call(kind: str) -> None:
    rig = rig_without_a_link()
    assert tried(rig) == [2]
    assert rig.now == RETRY_S
    rig.hear(4, m.Tried([]))
    assert not rig.master.state.is_changing, "it waits for a call without ops in flight"
    told = meet(rig, kind)
    assert m.GroupCallResult(2, Result.SUCCESS) in told
    assert any(isinstance(message, m.Install) and message.is_meshed for message in told)
    assert rig.master.state.groups[0].is_meshed
    assert rig.master.state.groups[0].ring == [1, 2, 3, 4]
    assert rig.master.deadline() is None


def test_failed_trial_is_repeated() -> None:
    rig = rig_without_a_link()
    delays = []
    for _ in range(9):
        before = rig.now
        assert tried(rig) == [2]
        delays.append(rig.now - before)
        rig.hear(4, m.Tried([(2, "refused")]))
        assert rig.effects == []
    assert delays == [min(RETRY_S * 2**at, RETRY_S_MAX) for at in range(9)]
    view = rig.master.state.view
    meet(rig)
    assert rig.master.state.view == view


def test_trial_delays_no_group_call() -> None:
    rig = rig_without_a_link()
    assert tried(rig) == [2]
    view = rig.master.state.view
    assert m.GroupCallResult(2, Result.SUCCESS) in meet(rig)
    assert rig.master.state.view == view
    for _ in range(9):
        assert tried(rig) == [], "it has not answered"
    assert rig.master.state.accepted == [1, 2, 3, 4]


def test_last_trial_counts() -> None:
    rig = rig_without_a_link()
    for failed in ([], [(2, "refused")]):
        assert tried(rig) == [2]
        rig.hear(4, m.Tried(failed))
    view = rig.master.state.view
    meet(rig)
    assert rig.master.state.view == view


def test_trial_delay_doubles() -> None:
    rig = rig_without_a_link()
    for at in range(4):
        before = rig.now
        assert tried(rig) == [2]
        assert rig.now - before == RETRY_S * 2**at
        rig.hear(4, m.Tried([]))
        for peer in (1, 2, 3, 4):
            rig.hear(peer, m.GroupCall(2 + at, Kind.UPDATE_TOPOLOGY))
        for peer in (1, 2, 3, 4):
            rig.hear(peer, m.FlushReply(rig.master.state.groups[0].flush, []))
        ready(rig, missing=True)
        assert not rig.master.state.groups[0].is_meshed
        for peer in (1, 2, 3, 4):
            rig.hear(peer, m.GroupCall(9 + at, Kind.UPDATE_TOPOLOGY))
        assert not rig.master.state.is_changing, "the next answer has to come first"


def test_lost_peer_is_not_tried() -> None:
    rig = rig_without_a_link()
    rig.hear(2, m.Leave(""))
    rig.answer()
    assert rig.master.state.groups[0].is_meshed
    assert rig.master.deadline() is None


def test_unreliable_links_are_not_tried() -> None:
    rig = Rig(0, 0, 0, 0)
    for _ in range(RELINKS_MAX + 1):
        rig.hear(4, m.LinkLost(rig.master.state.view, 2, "reset"))
        rig.answer()
    assert not rig.master.state.groups[0].is_meshed
    assert rig.master.deadline() is None


def test_unasked_trial_answer_is_ignored() -> None:
    rig = rig_without_a_link()
    rig.hear(4, m.Tried([]))
    view = rig.master.state.view
    meet(rig)
    assert rig.master.state.view == view
