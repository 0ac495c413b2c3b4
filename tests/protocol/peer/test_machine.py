"""The peer's machine as a whole: calls, heartbeats, the end of a session, and a master that lies."""

from __future__ import annotations

import pytest

from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError
from pccl.protocol.messages import Kind, OpRef
from pccl.protocol.peer import effects as ps
from pccl.protocol.peer.machine import Peer
from pccl.types import Result
from tests.protocol.peer.rig import TAG, Rig, member, of, prepare, said


def test_probe_names_links(rig: Rig) -> None:
    connections = rig.machine.connections
    links = [ps.ProbedLink(member(1), False, connections), ps.ProbedLink(member(1), True, connections)]
    assert rig.hear(m.Probe(4, [(1, False), (99, True), (1, True)])) == [ps.RunProbe(4, links)]
    found = [m.LinkMetric(1, False, 1e6, 250)]
    rig.machine.probed(4, found, 0.0)
    assert said(rig.effects()) == [m.Probes(4, found)]


def test_session_end_ends_everything(rig: Rig) -> None:
    rig.group_call(5, Kind.ARE_PEERS_PENDING)
    rig.group_call(6)
    rig.launch(1)
    rig.machine.master_lost("gone")
    effects = rig.effects()
    failure = (Result.MASTER_CONNECTION_FAILED, "gone")
    assert of(ps.EndOp, effects) == [ps.EndOp(1, False)]
    assert of(ps.CallResult, effects) == [ps.CallResult(5, *failure, 0), ps.CallResult(6, *failure, 0)]
    assert {effect.link for effect in of(ps.CloseLink, effects)} == set(rig.links.values())
    assert effects[-1] == ps.Ended(*failure)
    assert rig.ended(1) == [ps.OpResult(1, *failure, 3, 1, 2)]


def test_no_effects_after_end(rig: Rig) -> None:
    rig.machine.leave("bye")
    assert said(rig.effects()) == [m.Leave("bye")]
    assert rig.hear(m.Install(99), m.Goodbye(5, "?")) == []
    rig.machine.leave("again")
    rig.machine.master_lost("gone")
    rig.machine.sync_ended(1, True, "", [])
    rig.machine.probed(1, [], 0.0)
    rig.machine.cancel_group_call(1)
    rig.machine.link_lost(rig.links[1], "reset")
    rig.machine.tick(1000.0)
    assert rig.effects() == []
    assert of(ps.OpResult, rig.launch(1))[0].code is Result.NOT_INITIALIZED
    assert of(ps.CallResult, rig.group_call(2))[0].code is Result.NOT_INITIALIZED


def test_verdict_holds_at_session_end(rig: Rig) -> None:
    rig.launch(1)
    rig.done(1)
    rig.hear(m.Flush(9, 1))
    rig.machine.frozen(1)
    rig.hear(prepare([1, 2], 2, commits=[OpRef(TAG, 0)]))
    rig.ended(1)
    rig.machine.master_lost("gone")
    assert of(ps.OpResult, rig.effects())[0].code is Result.SUCCESS


@pytest.mark.parametrize("code", [Result.SUCCESS, 999, -1])
def test_goodbye_with_invalid_code(rig: Rig, code: int) -> None:
    rig.launch(1)
    assert rig.hear(m.Goodbye(code, "why"))[-1] == ps.Ended(Result.MASTER_CONNECTION_FAILED, "why")


def _with_op(rig: Rig) -> None:
    rig.launch(1)


def _frozen(rig: Rig) -> None:
    _with_op(rig)
    rig.hear(m.Flush(9, 1))


def _prepared(rig: Rig) -> None:
    _frozen(rig)
    rig.machine.frozen(1)
    rig.hear(prepare([1, 2], 5))


def _calling(rig: Rig) -> None:
    rig.group_call(5)


def _nothing(rig: Rig) -> None:
    pass


@pytest.mark.parametrize(
    ("before", "lie"),
    [
        (_nothing, m.Welcome(3, "run", 1)),
        (_nothing, m.Flush(9, 2)),
        (_frozen, m.Flush(10, 1)),
        (_nothing, prepare([1, 2], 1)),
        (_nothing, prepare([1, 2], 0)),
        (_prepared, prepare([1, 2], 5)),
        (_prepared, prepare([1, 2], 4)),
        (_nothing, prepare([1, 3], 2)),
        (_nothing, m.Prepare(2, [member(2)], [m.Ring(0, 2, [1, 2, 9])])),
        (_frozen, prepare([1, 2], 2, commits=[OpRef(TAG, 0)])),
        (_nothing, m.Install(1)),
        (_prepared, m.Install(6)),
        (_with_op, m.OpsCommit(1, [OpRef(TAG, 0)])),
        (_nothing, m.OpsCommit(1, [OpRef(TAG, 0)])),
        (_with_op, m.OpsCommit(2, [OpRef(TAG, 0)])),
        (_frozen, m.OpsCommit(1, [OpRef(TAG, 0)])),
        (_with_op, m.OpAbort(1, TAG, 0, Result.SUCCESS, "?")),
        (_with_op, m.OpAbort(1, TAG, 0, 999, "?")),
        (_with_op, m.OpAbort(2, TAG, 0, Result.TIMEOUT, "?")),
        (_nothing, m.GroupCallResult(5, Result.SUCCESS)),
        (_calling, m.GroupCallResult(6, Result.SUCCESS)),
        (_calling, m.GroupCallResult(5, 999)),
    ],
)
def test_invalid_messages_raise(rig: Rig, before: object, lie: m.FromMaster) -> None:
    assert callable(before)
    before(rig)
    rig.effects()
    with pytest.raises(ProtocolError):
        rig.machine.received(lie)
    rig.machine.master_lost("it does not speak as a master does")
    effects = rig.effects()
    assert effects[-1] == ps.Ended(Result.MASTER_CONNECTION_FAILED, "it does not speak as a master does")
    if rig.machine.open_ops:
        rig.ended(1)
    assert rig.machine.open_ops == 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e9])
def test_invalid_peer_timeout_raises(seconds: float) -> None:
    with pytest.raises(ProtocolError, match="timeout"):
        Peer(0, 1).received(m.Welcome(1, "run", 1, peer_timeout_s=seconds))


@pytest.mark.parametrize("threads", [0, -1, 17])
def test_invalid_engine_threads_raise(threads: int) -> None:
    with pytest.raises(ProtocolError, match="threads"):
        Peer(0, 1).received(m.Welcome(1, "run", 1, engine_threads=threads))


def test_fail_sends_leave(rig: Rig) -> None:
    rig.launch(1)
    rig.machine.fail("no threads")
    effects = rig.effects()
    assert m.Leave("no threads") in [effect.message for effect in of(ps.ToMaster, effects)]
    assert of(ps.Ended, effects) == [ps.Ended(Result.INTERNAL_ERROR, "no threads")]
    rig.machine.fail("again")
    assert rig.effects() == []
