"""The master's machine as a whole: when it wants the time, what it logs, and that it forgets."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.master.effects import Close, Send
from pccl.protocol.master.machine import Master
from pccl.protocol.master.run_state import LONG_WAIT_S, MasterOptions, RunState
from pccl.protocol.messages import Kind, OpRef
from pccl.types import Result
from tests.protocol.master.rig import HELLO, TAG, Rig, flush_of


def test_the_time_is_wanted_only_where_somebody_is_waited_for() -> None:
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
    assert rig.master.deadline() == 5.0 + LONG_WAIT_S
    rig.tick(5.0 + LONG_WAIT_S)
    assert rig.master.deadline() == 35.0
    rig.tick(34.9)
    assert rig.effects == []
    rig.tick(35.0)
    assert rig.master.accepted == [1]
    assert "did not answer the master within 30 s" in str(rig.told(2))


def test_every_question_has_its_own_time() -> None:
    rig = Rig(0, 0, 0, options=MasterOptions(answer_timeout_s=30.0))
    rig.lose(3)
    rig.now = 29.0
    for peer in (1, 2):
        rig.hear(peer, m.FlushReply(flush_of(rig), []))
    assert rig.master.deadline() == 59.0


def test_long_wait_is_logged_once_with_whom_it_waits_for() -> None:
    rig = Rig(0, 0, 1)
    rig.hear(1, m.GroupCall(1, Kind.ARE_PEERS_PENDING))
    rig.tick(LONG_WAIT_S)
    assert rig.logged == ["peer 1 (n1) has waited 10 s in are_peers_pending for peer 2 (n2), peer 3 (n3)"]
    rig.tick(10 * LONG_WAIT_S)
    assert rig.logged == []
    rig.hear(2, m.GroupCall(1, Kind.SYNC, m.SyncOffer("enforce_popular", 0, b"", [])))
    rig.tick(20 * LONG_WAIT_S)
    assert rig.logged == ["peer 2 (n2) has waited 10 s in sync_shared_state for peer 1 (n1)"]


def test_stall_is_logged_with_who_is_not_done() -> None:
    rig = Rig(0, 0, 0)
    rig.hear(1, m.OpsDone(2, [OpRef(TAG, 0)]), m.OpsStalled(2, [OpRef(TAG, 0)]))
    assert rig.logged == ["peer 1 (n1) waits in the op with tag 7; not done yet: peers [2, 3]"]
    rig.hear(1, m.OpFailed(2, TAG, 0, Result.TIMEOUT, "late"))
    rig.hear(2, m.OpsStalled(2, [OpRef(TAG, 0)]))
    assert rig.effects == []


def test_arrivals_losses_and_views_are_logged() -> None:
    rig = Rig()
    rig.hello()
    assert rig.logged == ["peer 1 (n1) from 10.0.0.1 wants to join group 0", "view 1 installed; group 0: [1]"]
    rig.hello()
    rig.lose(2)
    assert rig.logged == ["peer 2 (n2) gone before it was accepted: reset"]
    rig.lose(1)
    assert rig.logged[0] == "peer 1 (n1) lost: reset"


def test_nothing_is_kept_of_those_who_are_gone() -> None:
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
    assert rig.master.accepted == [6]


def test_a_master_of_a_higher_term_says_so() -> None:
    master = Master(RunState("run", term=4))
    master.connected(1, "10.0.0.1", 0.0)
    welcome = master.received(1, HELLO, 0.0)[0]
    assert isinstance(welcome, Send)
    assert welcome.message == m.Welcome(1, "run", 4, 0)


def test_last_words_of_the_evicted_are_not_heard() -> None:
    rig = Rig(0, 0)
    rig.hear(2, HELLO)
    assert Close(2) in rig.effects
    rig.answer()
    for words in (m.Leave(), m.OpsDone(2, []), m.GroupCall(9, Kind.ARE_PEERS_PENDING)):
        rig.hear(2, words)
        assert rig.effects == []
    rig.lose(2)
    assert rig.effects == []


def test_groups_that_nobody_is_in_have_no_ring() -> None:
    assert Rig(0).master.ring(5) == []
