"""Newcomers at a master that leads none: one run must not become two, and nobody waits where nobody else comes."""

from __future__ import annotations

import msgspec
import pytest

from pccl.protocol import messages as m
from pccl.protocol.failover.bootstrap import BIRTH_MARGIN_S, IDLE_MARGIN_S, Start, hold_beside_s, hold_s
from pccl.protocol.failover.durable_state import RecordedView, RunRecord
from pccl.protocol.failover.machine import Failover
from pccl.protocol.master.run_state import Close, Effect, MasterLog, MasterOptions, Send
from tests.protocol.test_recovery_report import report_of, view

TIMEOUT_S = 5.0
MARGIN_S = TIMEOUT_S + BIRTH_MARGIN_S
HEARTBEATS = 100
OVER = RunRecord("old", b"", 1, RecordedView(3, frozenset()), is_over=True)


class _Master:
    """A machine, and what it tells each connection."""

    def __init__(
        self,
        start: Start = Start.AUTO,
        has_state: bool = False,
        record: RunRecord | None = None,
        is_standby: bool = False,
        founders: int = 1,
    ) -> None:
        options = MasterOptions(peer_timeout_s=TIMEOUT_S, founders=founders)
        self.machine = Failover("new", options, is_standby=is_standby, record=record, persists=has_state)
        self.now = 10.0
        self.effects: list[Effect] = []
        seconds = hold_s(start, options, record, has_state)
        self.machine.begin(self.now, seconds, hold_beside_s(start, options))

    def say(self, connection: int, message: m.FromPeer) -> list[type]:
        """Return what this connection is told."""
        if isinstance(message, m.Hello | m.Resume | m.HeartbeatHello):
            self.effects += self.machine.connected(connection, "10.0.0.1", self.now)
        self.effects += self.machine.received(connection, message, self.now)
        return self.told(connection)

    def hello(self, connection: int, masters: int = 2, may_found: bool = True) -> list[type]:
        hello = m.Hello(m.PROTOCOL_VERSION, "test", 0, [], 1000, 2, masters=masters, may_found=may_found)
        return self.say(connection, hello)

    def wait_until(self, now: float) -> None:
        self.now = now
        self.effects += self.machine.tick(now)

    def told(self, connection: int) -> list[type]:
        return [type(each.message) for each in self.effects if isinstance(each, Send) and each.connection == connection]


def test_held_newcomer_asks_other_masters() -> None:
    """Another one may lead a run by now whose peers had not come to it yet when it was asked."""
    master = _Master()
    assert master.hello(1) == []
    master.wait_until(master.machine._bootstrap.birth_at)
    assert master.told(1) == [m.Elsewhere]
    assert Close(1) in master.effects
    assert not master.machine.is_leading
    assert master.hello(2) == [m.Welcome]


def test_held_newcomer_with_one_master_founds() -> None:
    master = _Master()
    assert master.hello(1, masters=1) == []
    master.wait_until(master.machine._bootstrap.birth_at)
    assert master.told(1) == [m.Welcome]


@pytest.mark.parametrize("record", [None, OVER])
def test_record_does_not_cover_other_masters(record: RunRecord | None) -> None:
    master = _Master(has_state=True, record=record)
    began_at = master.now
    assert master.hello(1) == []
    assert master.machine._bootstrap.birth_at == began_at + MARGIN_S
    master.wait_until(began_at + MARGIN_S)
    assert master.hello(2) == [m.Welcome]


@pytest.mark.parametrize("record", [None, OVER])
def test_empty_record_suffices_with_one_master(record: RunRecord | None) -> None:
    assert _Master(has_state=True, record=record).hello(1, masters=1) == [m.Welcome]


UNDER_WAY = RunRecord("old", b"", 1, RecordedView(3, frozenset([1, 2])), master_timeout_s=60.0)


