"""A process that ends, in whatever call, ends at once and leaves the run. Over real processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes.conftest import Run, Start
from tests.processes.harness import Worker
from tests.support.cluster import WAIT_S, until


def until_alone(worker: Worker) -> None:
    until(lambda: worker.do("world") == 1, "the other has left")


def test_exit_without_close_aborts_ops(run: Run) -> None:
    stays, ends = run(2)
    stays.do("array", name="x", count=1000)
    stays.do("launch", name="x", tag=5)
    until(lambda: stays.do("stats") == 1, "the op is in flight")
    stays.begin("result", tag=5)
    assert ends.end() == 0
    answer = stays.answer(WAIT_S)
    assert (answer.error, "left" in answer.text) == ("RANK_CONNECTION_LOST", True)
    assert ends.stderr == ""


@pytest.mark.parametrize("command", ["all_reduce", "update_topology", "sync"])
def test_exit_while_a_call_waits_in_another_thread(run: Run, command: str) -> None:
    stays, ends = run(2)
    ends.do("array", name="x", count=1000)
    ends.do("state", name="s", arrays=["x"])
    if command == "all_reduce":
        ends.do("launch", name="x", tag=5)
    needs: dict[str, dict[str, Any]] = {"all_reduce": {"name": "x"}, "sync": {"name": "s"}}
    ends.do("background", command=command, **needs.get(command, {}))
    assert ends.end() == 0
    until_alone(stays)
    assert ends.stderr == ""


@pytest.mark.parametrize("fate", ["killed", "stopped"])
def test_exit_without_a_master(start: Start, run: Run, fate: str) -> None:
    (master,) = start(1)
    one, other = run(2, master.do("listen"))
    if fate == "killed":
        master.kill()
    else:
        master.stop()
        one.do("background", command="update_topology")
        other.do("array", name="x", count=1000)
        other.do("background", command="all_reduce", name="x")
    assert [worker.end() for worker in (one, other)] == [0, 0]
    if fate == "stopped":  # a lost master is logged
        assert one.stderr == other.stderr == ""


def test_exit_of_a_process_with_master_and_peer(start: Start) -> None:
    worker, other = start(2)
    address = worker.do("listen")
    worker.do("connect", master=address)
    other.begin("connect", master=address)
    worker.do("gather", world=2)
    assert other.answer().error == ""
    worker.do("interrupt_master")
    assert worker.end() == 0
    until(lambda: other.ask("world").error == "MASTER_CONNECTION_FAILED", "the master is missed")


def test_garbage_collected_communicator_leaves(run: Run) -> None:
    stays, forgets = run(2)
    forgets.do("forget")
    until_alone(stays)
    stays.do("update_topology")
