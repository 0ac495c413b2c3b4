"""Newcomers at the master's machine: who is welcome, who is refused, and who has to try its links first."""

from __future__ import annotations

import msgspec
import pytest

from pccl.protocol import messages as m
from pccl.protocol.master.admission import HOSTS_MAX
from pccl.protocol.master.machine import Master
from pccl.protocol.master.run_state import Close, MasterLog, MasterOptions, RunState, Send
from pccl.protocol.messages import Kind
from pccl.protocol.names import NAME_CHARACTERS_MAX
from pccl.types import Result
from tests.protocol.master.rig import HELLO, Rig


def test_first_hello_is_welcomed() -> None:
    rig = Rig()
    rig.hello()
    (welcome,) = [message for message in rig.told(1) if isinstance(message, m.Welcome)]
    assert welcome == m.Welcome(1, "run", 1)
    rig.hello()
    assert rig.told(2) == [m.Welcome(2, "run", 1)]


@pytest.mark.parametrize(
    ("advertised", "known"),
    [
        ([], ["10.0.0.1"]),
        (["example.org"], ["example.org", "10.0.0.1"]),
        (["10.0.0.1", "::1"], ["10.0.0.1", "::1"]),
    ],
)
def test_advertised_and_observed_addresses_are_known(advertised: list[str], known: list[str]) -> None:
    rig = Rig()
    rig.master.connected(1, "10.0.0.1", 0.0)
    rig.hear(1, m.Hello(m.PROTOCOL_VERSION, "1.0", 4, advertised, 5000, 3, "me"))
    rig.heartbeat(1)
    (prepare,) = [message for message in rig.told(1) if isinstance(message, m.Prepare)]
    assert prepare.members == [m.PeerInfo(1, 4, known, 5000, 3, "me")]


def test_refusal_sends_reason_and_closes() -> None:
    rig = Rig()
    rig.master.connected(1, "10.0.0.1", 0.0)
    rig.hear(1, m.Leave())
    log, farewell, close = rig.effects
    assert isinstance(log, MasterLog)
    assert log.level == "warning"
    reason = "the first message must be Hello, not Leave"
    assert farewell == Send(1, m.Goodbye(Result.MASTER_CONNECTION_FAILED, reason))
    assert close == Close(1)
    rig.lose(1)
    assert rig.effects == []


@pytest.mark.parametrize(
    "hello",
    [
        msgspec.structs.replace(HELLO, hosts=["h"] * (HOSTS_MAX + 1)),
        msgspec.structs.replace(HELLO, hosts=["h" * (NAME_CHARACTERS_MAX + 1)]),
        msgspec.structs.replace(HELLO, name="n" * (NAME_CHARACTERS_MAX + 1)),
        msgspec.structs.replace(HELLO, name="forged\n2026-01-01 INFO pccl.master: all is well"),
        msgspec.structs.replace(HELLO, version="\x1b[2J"),
    ],
)
def test_unprintable_names_are_refused(hello: m.Hello) -> None:
    rig = Rig()
    rig.master.connected(1, "10.0.0.1", 0.0)
    rig.hear(1, hello)
    assert Close(1) in rig.effects
    assert "must be printable" in rig.logged[0]
    assert rig.logged[0].isprintable()


def test_pending_limit() -> None:
    master = Master(RunState("run", MasterOptions(pending_max=2)))
    for connection in range(1, 5):
        master.connected(connection, "10.0.0.1", 0.0)
        effects = master.received(connection, HELLO, 0.0)
        assert (Close(connection) in effects) == (connection > 2)
    assert master.state.pending == [1, 2]


def _sent_away_for_its_links(rig: Rig) -> m.Hello:
    """A newcomer that was; how it comes back."""
    connection = rig.hello()
    for peer in (1, 2):
        rig.hear(peer, m.GroupCall(1, Kind.UPDATE_TOPOLOGY))
    for peer in (1, 2):
        rig.hear(peer, m.LinksReady(rig.master.state.view))
    rig.hear(connection, m.LinksReady(rig.master.state.view, [(1, "no answer")]))
    rig.answer()
    assert rig.peers == [1, 2]
    return m.Hello(m.PROTOCOL_VERSION, "1.0", 0, [], 5000, 2, f"n{connection}")