@pytest.mark.parametrize(
    ("record", "idle_s", "expected_s"),
    [
        (UNDER_WAY, 0.0, 60 + TIMEOUT_S),
        (UNDER_WAY, IDLE_MARGIN_S, 60 + TIMEOUT_S),
        (UNDER_WAY, IDLE_MARGIN_S + 30, 30 + TIMEOUT_S),
        (UNDER_WAY, IDLE_MARGIN_S + 60, MARGIN_S),
        (UNDER_WAY, IDLE_MARGIN_S + 66, 0.0),
        (msgspec.structs.replace(UNDER_WAY, is_over=True), IDLE_MARGIN_S, MARGIN_S),
        (msgspec.structs.replace(UNDER_WAY, is_over=True), IDLE_MARGIN_S + 66, 0.0),
        (OVER, 0.0, 0.0),
        (None, 0.0, 0.0),
    ],
)
def test_expired_peers_are_not_awaited(record: RunRecord | None, idle_s: float, expected_s: float) -> None:
    options = MasterOptions(peer_timeout_s=TIMEOUT_S)
    assert hold_s(Start.AUTO, options, record, True, idle_s) == expected_s


def test_first_held_newcomer_is_a_warning() -> None:
    master = _Master()
    for connection in (1, 2):
        master.hello(connection, masters=1)
    lines = [each for each in master.effects if isinstance(each, MasterLog) and "is held" in each.text]
    assert [each.level for each in lines] == ["warning", "info"]
    assert "for peers of an earlier run, if any, for 7 s more; `pccl master --start new` skips" in lines[0].text
    held, what_for = master.machine.holding(master.now)
    assert held == 2
    assert what_for in lines[0].text
    master.wait_until(master.machine._bootstrap.birth_at)
    assert master.machine.holding(master.now) == (0, "")


def test_start_new_waits_for_no_run() -> None:
    assert _Master(Start.NEW, has_state=True).hello(1) == [m.Welcome]


def test_deposed_master_needs_no_majority() -> None:
    """It knows who was in it: the wait for peers that another one may have led is over."""
    master = _Master(has_state=True)
    resume = m.Resume(m.PROTOCOL_VERSION, "led elsewhere", 1, 1, masters=2)
    assert master.say(1, resume) == [m.PreVoteRequest]
    master.say(1, m.PreVote(view(7, 1), None, False))
    master.say(1, m.Vote(2, report_of(1, view(7, 1))))
    assert master.machine.is_leading
    master.now += TIMEOUT_S
    master.say(1, m.Leave(""))
    assert not master.machine.is_leading
    assert master.hello(2) == [m.Welcome]


def test_standby_dismisses_founders_of_ended_run() -> None:
    """Others found theirs elsewhere, since a standby tells them that it founds none."""
    master = _Master(is_standby=True, founders=2)
    master.say(1, m.Resume(m.PROTOCOL_VERSION, "old", 1, 1, masters=2))
    master.say(1, m.PreVote(view(7, 1), None, False))
    master.say(1, m.Vote(2, report_of(1, view(7, 1))))
    assert master.machine.is_leading
    assert master.hello(2, may_found=False) == [m.Welcome]
    master.say(1, m.Leave(""))
    assert master.told(2) == [m.Welcome, m.StartOver]
    assert Close(2) in master.effects
    assert not master.machine.is_leading
    assert master.hello(3, may_found=False) == [m.Elsewhere]


@pytest.mark.parametrize("masters", [1, 2])
def test_waiting_founders_yield_to_recovering_peers(masters: int) -> None:
    """They have founded none. Were the peers sent away, theirs would be lost to a newcomer that waits."""
    master = _Master(Start.NEW, founders=2)
    assert master.hello(1, masters) == [m.Welcome]
    assert master.say(2, m.Resume(m.PROTOCOL_VERSION, "old", 1, 1, masters=masters)) == [m.PreVoteRequest]
    assert master.told(1) == [m.Welcome, m.StartOver]
    assert Close(1) in master.effects
    assert master.hello(3, masters) == []
    master.say(2, m.PreVote(view(7, 1), None, False))
    master.say(2, m.Vote(2, report_of(1, view(7, 1))))
    assert master.machine.is_leading
    assert master.told(3) == [m.Welcome]


def test_waiting_founders_ignore_unaccepted_peers() -> None:
    master = _Master(Start.NEW, founders=2)
    assert master.hello(1) == [m.Welcome]
    assert master.say(2, m.Resume(m.PROTOCOL_VERSION, "old", 1, 1, masters=2, is_accepted=False)) == [m.StartOver]
    assert master.told(1) == [m.Welcome]
