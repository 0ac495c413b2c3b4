"""Processes join, leave and return while others work."""

from __future__ import annotations

from typing import Any

from pccl import MasterNode
from tests.processes.conftest import Run, Start
from tests.processes.harness import Worker


def hear_world(worker: Worker, world: int) -> None:
    while worker.hear().get("world") != world:
        pass


def result_of(worker: Worker) -> Any:
    while "seconds" not in (message := worker.hear()):
        pass
    return message.get("value") or message


def test_join_and_kill_in_the_usual_loop(start: Start, master: MasterNode) -> None:
    first, second, third, fourth = workers = start(4)
    loop: dict[str, Any] = {"master": master.address, "busiest": 4, "tail": 50}
    first.begin("usual_loop", **loop)
    second.begin("usual_loop", **loop)
    hear_world(first, 2)
    for worker in (third, fourth):
        worker.begin("usual_loop", **loop)
    hear_world(first, 4)
    first.kill()
    found = [result_of(worker) for worker in workers[1:]]
    assert found[0] == found[1] == found[2]
    assert found[0][1] > 50


def test_process_leaves_and_rejoins(run: Run, master: MasterNode) -> None:
    stays, returns = run(2)
    for _ in range(3):
        returns.do("close")
        assert returns.ask("world").error == "NOT_INITIALIZED"
        while stays.do("world") != 1:
            stays.do("update_topology")
        returns.begin("connect", master=master.address)
        stays.do("gather", world=2)
        assert returns.answer().error == ""
        for worker in (stays, returns):
            worker.do("array", name="x", count=100, value=1)
            worker.begin("all_reduce", name="x")
        assert [worker.answer().value for worker in (stays, returns)] == [2, 2]
