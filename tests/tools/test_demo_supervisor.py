"""The decisions of the demo's supervisor, without processes."""

from __future__ import annotations

from signal import SIGKILL
from typing import Any

import pytest

from pccl.tools.demo.plan import At, Finished, Message, Plan, StepDone
from pccl.tools.demo.report import Report
from pccl.tools.demo.supervisor import Supervisor

PLAN = Plan(peers=3, steps=6, step_timeout_s=10)  # peer 2 is killed in step 2, peer 3 joins in step 4


class FakeChild:
    """A process that records its kill."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.errors = ""
        self.is_killed = False

    @property
    def popen(self) -> FakeChild:
        return self

    def kill(self) -> None:
        self.is_killed = True

    def last_errors(self) -> str:
        return self.errors


class Demo:
    """A supervisor over fake processes; also its display."""

    def __init__(self, plan: Plan = PLAN) -> None:
        self.children: list[FakeChild] = []
        self.shown: list[int] = []
        this: Any = self
        self.supervisor = Supervisor(plan, this, this)
        self.supervisor.start()
        assert [child.name for child in self.children] == [f"peer {peer}" for peer in range(plan.peers)]

    def start(self, name: str, module: str, options: str) -> FakeChild:
        self.children.append(FakeChild(name))
        return self.children[-1]

    def row(self, row: Any) -> None:
        self.shown.append(row.step)

    def receive(self, message: Message) -> None:
        child: Any = self.children[message.peer]
        self.supervisor.receive(child, message)

    def exited(self, peer: int, returncode: int, errors: str = "") -> None:
        child: Any = self.children[peer]
        child.errors = errors
        self.supervisor.exited(child, returncode)

    def done(self, peers: list[int], step: int, world_size: int = 0, *, admitted: int = 0, aborted: int = 0) -> None:
        for peer in peers:
            self.receive(
                StepDone(
                    peer=peer,
                    step=step,
                    world_size=world_size or len(peers),
                    admitted=admitted,
                    aborted=aborted,
                    sent_bytes=100,
                    received_bytes=10,
                    seconds=1.0 + peer,
                    state_bytes=2_000_000,
                    sync_seconds=0.5,
                    bits_per_byte=8.0 - step if peer == 0 else None,
                )
            )

    def reducing(self, peer: int, launched: int, step: int = 2) -> None:
        self.receive(At(peer=peer, step=step, doing="reducing", launched=launched))

    def kill(self) -> None:
        for step in (0, 1):
            self.done([0, 1, 2], step)
        self.reducing(2, 2)
        self.reducing(0, 4)
        self.reducing(1, 4, step=1)
        assert not self.children[2].is_killed
        self.reducing(1, 4)
        assert [child.is_killed for child in self.children] == [False, False, True]

    @property
    def report(self) -> Report:
        return self.supervisor.report(unigram_bits=4.7)


def test_kill_when_all_peers_reduce() -> None:
    demo = Demo()
    demo.kill()
    killed = demo.report.killed
    assert killed is not None
    assert (killed.peer, killed.launched, killed.of) == (2, 2, 4)


@pytest.mark.parametrize("exit_first", [True, False])
def test_row_of_the_kill(exit_first: bool) -> None:
    demo = Demo()
    demo.kill()
    if exit_first:
        demo.exited(2, -SIGKILL)
    demo.done([0, 1], 2, aborted=3)
    if not exit_first:
        demo.exited(2, -SIGKILL)
    assert demo.children[-1].name == "peer 3"
    report = demo.report
    row = report.rows[2]
    assert row.world_size == 2
    assert [(event.kind, event.peer) for event in row.events] == [("lost", 2), ("retried", None)]
    assert (row.sent_bytes, row.received_bytes, row.seconds) == (200, 20, 2.0)
    assert report.killed is not None
    assert report.killed.aborted == {0: 3, 1: 3}
    assert report.problems == []


def test_whole_run() -> None:
    demo = Demo()
    demo.kill()
    demo.exited(2, -SIGKILL)
    demo.done([0, 1], 2, aborted=2)
    demo.done([0, 1], 3)
    demo.done([0, 3], 4, 3, admitted=1)
    demo.done([0], 5, 3)
    assert demo.shown == [0, 1, 2, 3]
    demo.done([1], 4, 3, admitted=1)
    assert demo.shown == [0, 1, 2, 3, 4]
    demo.done([1, 3], 5, 3)
    demo.done([0, 1, 3], 6)
    for peer in (3, 0, 1):
        assert not demo.supervisor.over
        demo.receive(Finished(peer=peer, step=6, revision=6, digest="ab"))
        demo.exited(peer, 0)
    assert demo.supervisor.over
    report = demo.report
    assert report.problems == []
    assert [event.kind for event in report.rows[4].events] == ["joined"]
    assert "2.0 MB" in report.rows[4].events[0].text
    assert [row.world_size for row in report.rows] == [3, 3, 2, 2, 3, 3, 3]
    assert [row.agreed for row in report.rows] == [True] * 7
    assert [survivor.peer for survivor in report.survivors] == [0, 1, 3]


def test_unplanned_loss() -> None:
    demo = Demo(Plan(peers=3, steps=6, kill=False, join=False))
    demo.done([0, 1, 2], 0)
    demo.done([1], 1, 3)
    demo.exited(1, 1, "Traceback\nValueError: boom")
    assert demo.report.problems == ["peer 1 exited unexpectedly with exit code 1: Traceback\nValueError: boom"]
    assert not demo.supervisor.over
    demo.done([0, 2], 1, aborted=1)
    assert [(event.kind, event.peer) for event in demo.report.rows[1].events] == [("lost", None), ("retried", None)]


def test_loss_before_training_gives_up() -> None:
    demo = Demo()
    demo.exited(0, 1, "ImportError")
    assert demo.supervisor.over
    assert len(demo.report.problems) == 2


def test_timeout_names_positions() -> None:
    demo = Demo()
    demo.done([0, 1, 2], 0)
    demo.reducing(0, 4, step=1)
    demo.receive(At(peer=1, step=1, doing="training"))
    demo.receive(At(peer=2, step=1, doing="syncing"))
    demo.supervisor.give_up_without_progress()
    assert demo.supervisor.over
    assert demo.report.problems == [
        "no step has ended for 10 s: peer 0 is in the all-reduce of step 1; peer 1 trains in step 1; "
        "peer 2 is in sync_shared_state before step 1"
    ]
