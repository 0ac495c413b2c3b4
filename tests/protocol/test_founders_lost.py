"""Founders that lose their master before any view is in force: they found their run all the same, and soon."""

from __future__ import annotations

import pytest

from pccl.protocol import messages as m
from pccl.protocol.failover.machine import Failover
from pccl.protocol.master.run_state import Effect, MasterOptions, Send
from pccl.runtime.network.addresses import FIRST_SHARE, OTHER_SHARE
from tests.protocol.test_recovery_report import prepared, view

TIMEOUT_S = 5.0
MASTERS = 2
HEARTBEATS = 100
AGAIN = 200
KNOWS_NOTHING = m.PreVote(None, None, False)


class _Master:
    """A machine that says what it tells each connection."""

    def __init__(self, founders: int = 1, is_standby: bool = False) -> None:
        options = MasterOptions(peer_timeout_s=TIMEOUT_S, founders=founders)
        self.machine = Failover("run", options, is_standby=is_standby)
        self.now = 0.0

    def say(self, connection: int, message: m.FromPeer) -> list[type]:
        """Return what this connection is told."""
        effects: list[Effect] = []
        if isinstance(message, m.Hello | m.Resume | m.HeartbeatHello):
            effects += self.machine.connected(connection, "10.0.0.1", self.now)
        effects += self.machine.received(connection, message, self.now)
        return self._told(effects, connection)

    def hello(self, connection: int, may_found: bool = True) -> list[type]:
        hello = m.Hello(m.PROTOCOL_VERSION, "test", 0, [], 1000, 2, masters=MASTERS, may_found=may_found)
        return self.say(connection, hello)

    def heartbeat(self, peer: int) -> None:
        self.say(HEARTBEATS + peer, m.HeartbeatHello(m.PROTOCOL_VERSION, "run", peer))

    def resume(self, connection: int, peer: int, run: str = "old", is_accepted: bool = False) -> list[type]:
        resume = m.Resume(m.PROTOCOL_VERSION, run, 1, peer, masters=MASTERS, is_accepted=is_accepted)
        return self.say(connection, resume)

    def hang_up(self, connection: int) -> None:
        self.machine.disconnected(connection, "the connection was closed by the other side", self.now)

    def wait(self, seconds: float, connection: int = 0) -> list[type]:
        self.now += seconds
        deadline = self.machine.deadline()
        effects = self.machine.tick(self.now) if deadline is not None and deadline <= self.now else []
        return self._told(effects, connection)

    @staticmethod
    def _told(effects: list[Effect], connection: int) -> list[type]:
        return [type(each.message) for each in effects if isinstance(each, Send) and each.connection == connection]


def test_standstill_keeps_waiting_founders() -> None:
    master = _Master(founders=3)
    for peer in (1, 2):
        assert master.hello(peer) == [m.Welcome]
        master.heartbeat(peer)
    master.now += 4.0
    assert master.machine.stood_still(4.0, master.now) == []
    assert master.hello(3) == [m.Welcome]
    master.heartbeat(3)
    for peer in (1, 2, 3):
        master.say(peer, m.LinksReady(1, [], []))
    assert master.machine.master.state.accepted == [1, 2, 3]


def test_waiting_founders_have_asked_all_masters() -> None:
    """Else one that could not reach the master of an earlier run would have all who come later wait with it."""
    master = _Master(founders=2)
    assert master.hello(1) == [m.Welcome]
    master.heartbeat(1)
    assert master.hello(2, may_found=False) == [m.Elsewhere]
    assert master.machine.master.state.pending == [1]
    assert master.hello(AGAIN) == [m.Welcome]
    master.heartbeat(2)
    assert master.hello(AGAIN + 1, may_found=False) == [m.Welcome]


def test_held_founders_ask_again_before_start() -> None:
    master = _Master(founders=3)
    assert master.resume(1, peer=1, is_accepted=True) == [m.PreVoteRequest]
    assert master.hello(2) == []
    assert master.hello(3, may_found=False) == []
    master.hang_up(1)
    assert master.wait(TIMEOUT_S, 3) == [m.Elsewhere]
    assert master.machine.master.state.pending == []
    assert master.hello(AGAIN, may_found=False) == [m.Elsewhere]
    assert master.hello(AGAIN + 1) == [m.Welcome]


def test_founder_starts_over_after_standstill() -> None:
    """Its place is free, so no two of the founders are the same peer."""
    master = _Master(founders=2)
    master.hello(1)
    master.heartbeat(1)
    master.now += 9.0
    master.machine.stood_still(9.0, master.now)
    assert master.resume(AGAIN, peer=1, run="run") == [m.StartOver]
    assert master.hello(AGAIN + 1) == [m.Welcome]
    assert master.machine.master.state.pending == [2]


def test_lost_only_founder_starts_over() -> None:
    master = _Master(founders=2)
    master.hello(1)
    master.hang_up(1)
    assert not master.machine.is_leading
    assert master.resume(AGAIN, peer=1, run="run") == [m.StartOver]
    assert master.hello(AGAIN + 1) == [m.Welcome]


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("share", [FIRST_SHARE, OTHER_SHARE])
def test_wandering_founders_start_over(share: float, is_prepared: bool) -> None:
    """Their master has died. At a new one they stay for less than a peer timeout each time."""
    master = _Master()
    told: list[type] = []
    for visit in range(10):
        for peer in (1, 2):
            told += master.resume(AGAIN + 10 * visit + peer, peer)
        for peer in (1, 2):
            view_known = prepared(1, 1, 2) if is_prepared else None
            told += master.say(AGAIN + 10 * visit + peer, m.PreVote(None, view_known, False))
        told += master.wait(share * TIMEOUT_S)
        if m.StartOver in told:
            break
        assert master.now < 2 * TIMEOUT_S
        for peer in (1, 2):
            master.hang_up(AGAIN + 10 * visit + peer)
        master.wait((1 - share) * TIMEOUT_S)
    assert m.StartOver in told


def test_founders_of_installed_run_are_awaited() -> None:
    master = _Master()
    master.resume(1, peer=1)
    master.say(1, KNOWS_NOTHING)
    master.wait(0.9 * TIMEOUT_S)
    master.resume(5, peer=5, is_accepted=True)
    master.say(5, m.PreVote(view(7, 5, 6, 7), None, False))
    master.hang_up(5)
    assert master.wait(0.9 * TIMEOUT_S, connection=1) == []
    assert master.wait(0.2 * TIMEOUT_S, connection=1) == [m.StartOver]
