"""Changes of view at the master's machine: flush, prepare, install."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from pccl.types import Result
from tests.protocol.master.rig import Rig, flush_of


def test_losses_repeat_until_install() -> None:
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


def test_install_waits_for_links() -> None:
    rig = Rig(0)
    rig.hello()
    rig.hear(1, m.GroupCall(1, Kind.UPDATE_TOPOLOGY))
    rig.hear(2, m.LinksReady(2))
    assert rig.effects == []
    rig.hear(1, m.LinksReady(2))
    assert rig.told(2) == [m.Install(2, True)]
    assert rig.told(1) == [m.Install(2, True), m.GroupCallResult(1, Result.SUCCESS)], "in this order"


def test_update_topology_during_view_change() -> None:
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
