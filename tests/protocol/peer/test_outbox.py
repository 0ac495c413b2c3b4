"""The peer's outbox: what is said, in which order, and when nothing is."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.messages import OpRef
from pccl.protocol.peer.effects import Effect, Outbox, PeerLog, ToMaster

A, B = OpRef(7, 0), OpRef(8, 0)


def test_effects_keep_their_order_and_reports_come_last() -> None:
    outbox = Outbox()
    outbox.report_ops_of(3)
    for op in (A, B):
        outbox.report_done(op)
    outbox.emit(PeerLog("info", "first"))
    outbox.send(m.Leave("second"))
    expected: list[Effect] = [PeerLog("info", "first"), ToMaster(m.Leave("second")), ToMaster(m.OpsDone(3, [A, B]))]
    assert outbox.drain() == expected
    assert outbox.drain() == []


def test_reports_go_ahead_of_what_must_come_after_them() -> None:
    outbox = Outbox()
    outbox.report_ops_of(3)
    outbox.report_done(A)
    outbox.report_stalled(B)
    outbox.report_over(B)
    outbox.send_reports()
    outbox.send(m.Leave())
    said: list[m.FromPeer] = [m.OpsDone(3, [A]), m.OpsStalled(3, [B]), m.OpsOver(3, [B]), m.Leave()]
    assert outbox.drain() == [ToMaster(message) for message in said]


def test_without_a_master_nothing_is_said_but_answers() -> None:
    outbox = Outbox()
    outbox.report_ops_of(3)
    outbox.is_led = False
    outbox.report_done(A)
    outbox.send(m.Leave())
    outbox.answer(m.LinksReady(1))
    assert outbox.drain() == [ToMaster(m.LinksReady(1))]
    outbox.is_led = True
    assert outbox.drain() == [], "nothing is kept for the next one"


def test_nothing_is_reported_of_ops_that_do_not_run() -> None:
    outbox = Outbox()
    outbox.report_ops_of(3)
    outbox.report_done(A)
    outbox.report_ops_of(0)
    outbox.report_done(B)
    assert outbox.drain() == []


def test_nothing_is_said_after_the_end() -> None:
    outbox = Outbox()
    outbox.is_closed = True
    outbox.send(m.Leave())
    assert outbox.drain() == []
