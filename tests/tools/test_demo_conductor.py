"""The demo's decisions, without processes."""

from __future__ import annotations

from signal import SIGKILL

import pytest

from pccl.tools.demo.plan import At, Finished, Plan, StepDone, Synced
from pccl.tools.demo.supervisor import Action, Conductor, Kill, Show, Start

PLAN = Plan(peers=3, steps=6, step_timeout_s=10)  # peer 2 is killed in step 2, peer 3 joins in step 4


def _conductor(plan: Plan = PLAN) -> Conductor:
    conductor = Conductor(plan, 0.0)
    assert conductor.start() == [Start(peer) for peer in range(plan.peers)]
    return conductor


def _done(peer: int, step: int, world_size: int, *, admitted: int = 0, aborted: int = 0) -> StepDone:
    bits = 8.0 - step if peer == 0 else None
    return StepDone(
        peer=peer,
        step=step,
        world_size=world_size,
        admitted=admitted,
        aborted=aborted,
        sent_bytes=100,
        received_bytes=10,
        seconds=1.0 + peer,
        bits_per_byte=bits,
    )


def _all_done(conductor: Conductor, peers: list[int], step: int, **more: int) -> list[Action]:
    return [
        action for peer in peers for action in conductor.receive(_done(peer, step, len(peers), **more), float(step))
    ]


def _reducing(peer: int, launched: int, step: int = 2) -> At:
    return At(peer=peer, step=step, doing="reducing", launched=launched)


def _kill(conductor: Conductor) -> None:
    for step in (0, 1):
        _all_done(conductor, [0, 1, 2], step)
    conductor.receive(_reducing(2, 2), 1.0)
    conductor.receive(_reducing(0, 4), 1.0)
    assert conductor.receive(_reducing(1, 4), 1.0) == [Kill(2)]


def test_kill_when_all_peers_reduce() -> None:
    conductor = _conductor()
    for step in (0, 1):
        _all_done(conductor, [0, 1, 2], step)
    assert conductor.receive(_reducing(2, 2), 1.0) == []
    assert conductor.receive(_reducing(0, 4), 1.0) == []
    assert conductor.receive(_reducing(1, 4, step=1), 1.0) == []
    assert conductor.receive(_reducing(1, 4), 1.0) == [Kill(2)]
    assert conductor.receive(_reducing(1, 4), 1.0) == []
    assert conductor.killed is not None
    assert (conductor.killed.peer, conductor.killed.launched, conductor.killed.of) == (2, 2, 4)


@pytest.mark.parametrize("exit_first", [True, False])
def test_row_of_the_kill(exit_first: bool) -> None:
    conductor = _conductor()
    _kill(conductor)
    if exit_first:
        conductor.exited(2, -SIGKILL, "")
    actions = _all_done(conductor, [0, 1], 2, aborted=3)
    if not exit_first:
        conductor.exited(2, -SIGKILL, "")
    assert Start(3) in actions
    row = conductor.rows[2]
    assert row.world_size == 2
    assert [(event.kind, event.peer) for event in row.events] == [("lost", 2), ("retried", None)]
    assert (row.sent_bytes, row.received_bytes, row.seconds) == (200, 20, 2.0)
    assert conductor.killed is not None
    assert conductor.killed.aborted == {0: 3, 1: 3}
    assert conductor.problems == []


def test_whole_run() -> None:
    conductor = _conductor()
    _kill(conductor)
    conductor.exited(2, -SIGKILL, "")
    _all_done(conductor, [0, 1], 2, aborted=2)
    _all_done(conductor, [0, 1], 3)
    conductor.receive(Synced(peer=3, step=3, sent_bytes=0, received_bytes=2_000_000, seconds=0.5), 3.5)
    conductor.receive(_done(0, 4, 3, admitted=1), 4.0)
    conductor.receive(_done(3, 4, 3), 4.0)
    assert conductor.receive(_done(0, 5, 3), 4.0) == []
    assert [type(action) for action in conductor.receive(_done(1, 4, 3, admitted=1), 4.0)] == [Show]
    assert [event.kind for event in conductor.rows[4].events] == ["joined"]
    assert "2.0 MB" in conductor.rows[4].events[0].text
    for peer in (1, 3):
        conductor.receive(_done(peer, 5, 3), 5.0)
    _all_done(conductor, [0, 1, 3], 6)
    for peer in (3, 0, 1):
        assert not conductor.over
        conductor.receive(Finished(peer=peer, step=6, revision=6, digest="ab"), 6.0)
        conductor.exited(peer, 0, "")
    assert conductor.over
    assert conductor.problems == []
    assert [row.world_size for row in conductor.rows] == [3, 3, 2, 2, 3, 3, 3]
    assert [row.agreed for row in conductor.rows] == [True] * 7
    assert [survivor.peer for survivor in conductor.survivors] == [0, 1, 3]


def test_unplanned_loss() -> None:
    conductor = _conductor(Plan(peers=3, steps=6, kill=False, join=False))
    _all_done(conductor, [0, 1, 2], 0)
    conductor.receive(_done(1, 1, 3), 1.0)
    conductor.exited(1, 1, "Traceback\nValueError: boom")
    assert conductor.problems == ["peer 1 ended by itself with exit code 1: Traceback\nValueError: boom"]
    assert not conductor.over
    _all_done(conductor, [0, 2], 1, aborted=1)
    row = conductor.rows[1]
    assert [(event.kind, event.peer) for event in row.events] == [("lost", None), ("retried", None)]


def test_loss_before_training_gives_up() -> None:
    conductor = _conductor()
    conductor.exited(0, 1, "ImportError")
    assert conductor.over
    assert len(conductor.problems) == 2


def test_timeout_names_positions() -> None:
    conductor = _conductor()
    _all_done(conductor, [0, 1, 2], 0)
    conductor.receive(At(peer=0, step=1, doing="reducing", launched=4), 3.0)
    conductor.receive(At(peer=1, step=1, doing="training"), 3.0)
    conductor.receive(At(peer=2, step=1, doing="syncing"), 3.0)
    assert conductor.deadline_s() == 10.0
    conductor.overdue(9.9)
    assert not conductor.over
    conductor.overdue(10.0)
    assert conductor.over
    assert conductor.problems == [
        "no step has ended for 10 s: peer 0 is in the all-reduce of step 1; peer 1 trains in step 1; "
        "peer 2 is in sync_shared_state before step 1"
    ]


def test_end_of_master() -> None:
    conductor = _conductor()
    conductor.master_exited(1, "address in use")
    assert conductor.over
    assert conductor.problems == ["the master ended with exit code 1: address in use"]
