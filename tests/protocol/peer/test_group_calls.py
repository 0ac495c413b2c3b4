"""Group calls of one peer, without the rest of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError
from pccl.protocol.messages import Kind, OpRef
from pccl.protocol.peer.effects import CallResult, Effect, Outbox, ToMaster
from pccl.protocol.peer.group_calls import GroupCalls
from pccl.types import Result


@dataclass
class Ops:
    """The ops in flight."""

    tags: list[int] = field(default_factory=list)
    undecided: list[OpRef] = field(default_factory=list)


@dataclass
class Rig:
    outbox: Outbox = field(default_factory=Outbox)
    ops: Ops = field(default_factory=Ops)

    def __post_init__(self) -> None:
        self.calls = GroupCalls(self.outbox, self.ops)

    def enter(self, call: int, kind: str, offer: m.SyncOffer | None = None) -> list[Effect]:
        self.calls.enter(call, kind, offer)
        return self.outbox.drain()

    def result(self, call: int, code: Result = Result.SUCCESS, value: int = 0, call_number: int = 0) -> list[Effect]:
        self.calls.on_result(m.GroupCallResult(call, code, "", value, call_number))
        return self.outbox.drain()


OFFER = m.SyncOffer("enforce_popular", 3, b"mine", [])


def test_one_call_at_a_time() -> None:
    rig = Rig()
    assert rig.enter(1, Kind.UPDATE_TOPOLOGY) == [ToMaster(m.GroupCall(1, Kind.UPDATE_TOPOLOGY))]
    assert rig.calls.is_exclusive
    assert rig.enter(2, Kind.ARE_PEERS_PENDING) == []
    rig.ops.undecided = [OpRef(7, 0)]
    ended, entered = rig.result(1, call_number=4)
    assert ended == CallResult(1, Result.SUCCESS, "", 0)
    assert entered == ToMaster(m.GroupCall(2, Kind.ARE_PEERS_PENDING, None, [OpRef(7, 0)]))
    assert (rig.calls.kind, rig.calls.is_exclusive) == (Kind.ARE_PEERS_PENDING, False)
    assert [outcome.kind for outcome in rig.calls.outcomes] == [Kind.UPDATE_TOPOLOGY]


def test_exclusive_call_fails_with_open_ops() -> None:
    rig = Rig(ops=Ops(tags=[7]))
    (effect,) = rig.enter(1, Kind.SYNC, OFFER)
    assert isinstance(effect, CallResult)
    assert (effect.code, rig.calls.kind) == (Result.PENDING_ASYNC_OPS, "")


def test_cancel_repeats_at_next_master() -> None:
    rig = Rig()
    rig.enter(1, Kind.UPDATE_TOPOLOGY)
    rig.calls.cancel(1)
    assert rig.outbox.drain() == [ToMaster(m.GroupCallCancel(1))]
    rig.calls.restate()
    assert rig.outbox.drain() == [ToMaster(m.GroupCall(1, Kind.UPDATE_TOPOLOGY)), ToMaster(m.GroupCallCancel(1))]


def offered_again(rig: Rig) -> tuple[int, bytes]:
    """What the call offers when it is said again: the revision and its root."""
    rig.calls.restate()
    (effect,) = rig.outbox.drain()
    assert isinstance(effect, ToMaster)
    assert isinstance(effect.message, m.GroupCall)
    offer = effect.message.offer
    assert offer is not None
    return offer.revision, offer.root


@pytest.mark.parametrize("is_fetched", [True, False])
def test_repeated_offer_has_present_state(is_fetched: bool) -> None:
    rig = Rig()
    rig.enter(1, Kind.SYNC, OFFER)
    rig.calls.on_plan(m.SyncPlan(5, 9, b"theirs", [3], True, False))
    rig.calls.fetched(5, is_fetched)
    rig.calls.fetched(6, not is_fetched)
    assert offered_again(rig) == ((9, b"theirs") if is_fetched else (3, b"")), "half of it is overwritten"


def test_updated_donor_offers_new_state() -> None:
    rig = Rig()
    rig.enter(1, Kind.SYNC, OFFER)
    rig.calls.on_plan(m.SyncPlan(5, 9, b"theirs", [3], True, False))
    rig.calls.fetched(5, True)
    rig.calls.restate()
    rig.calls.on_plan(m.SyncPlan(6, 9, b"theirs", [2, 3], False, False))
    rig.outbox.drain()
    assert offered_again(rig) == (9, b"theirs")


def test_installed_admission_ends_without_master() -> None:
    rig = Rig()
    rig.calls.end_admission()
    rig.enter(1, Kind.UPDATE_TOPOLOGY)
    rig.calls.end_admission()
    assert rig.outbox.drain() == []
    rig.calls.admitted(6)
    rig.calls.end_admission()
    assert rig.outbox.drain() == [CallResult(1, Result.SUCCESS, "", 0)]


def test_result_without_call_is_error() -> None:
    rig = Rig()
    with pytest.raises(ProtocolError, match="not in progress"):
        rig.result(1)
    rig.enter(1, Kind.SYNC, OFFER)
    with pytest.raises(ProtocolError, match="with code"):
        rig.calls.on_result(m.GroupCallResult(1, 4711))
    rig.result(1, value=9, call_number=8)
    assert rig.calls.synced == (8, 9)


def test_calls_end_with_session() -> None:
    rig = Rig()
    rig.enter(1, Kind.SYNC, OFFER)
    rig.enter(2, Kind.UPDATE_TOPOLOGY)
    rig.calls.end(Result.MASTER_CONNECTION_FAILED, "gone")
    ends = [CallResult(call, Result.MASTER_CONNECTION_FAILED, "gone", 0) for call in (1, 2)]
    assert rig.outbox.drain() == ends
    assert not rig.calls.kind
