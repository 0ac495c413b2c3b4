"""The master's status of a run, and the bounds of the history that it draws on."""

from __future__ import annotations

import msgspec
import pytest

from pccl.protocol import messages as m
from pccl.protocol.codec import LENGTH_BYTES, decode_body, encode
from pccl.protocol.completion import pair_tag
from pccl.protocol.master.machine import snapshot
from pccl.protocol.master.statistics import (
    EVENTS_MAX,
    HOUR_STEP_S,
    HOUR_STEPS_MAX,
    LOSSES_MAX,
    STEP_S,
    STEPS_MAX,
    TEXT_CHARACTERS_MAX,
    History,
)
from pccl.protocol.messages import Kind, OpRef
from pccl.protocol.status import MemberStatus, RunStatus, StalledOp, Totals, Waiting
from tests.protocol.master.rig import Rig


def look(rig: Rig) -> RunStatus:
    return snapshot(rig.master, rig.now, 60.0, "1.0")


def member(status: RunStatus, peer: int) -> MemberStatus:
    return next(found for found in status.members if found.peer == peer)


def test_empty_run() -> None:
    status = look(Rig())
    assert (status.run, status.view, status.members, status.groups) == ("run", 0, [], [])
    assert status.totals == Totals()
    assert status.course.steps == [Totals()]


def test_groups_and_members() -> None:
    rig = Rig(0, 0, 7)
    rig.hello(7)
    status = look(rig)
    assert [(group.group, group.ring, group.state) for group in status.groups] == [
        (0, [1, 2], "running"),
        (7, [3], "running"),
    ]
    assert status.groups[0].is_meshed
    assert [(found.peer, found.group, found.state) for found in status.members] == [
        (1, 0, "accepted"),
        (2, 0, "accepted"),
        (3, 7, "accepted"),
        (4, 7, "pending"),
    ]
    assert member(status, 1).name == "n1"
    assert member(status, 1).address == "10.0.0.1:5000"
    assert status.view == rig.master.state.installed_view


def test_waiting_names_call_and_missing_peers() -> None:
    rig = Rig(0, 0, 0)
    rig.hear(1, m.GroupCall(1, Kind.UPDATE_TOPOLOGY))
    rig.now += 4.0
    rig.hear(2, m.GroupCall(1, Kind.UPDATE_TOPOLOGY))
    rig.now += 1.5
    status = look(rig)
    assert member(status, 1).waiting == Waiting(Kind.UPDATE_TOPOLOGY, 5.5, [3])
    assert member(status, 2).waiting == Waiting(Kind.UPDATE_TOPOLOGY, 1.5, [3])
    assert member(status, 3).waiting is None


def test_stalled_ops() -> None:
    rig = Rig(0, 0, 0)
    epoch = rig.master.state.groups[0].epoch
    rig.hear(1, m.OpsDone(epoch, [OpRef(7, 0)]))
    rig.hear(2, m.OpsStalled(epoch, [OpRef(7, 0)]))
    status = look(rig)
    assert member(status, 2).stalled_ops == [StalledOp(7, 0, [3])], "not for itself"
    assert member(status, 1).stalled_ops == []

    assert status.groups[0].undecided_ops == 1


@pytest.mark.parametrize(("waiter", "call"), [(1, "send"), (2, "recv")])
def test_stalled_send_and_recv(waiter: int, call: str) -> None:
    """As its caller has named it, and not for itself."""
    rig = Rig(0, 0, 0)
    group = rig.master.state.groups[0]
    tag = pair_tag(group.ring.index(1), group.ring.index(2), 4)
    rig.hear(waiter, m.OpsStalled(group.epoch, [OpRef(tag, 0)]))
    other = 3 - waiter
    assert member(look(rig), waiter).stalled_ops == [StalledOp(4, 0, [other], call)]


def test_ops_are_counted_once() -> None:
    rig = Rig(0, 0)
    epoch = rig.master.state.groups[0].epoch
    for peer in (1, 2):
        rig.hear(peer, m.Report([], 0, 0))
    for committed in (1, 2):
        for peer in (1, 2):
            rig.hear(peer, m.Report([(epoch, committed, 1)], 0, 0))
    totals = look(rig).totals
    assert (totals.ops_committed, totals.ops_aborted) == (2, 1)
    rig.hear(1, m.Report([(epoch, 2, 1), (epoch + 1, 3, 0)], 0, 0))
    rig.hear(2, m.Report([(epoch, 2, 1), (epoch + 1, 2, 0)], 0, 0))
    totals = look(rig).totals
    assert (totals.ops_committed, totals.ops_aborted) == (5, 1)


def test_first_report_is_a_base() -> None:
    rig = Rig(0, 0)
    rig.hear(1, m.Report([(1, 100, 5), (2, 7, 0)], 1000, 900))  # the first to report to this master
    assert look(rig).totals.ops_committed == 0
    rig.now += 2.0
    rig.hear(1, m.Report([(1, 100, 5), (2, 9, 0)], 1500, 1000))
    rig.hear(2, m.Report([(2, 9, 0)], 800, 800))
    rig.hear(2, m.Report([(2, 10, 0)], 900, 800))
    totals = look(rig).totals
    assert (totals.ops_committed, totals.ops_aborted, totals.tx_bytes) == (3, 0, 600)


def test_empty_group_is_forgotten() -> None:
    rig = Rig(0, 5)
    for peer in (1, 2):
        rig.hear(peer, m.Report([(1, 1, 0)], 0, 0))
    rig.hear(2, m.Leave())
    rig.answer()
    assert set(rig.master.state.traffic._ops) == {0}


