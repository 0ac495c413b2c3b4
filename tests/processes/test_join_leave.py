"""Processes come and go while others work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pccl import MasterNode
from tests.processes.conftest import Start
from tests.processes.harness import Worker
from tests.support.cluster import until

Run = Callable[..., list[Worker]]


def hear_world(worker: Worker, world: int) -> None:
    while worker.hear().get("world") != world:
        pass


def sees(worker: Worker, world: int) -> bool:
    return bool(worker.do("world") == world)


def result_of(worker: Worker) -> Any:
    while "seconds" not in (message := worker.hear()):
        pass
    return message.get("value") or message


def test_newcomers_join_and_peers_die_in_the_usual_loop(start: Start, master: MasterNode) -> None:
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


def test_a_process_leaves_and_comes_back_with_a_new_communicator(run: Run, master: MasterNode) -> None:
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


def test_a_process_that_is_killed_is_replaced(run: Run, start: Start, master: MasterNode) -> None:
    workers = run(3)
    workers.pop(0).kill()
    for worker in workers:
        until(partial(sees, worker, 2), "the loss is noticed")
    workers += start(1)
    workers[2].begin("connect", master=master.address)
    for worker in workers[:2]:
        worker.begin("gather", world=3)
    assert [worker.answer().error for worker in workers] == ["", "", ""]
    for worker in workers:
        worker.do("array", name="x", count=100, value=1)
        worker.begin("all_reduce", name="x")
    assert [worker.answer().value for worker in workers] == [3, 3, 3]


@pytest.mark.parametrize("group", [0, 1])
def test_groups_see_each_other_come_and_go(run: Run, start: Start, master: MasterNode, group: int) -> None:
    (one,) = run(1)
    (other,) = start(1)
    other.begin("connect", master=master.address, peer_group=group)
    one.do("gather", world=2)
    assert other.answer().error == ""
    for worker in (one, other):
        worker.do("array", name="x", count=100, value=1)
        worker.begin("all_reduce", name="x")
    expected = ["", ""] if group == 0 else ["TOO_FEW_PEERS"] * 2
    assert [worker.answer().error for worker in (one, other)] == expected
    assert other.end() == 0
    while one.do("world") != 1:
        one.do("update_topology")
