"""Stopped processes are evicted after the peer timeout; busy ones are not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pccl import MasterNode
from pccl.flight_recorder import collect
from pccl.runtime.master import requests
from tests.processes.conftest import Run, Start
from tests.processes.harness import Worker
from tests.support.cluster import WAIT_S, until

PEER_TIMEOUT_S = 2.0
HOLD_S = 5
COUNT = 2**20


@pytest.fixture
def master() -> Iterator[MasterNode]:
    with MasterNode("127.0.0.1:0", peer_timeout=PEER_TIMEOUT_S) as node:
        yield node


def silent_s(text: str) -> float:
    """Return the seconds of silence in an error's text."""
    found = re.search(r"silent for (\d+\.\d)", text)
    assert found is not None, text
    return float(found[1])


def _reduce(workers: list[Worker]) -> list[int]:
    for worker in workers:
        worker.do("array", name="x", count=COUNT, value=1)
        worker.begin("all_reduce", name="x")
    answers = [worker.answer() for worker in workers]
    assert [answer.error for answer in answers] == [""] * len(workers)
    return [answer.value for answer in answers]


def _rejoin(worker: Worker, others: list[Worker], master: MasterNode) -> None:
    worker.begin("connect", master=master.address)
    for other in others:
        other.begin("gather", world=len(others) + 1)
    assert [each.answer().error for each in (worker, *others)] == [""] * (len(others) + 1)


@pytest.mark.parametrize("call", ["all_reduce", "update_topology"])
def test_stopped_peer_is_evicted_and_rejoins(run: Run, master: MasterNode, call: str) -> None:
    *others, victim = run(3)
    for worker in (*others, victim):
        worker.do("array", name="x", count=COUNT, value=1)
    victim.begin("all_reduce", name="x")
    victim.until_asleep()
    victim.stop()
    arguments = {"name": "x"} if call == "all_reduce" else {}
    for worker in others:
        worker.begin(call, **arguments)
    answers = [worker.answer() for worker in others]
    if call == "all_reduce":
        assert {answer.error for answer in answers} <= {"RANK_CONNECTION_LOST", ""}
        if answers[0].error:
            assert silent_s(answers[0].text) >= PEER_TIMEOUT_S
    else:
        assert [answer.error for answer in answers] == ["", ""]
    assert _reduce(others) == [2, 2]

    victim.resume()
    evicted = victim.answer()
    assert evicted.error == "MASTER_CONNECTION_FAILED"
    assert "evicted: silent for" in evicted.text
    assert silent_s(evicted.text) >= PEER_TIMEOUT_S
    victim.do("close")
    _rejoin(victim, others, master)
    assert _reduce([*others, victim]) == [3, 3, 3]


def test_peer_that_holds_the_gil_is_not_evicted(run: Run, tmp_path: Path) -> None:
    *others, busy = run(3)
    for number, worker in enumerate((*others, busy)):
        worker.do("array", name="x", count=COUNT, value=1 + number)
        worker.do("array", name="sum", count=COUNT, file=str(tmp_path / f"sum {number}"))
    sums = [np.memmap(tmp_path / f"sum {number}", np.float32, "r") for number in range(3)]
    busy.begin("background", command="all_reduce", name="x", into="sum")
    assert not busy.answer().error
    until(lambda: busy.do("stats") == 1, "its engine has the op")
    busy.begin("hold_python", seconds=HOLD_S)
    for worker in others:
        worker.begin("all_reduce", name="x", into="sum")
    until(lambda: all((each == 6).all() for each in sums), "all sums are there", limit_s=HOLD_S)
    assert [worker.answer().value for worker in others] == [3, 3]
    answers = [busy.hear(), busy.hear()]
    assert {answer.get("background"): answer["value"] for answer in answers} == {None: None, "all_reduce": 3}
    assert next(answer["seconds"] for answer in answers if "background" not in answer) >= HOLD_S
    assert [worker.do("world") for worker in (*others, busy)] == [3, 3, 3]


def test_stopped_master_is_given_up(start: Start, run: Run) -> None:
    (host,) = start(1)
    address = host.do("listen", peer_timeout=PEER_TIMEOUT_S)
    one, other = run(2, address)
    one.do("array", name="x", count=COUNT, seed=1)
    before = one.do("digest", name="x")
    one.begin("all_reduce", name="x")
    other.begin("update_topology")
    for worker in (one, other):
        worker.until_asleep()
    host.stop()
    for worker in (one, other):
        answer = worker.answer()
        assert answer.error == "MASTER_CONNECTION_FAILED"
        assert f"the master at {address} was silent for" in answer.text
        assert silent_s(answer.text) >= PEER_TIMEOUT_S
    assert one.do("digest", name="x") == before
    host.resume()
    _rejoin_all(address, [one, other])
    assert _reduce([one, other]) == [2, 2]


def _rejoin_all(address: str, workers: list[Worker]) -> None:
    for world, worker in enumerate(workers, 1):
        worker.do("close")
        worker.begin("connect", master=address, master_timeout=WAIT_S)  # it looks for peers of its run first
        for other in workers[: world - 1]:
            other.begin("gather", world=world)
        assert [each.answer().error for each in workers[:world]] == [""] * world


def test_stopped_peer_is_named_in_a_trace(run: Run, master: MasterNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "ANSWER_S", 0.2)
    one, stopped = run(2)
    stopped.stop()
    trace = collect(master.address)
    (lacking,) = (peer for peer in trace.peers if peer.recording is None)
    assert lacking.lack == "it did not answer within 0.2 s"
    assert str(stopped.process.pid) in lacking.name
    assert one.is_running