def _come_back(rig: Rig, hello: m.Hello) -> int:
    rig.master.connected(10, "10.0.0.3", rig.now)
    rig.hear(10, hello)
    (welcome,) = rig.told(10)
    assert isinstance(welcome, m.Welcome)
    assert "was evicted for failed links 1 times" in welcome.obstacle
    rig.heartbeat(welcome.peer)
    return welcome.peer


def _are_peers_pending(rig: Rig) -> int:
    for peer in (1, 2):
        rig.hear(peer, m.GroupCall(2, Kind.ARE_PEERS_PENDING))
    (result,) = rig.told(2)
    assert isinstance(result, m.GroupCallResult)
    return result.value


def test_evicted_peer_tries_links_before_admission() -> None:
    rig = Rig(0, 0)
    peer = _come_back(rig, _sent_away_for_its_links(rig))
    assert _are_peers_pending(rig) == 0
    rig.tick(4.9)
    assert rig.effects == []
    rig.tick(5.0)
    (trial,) = rig.told(10)
    assert isinstance(trial, m.Trial)
    assert [member.peer for member in trial.members] == [1, 2]
    assert _are_peers_pending(rig) == 0
    rig.hear(10, m.Tried())
    assert rig.master.admission.admissible == [peer]
    assert _are_peers_pending(rig) == 1


def test_failed_trial_is_repeated_after_longer_delay() -> None:
    rig = Rig(0, 0)
    _come_back(rig, _sent_away_for_its_links(rig))
    for due_at in (5.0, 15.0, 35.0):
        assert rig.master.deadline() == due_at
        rig.tick(due_at)
        assert isinstance(rig.told(10)[0], m.Trial)
        rig.hear(10, m.Tried([(1, "no answer"), (2, "no answer")]))
    assert _are_peers_pending(rig) == 0


def test_evicted_peer_is_admitted_to_empty_run() -> None:
    rig = Rig(0, 0)
    peer = _come_back(rig, _sent_away_for_its_links(rig))
    for other in (1, 2):
        rig.hear(other, m.Leave(""))
    rig.hear(10, m.LinksReady(rig.master.state.view))
    assert rig.master.state.accepted == [peer]


def test_no_admission_before_heartbeat() -> None:
    rig = Rig()
    rig.master.connected(1, "10.0.0.1", 0.0)
    rig.hear(1, HELLO)
    assert rig.told(1) == [m.Welcome(1, "run", 1, peer_timeout_s=5.0)]
    assert (rig.master.state.pending, rig.master.admission.admissible) == ([1], [])
    rig.tick(9.9)
    assert rig.peers == [1]
    rig.tick(10.0)
    assert rig.told(1) == [m.Goodbye(Result.MASTER_CONNECTION_FAILED, "evicted: silent for 10.0 s")]


def test_absent_newcomer_is_not_admitted() -> None:
    rig = Rig(0)
    peer = rig.hello()
    assert rig.master.admission.admissible == [peer]
    rig.effects = rig.master.detached(peer, "reset", 0.0)
    assert rig.master.admission.admissible == []
    rig.effects = rig.master.reattached(peer, 0.0)
    assert rig.master.admission.admissible == [peer]


def _of_site(rig: Rig, size: int) -> int:
    peer = rig.master.state.next_peer
    rig.effects = rig.master.connected(peer, f"10.0.0.{peer}", rig.now)
    rig.hear(peer, msgspec.structs.replace(HELLO, site="site", site_size=size))
    rig.heartbeat(peer)
    rig.answer()
    return peer


def test_leaving_peer_leaves_site_alone() -> None:
    rig = Rig()
    one, other = _of_site(rig, 2), _of_site(rig, 2)
    assert rig.master.state.accepted == [one, other]
    rig.hear(one, m.Leave())
    rig.answer()
    assert rig.master.state.accepted == [other]


def test_lost_peer_takes_its_site() -> None:
    rig = Rig()
    one, other = _of_site(rig, 2), _of_site(rig, 2)
    rig.lose(one)
    assert Close(other) in rig.effects
    assert rig.master.state.accepted == []


def test_site_size_mismatch_is_refused() -> None:
    rig = Rig()
    one = _of_site(rig, 2)
    assert _of_site(rig, 3) not in rig.peers
    assert rig.peers == [one]


def test_accepted_peers_are_not_pending() -> None:
    rig = Rig(0, 0, options=MasterOptions(pending_max=1))
    peer = rig.hello()
    assert peer in rig.master.state.pending


