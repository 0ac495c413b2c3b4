"""Peers that come back to a master that leads no run: who is waited for, and for how long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pccl.protocol import messages as m
from pccl.protocol.failover.gathering import GATHER_TIMEOUTS
from pccl.protocol.failover.machine import Failover
from pccl.protocol.master.run_state import Close, Effect, MasterOptions, Send
from pccl.protocol.messages import Kind

TIMEOUT_S = 5.0
CONTROL, HEARTBEATS, AGAIN, NEWCOMER = 1, 2, 3, 4


def _hello() -> m.Hello:
    return m.Hello(m.PROTOCOL_VERSION, "test", 0, [], 1000, 2, "peer", may_found=True)


def _resume(run: str, peer: int = 1, term: int = 1, masters: int = 1) -> m.Resume:
    return m.Resume(m.PROTOCOL_VERSION, run, term, peer, masters=masters)


def _told(effects: list[Effect], connection: int) -> list[m.FromMaster]:
    return [effect.message for effect in effects if isinstance(effect, Send) and effect.connection == connection]


def _say(machine: Failover, connection: int, message: m.FromPeer, now: float) -> list[m.FromMaster]:
    machine.connected(connection, "10.0.0.1", now)
    return _told(machine.received(connection, message, now), connection)


def _founded() -> Failover:
    """Return a machine whose run was founded by one peer, which is accepted."""
    machine = Failover("run", MasterOptions(peer_timeout_s=TIMEOUT_S))
    _say(machine, CONTROL, _hello(), 0.0)
    _say(machine, HEARTBEATS, m.HeartbeatHello(m.PROTOCOL_VERSION, "run", 1), 0.0)
    machine.received(CONTROL, m.LinksReady(1, [], []), 0.0)
    assert machine.master.state.accepted == [1]
    return machine


def test_evicted_peer_is_rejected_by_empty_run() -> None:
    machine = _founded()
    machine.received(CONTROL, m.GroupCall(1, "none that there is"), TIMEOUT_S)
    assert not machine.is_leading
    (answer,) = _say(machine, AGAIN, _resume("run", term=machine.master.state.term), 6.0)
    assert isinstance(answer, m.Goodbye)
    assert answer.reason.startswith("evicted: ")
    assert any(isinstance(each, m.Welcome) for each in _say(machine, NEWCOMER, _hello(), 6.0))


@pytest.mark.parametrize("masters", [1, 2])
def test_peer_of_earlier_term_is_rejected(masters: int) -> None:
    machine = _founded()
    machine.master.state.term = 2
    machine.received(CONTROL, m.GroupCall(1, "none that there is"), TIMEOUT_S)
    (answer,) = _say(machine, AGAIN, _resume("run", peer=7, term=1, masters=masters), 6.0)
    assert isinstance(answer, m.Goodbye)
    assert answer.reason == "evicted: run 'run' has ended without peer 7; connect again"


def test_lost_peer_may_return_to_empty_run() -> None:
    machine = _founded()
    machine.disconnected(CONTROL, "reset", 1.0)
    machine.tick(1.0 + TIMEOUT_S)
    (answer,) = _say(machine, AGAIN, _resume("run", term=machine.master.state.term), 2.0 + TIMEOUT_S)
    assert isinstance(answer, m.PreVoteRequest)


def test_minority_is_sent_away() -> None:
    machine = Failover("another", MasterOptions(peer_timeout_s=TIMEOUT_S))
    (answer,) = _say(machine, AGAIN, _resume("run", peer=7), 0.0)
    assert isinstance(answer, m.PreVoteRequest)
    now = 0.0
    effects: list[Effect] = []
    while Close(AGAIN) not in effects:
        deadline = machine.deadline()
        assert deadline is not None
        assert now < deadline <= GATHER_TIMEOUTS * TIMEOUT_S
        now = deadline
        effects += machine.tick(now)
    assert [type(each) for each in _told(effects, AGAIN)] == [m.Elsewhere]
    assert not any(isinstance(each, m.Welcome) for each in _say(machine, NEWCOMER, _hello(), now))  # it may be back
    assert isinstance(_say(machine, NEWCOMER + 1, _hello(), machine._bootstrap.birth_at)[0], m.Welcome)


def _run_of_four(masters: int) -> tuple[Failover, Iterator[int]]:
    """Return a machine that leads peers 1 to 4 over connections of the same numbers, and numbers of further ones."""
    machine = Failover("run", MasterOptions(peer_timeout_s=TIMEOUT_S))
    for peer in (1, 2, 3, 4):
        hello = m.Hello(m.PROTOCOL_VERSION, "test", 0, [], 1000, 2, f"n{peer}", masters=masters, may_found=True)
        _say(machine, peer, hello, 0.0)
        _say(machine, 10 + peer, m.HeartbeatHello(m.PROTOCOL_VERSION, "run", peer), 0.0)
        if peer == 1:
            _all_answer(machine)
    machine.received(1, m.GroupCall(1, Kind.UPDATE_TOPOLOGY), 0.0)
    _all_answer(machine)
    assert machine.master.state.accepted == [1, 2, 3, 4]
    return machine, iter(range(100, 200))


def _all_answer(machine: Failover) -> None:
    """All peers that are there answer what stops ops and what announces a view."""
    state = machine.master.state
    for group in state.groups.values():
        for peer in sorted(group.awaiting_flush):
            machine.received(state.members[peer].connection, m.FlushReply(group.flush, []), 1.0)
    for peer in sorted(state.change.awaiting_ready):
        machine.received(state.members[peer].connection, m.LinksReady(state.view), 1.0)


@pytest.mark.parametrize("masters", [1, 2])
def test_lost_peer_is_rejected_after_install(masters: int) -> None:
    machine, connections = _run_of_four(masters)
    resume = _resume("run", peer=4, term=machine.master.state.term, masters=masters)
    (answer,) = _say(machine, next(connections), resume, 1.0)
    assert isinstance(answer, m.Elsewhere)
    (answer,) = _say(machine, next(connections), resume, 1.0)
    assert isinstance(answer, m.Elsewhere)
    _all_answer(machine)
    assert machine.master.state.accepted == [1, 2, 3]
    (answer,) = _say(machine, next(connections), resume, 1.0)
    assert isinstance(answer, m.Goodbye)
    assert "has continued without peer 4" in answer.reason


def test_gradual_master_loss_keeps_all_peers() -> None:
    """They hear nothing of it for a while. It hears those who have not noticed yet, so it takes no outage of its own
    for the reason until a majority is lost. Half of the view would be too few to go on."""
    machine, connections = _run_of_four(masters=2)
    term = machine.master.state.term
    here: dict[int, int] = {}
    for peer in (4, 3, 2, 1, 4, 3):
        here[peer] = next(connections)
        (answer, *_) = _say(machine, here[peer], _resume("run", peer, term, masters=2), 1.0)
        assert not isinstance(answer, m.Goodbye)
    asked: list[m.FromMaster] = []
    for peer, connection in here.items():
        view = m.InstalledView(2, [m.Ring(0, 2, [1, 2, 3, 4])], is_meshed=True)
        asked = _told(machine.received(connection, m.PreVote(view, None, False, []), 1.0), connection)
        assert peer in machine.master.state.accepted or not machine.is_leading
    assert [type(message) for message in asked] == [m.VoteRequest]