def test_byte_totals_and_rates() -> None:
    rig = Rig(0, 0)
    for peer in (1, 2):
        rig.hear(peer, m.Report([], 0, 0))
    rig.now += 4.0
    rig.hear(1, m.Report([], 4000, 2000, 50, 1, [m.LinkReport(2, 4000)]))
    rig.hear(2, m.Report([], 2000, 4000))
    status = look(rig)
    totals = status.totals
    assert (totals.tx_bytes, totals.state_bytes, totals.reconnects) == (6000, 50, 1)
    assert sum(step.tx_bytes for step in status.course.steps) == 6000
    traffic = member(status, 1).traffic
    assert (traffic.tx_bytes, traffic.rx_bytes) == (4000, 2000)
    assert (traffic.tx_bytes_per_s, traffic.rx_bytes_per_s) == (1000.0, 500.0)
    assert [(link.peer, link.tx_bytes) for link in traffic.links] == [(2, 4000)]
    rig.now += 2.0
    rig.hear(1, m.Report([], 4000, 2000, 50, 1, [m.LinkReport(2, 4000)]))  # nothing more
    traffic = member(look(rig), 1).traffic
    assert (traffic.tx_bytes_per_s, traffic.links[0].tx_bytes_per_s) == (0.0, 0.0)


def test_loss_has_reason() -> None:
    rig = Rig(0, 0, 0)
    epoch = rig.master.state.groups[0].epoch
    for peer in (1, 2):
        rig.hear(peer, m.OpsDone(epoch, [OpRef(1, 0)]))  # all survivors
    rig.hear(1, m.OpsDone(epoch, [OpRef(2, 0)]))  # one of them
    rig.effects = rig.master.disconnected(3, "cut off", rig.now)
    flushing = look(rig)
    assert flushing.is_changing
    assert flushing.groups[0].state == "flushing"
    assert member(flushing, 1).answer_due_s == 0.0
    rig.answer()
    rig.now += 3.0
    status = look(rig)
    assert (status.totals.joins, status.totals.losses, status.totals.leaves) == (3, 1, 0)
    assert [(loss.age_s, loss.peer, loss.name, loss.reason) for loss in status.losses] == [(3.0, 3, "n3", "cut off")]
    assert any("peer 3 (n3) lost: cut off" in event.text for event in status.events)
    assert status.groups[0].ring == [1, 2]


def test_unauthenticated_lines_are_not_kept() -> None:
    rig = Rig(0)
    rig.master.connected(99, "192.0.2.1", rig.now)
    rig.master.received(99, m.Hello(0, "ancient", 0, [], 5000, 2), rig.now)
    assert not any("192.0.2.1" in event.text for event in look(rig).events)


def test_history_is_bounded() -> None:
    history = History()
    for i in range(3 * max(EVENTS_MAX, LOSSES_MAX, STEPS_MAX)):
        now = i * STEP_S
        history.logged(now, "info", "\x1b[2J" + "x" * 10 * TEXT_CHARACTERS_MAX)
        history.lost(now, i, "name", 0, "gone\n" * TEXT_CHARACTERS_MAX)
    assert len(history.events(now)) == EVENTS_MAX
    assert len(history.losses(now)) == LOSSES_MAX
    assert len(history.course(now).steps) == STEPS_MAX
    assert history.totals.losses == i + 1
    texts = [event.text for event in history.events(now)] + [loss.reason for loss in history.losses(now)]
    assert all(text.isprintable() and len(text) < 4 * TEXT_CHARACTERS_MAX for text in texts)


def test_course_has_every_step() -> None:
    history = History()
    history.happened(1.0 * STEP_S, Totals(ops_committed=2))
    history.happened(1.5 * STEP_S, Totals(ops_committed=3))
    history.happened(4.0 * STEP_S, Totals(joins=1))
    steps = history.course(5.0 * STEP_S).steps
    assert steps == [Totals(ops_committed=5), Totals(), Totals(), Totals(joins=1), Totals()]
    assert history.course((STEPS_MAX + 100) * STEP_S).steps == [Totals()] * STEPS_MAX


@pytest.mark.parametrize("peers", [0, 3])
def test_status_round_trip(peers: int) -> None:
    rig = Rig(*[0] * peers)
    status = look(rig)
    assert decode_body(encode(m.Status(status))[LENGTH_BYTES:], m.ToWatcher) == m.Status(status)
    assert msgspec.json.decode(msgspec.json.encode(status), type=RunStatus) == status


def test_reports_give_waited_share_and_printable_figures() -> None:
    rig = Rig(0)
    rig.hear(1, m.Report([], 0, 0, in_ops_ms=100, at_ms=1000))
    rig.now += 4.0
    rig.hear(1, m.Report([], 0, 0, in_ops_ms=1100, at_ms=5000, figures=[("loss", 0.5), ("x\n", 1.0)]))
    found = member(look(rig), 1)
    assert (found.traffic.waited, found.figures) == (0.25, {"loss": 0.5})


def test_history_covers_an_hour() -> None:
    history = History()
    for second in range(0, 7200, 10):
        history.happened(float(second), Totals(joins=1))
    course = history.hour(7199.0)
    assert (course.step_s, len(course.steps)) == (HOUR_STEP_S, HOUR_STEPS_MAX)
    assert HOUR_STEP_S * HOUR_STEPS_MAX == 3600
    assert sum(step.joins for step in course.steps) == 360
