"""The master's machine as a whole: when it wants the time, what it logs, and that it forgets."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.master.run_state import Close, MasterOptions
from pccl.protocol.messages import Kind, OpRef
from tests.protocol.master.rig import HELLO, TAG, Rig, flush_of


def test_deadline_only_while_waiting() -> None:
    options = MasterOptions(hello_timeout_s=3.0, answer_timeout_s=30.0)
    rig = Rig(options=options)
    assert rig.master.deadline() is None
    rig.master.connected(9, "10.0.0.9", 1.0)
    assert rig.master.deadline() == 4.0
    rig.lose(9)
    assert rig.master.deadline() is None
    rig.hello()
    rig.hello()
    assert rig.master.deadline() is None
    rig.now = 5.0
    rig.hear(1, m.GroupCall(1, Kind.UPDATE_TOPOLOGY))
    rig.hear(1, m.LinksReady(2))
    assert rig.master.deadline() == 35.0
    rig.tick(34.9)
    assert rig.effects == []
    rig.tick(35.0)
    assert rig.master.state.accepted == [1]
    assert "did not answer the master within 30 s" in str(rig.told(2))


def test_answer_timeouts_are_per_request() -> None:
    rig = Rig(0, 0, 0, options=MasterOptions(answer_timeout_s=30.0))
    rig.lose(3)
    rig.now = 29.0
    for peer in (1, 2):
        rig.hear(peer, m.FlushReply(flush_of(rig), []))
    assert rig.master.deadline() == 59.0


def test_arrivals_losses_and_views_are_logged() -> None:
    rig = Rig()
    rig.hello()
    assert rig.logged == ["peer 1 (n1) from 10.0.0.1 wants to join group 0", "view 1 installed; group 0: [1]"]
    rig.hello()
    rig.lose(2)
    assert rig.logged == ["peer 2 (n2) gone before it was accepted: reset"]
    rig.lose(1)
    assert rig.logged[0] == "peer 1 (n1) lost: reset"


def test_lost_peers_leave_no_state() -> None:
    rig = Rig(0, 0, 1, 1, 0)
    rig.hear(1, m.LinkLost(2, 2, "reset"))
    rig.answer()
    for peer in (1, 2, 5):
        rig.hear(peer, m.OpsDone(rig.master.state.groups[0].epoch, [OpRef(TAG, 0)]))
    rig.hear(1, m.GroupCall(2, Kind.SYNC, m.SyncOffer("enforce_popular", 0, b"", [])))
    for peer in (1, 2, 3, 4, 5):
        rig.lose(peer)
        rig.answer()
    parts = [part for name, part in vars(rig.master).items() if name != "_handlers"]
    left = {
        f"{type(part).__name__}.{name}": value
        for part in [*parts, rig.master.state.change]
        for name, value in vars(part).items()
        if isinstance(value, dict | set | list) and value
    }
    assert left == {}
    rig.hello()
    assert rig.master.state.accepted == [6]


def test_messages_of_evicted_peer_are_ignored() -> None:
    rig = Rig(0, 0)
    rig.hear(2, HELLO)
    assert Close(2) in rig.effects
    rig.answer()
    for words in (m.Leave(), m.OpsDone(2, []), m.GroupCall(9, Kind.ARE_PEERS_PENDING)):
        rig.hear(2, words)
        assert rig.effects == []
    rig.lose(2)
    assert rig.effects == []