def test_connection_limit_counts_peers() -> None:
    rig = Rig(0, options=MasterOptions(connections_max=2))
    rig.effects = rig.master.connected(9, "10.0.0.9", 0.0)
    assert Close(9) in rig.effects


@pytest.mark.parametrize("protocol", [m.PROTOCOL_VERSION - 1, m.PROTOCOL_VERSION + 1])
def test_other_versions_are_refused(protocol: int) -> None:
    rig = Rig()
    rig.master.connected(1, "10.0.0.1", 0.0)
    rig.hear(1, msgspec.structs.replace(HELLO, protocol=protocol))
    assert Close(1) in rig.effects
    assert "install the same version on both" in rig.logged[0]


def test_silent_connection_is_closed() -> None:
    rig = Rig(options=MasterOptions(hello_timeout_s=5.0))
    rig.master.connected(1, "10.0.0.1", 0.0)
    rig.tick(4.9)
    assert Close(1) not in rig.effects
    rig.tick(5.0)
    assert Close(1) in rig.effects


def test_heartbeat_of_another_run_is_refused() -> None:
    rig = Rig(0)
    rig.master.connected(9, "10.0.0.1", 0.0)
    rig.hear(9, m.HeartbeatHello(m.PROTOCOL_VERSION, "another run", 1))
    assert Close(9) in rig.effects


def test_founders_are_admitted_together() -> None:
    rig = Rig(options=MasterOptions(founders=3))
    first, second = rig.hello(), rig.hello()
    assert rig.master.state.accepted == []
    rig.lose(second)
    third, fourth = rig.hello(), rig.hello()
    assert rig.master.state.accepted == [first, third, fourth]
    assert rig.master.state.view == 1
    rig.hello()
    assert len(rig.master.state.accepted) == 3


def test_founders_get_requested_places() -> None:
    rig = Rig(options=MasterOptions(founders=3))
    for place in (2, 0, 1):
        rig.hello(place=place)
    assert rig.master.state.groups[0].ring == [2, 3, 1]


def test_newcomers_get_requested_places_while_the_ring_has_their_order() -> None:
    rig = Rig(options=MasterOptions(founders=2))
    for place in (3, 1):
        rig.hello(place=place)
    assert rig.master.state.groups[0].ring == [2, 1]
    third, fourth = rig.hello(place=2), rig.hello(place=0)
    rig.update()
    assert rig.master.state.groups[0].ring == [fourth, 2, third, 1]
    fifth = rig.hello(place=2)
    rig.update()
    assert rig.master.state.groups[0].ring[-1] == fifth, "two peers request this place"


def test_founders_without_places_are_ordered_by_number() -> None:
    rig = Rig(options=MasterOptions(founders=3))
    for place in (2, -1, 1):
        rig.hello(place=place)
    assert rig.master.state.groups[0].ring == [1, 2, 3]


# Run names.


@pytest.mark.parametrize(("masters", "first", "newcomers"), [("b", "", "a"), ("", "b", "a")])
def test_peer_of_run_with_other_name_is_refused_by_both_names(masters: str, first: str, newcomers: str) -> None:
    rig = Rig(options=MasterOptions(run_name=masters))
    rig.master.connected(1, "10.0.0.1", 0.0)
    rig.hear(1, msgspec.structs.replace(HELLO, run_name=first))
    assert isinstance(rig.told(1)[0], m.Welcome)
    rig.master.connected(2, "10.0.0.2", 0.0)
    rig.hear(2, msgspec.structs.replace(HELLO, run_name=newcomers))
    (refusal,) = rig.told(2)
    assert isinstance(refusal, m.Goodbye)
    assert "serves run 'b', but this peer belongs to run 'a'" in refusal.reason


@pytest.mark.parametrize(("masters", "newcomers"), [("", ""), ("", "a"), ("a", ""), ("a", "a")])
def test_missing_run_name_matches_any(masters: str, newcomers: str) -> None:
    rig = Rig(options=MasterOptions(run_name=masters))
    for connection in (1, 2):
        rig.master.connected(connection, "10.0.0.1", 0.0)
        rig.hear(connection, msgspec.structs.replace(HELLO, run_name=newcomers))
        assert isinstance(rig.told(connection)[0], m.Welcome)
