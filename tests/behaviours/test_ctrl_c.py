"""Ctrl-C in a call that waits ends it within a second, withdraws it on all peers, and leaves arrays unchanged.

Over real processes and signals.
"""

from __future__ import annotations

import re
import socket
from typing import Any

import pytest

from pccl import MasterNode
from tests.processes.conftest import Run, Start
from tests.processes.harness import Worker
from tests.support.cluster import until

PROMPT_S = 10.0
"""A second, on a loaded machine; a call that Ctrl-C does not end waits for ever."""


def ctrl_c(worker: Worker, command: str, **arguments: Any) -> None:
    """Interrupt the command while it waits."""
    worker.begin(command, **arguments)
    worker.until_asleep()
    worker.interrupt()
    assert worker.answer(PROMPT_S).error == "KeyboardInterrupt"


def all_reduce_succeeds(workers: list[Worker]) -> None:
    for worker in workers:
        worker.begin("all_reduce", name="x")
    assert [worker.answer().value for worker in workers] == [len(workers)] * len(workers)


@pytest.mark.parametrize("call", ["all_reduce", "all_reduce_multiple"])
def test_ctrl_c_aborts_an_op_on_all_peers(run: Run, call: str) -> None:
    one, other = run(2)
    for worker in (one, other):
        worker.do("array", name="x", count=4 * 2**20, seed=1)
    before = one.do("digest", name="x")
    arguments: dict[str, Any] = {"name": "x"} if call == "all_reduce" else {"names": ["x"]}
    ctrl_c(one, call, **arguments)
    assert one.do("digest", name="x") == before
    answer = other.ask(call, **arguments)
    assert answer.error == "TIMEOUT"
    assert re.search(r"peer 1 \(.*\) gave up the op with tag", answer.text)
    all_reduce_succeeds([one, other])


def test_ctrl_c_in_handle_wait_leaves_the_op_in_flight(run: Run) -> None:
    one, other = run(2)
    for worker in (one, other):
        worker.do("array", name="x", count=1000, value=1)
    one.do("launch", name="x", tag=3)
    ctrl_c(one, "wait", tag=3)
    assert other.do("all_reduce", name="x", tag=3) == 2
    assert one.do("wait", tag=3) == "SUCCESS"


@pytest.mark.parametrize("call", ["update_topology", "are_peers_pending", "optimize_topology", "sync"])
def test_ctrl_c_withdraws_a_group_call(run: Run, call: str) -> None:
    workers = run(2)
    for worker in workers:
        worker.do("array", name="x", count=10)
        worker.do("state", name="s", arrays=["x"])
    arguments = {"name": "s"} if call == "sync" else {}
    ctrl_c(workers[0], call, **arguments)
    for worker in workers:
        worker.begin(call, **arguments)
    assert [worker.answer().error for worker in workers] == ["", ""]


def test_ctrl_c_withdraws_a_connect(run: Run, start: Start, master: MasterNode) -> None:
    (accepted,) = run(1)
    (newcomer,) = start(1)
    ctrl_c(newcomer, "connect", master=master.address)
    until(lambda: not accepted.do("are_peers_pending"), "the newcomer has withdrawn")
    newcomer.begin("connect", master=master.address)
    accepted.do("gather", world=2)
    assert newcomer.answer().error == ""


@pytest.mark.parametrize("server", ["closed", "silent"])
def test_ctrl_c_ends_a_connect_without_master(start: Start, server: str) -> None:
    (worker,) = start(1)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        if server == "silent":
            sock.listen()
        ctrl_c(worker, "connect", master=f"127.0.0.1:{sock.getsockname()[1]}", attempts=1000)


def test_ctrl_c_in_master_node_wait_keeps_the_master(start: Start) -> None:
    master, peer = start(2)
    address = master.do("listen")
    ctrl_c(master, "wait_for_master")
    peer.do("connect", master=address)
    assert peer.do("world") == 1


@pytest.mark.parametrize("call", ["all_reduce", "wait", "update_topology"])
def test_signal_handler_that_exits(run: Run, call: str) -> None:
    stays, ends = run(2)
    ends.do("array", name="x", count=1000)
    if call == "wait":
        ends.do("launch", name="x", tag=3)
    ends.do("on_terminate", how="exit")
    arguments: dict[str, dict[str, Any]] = {"all_reduce": {"name": "x"}, "wait": {"tag": 3}}
    ends.begin(call, **arguments.get(call, {}))
    ends.until_asleep()
    ends.process.terminate()
    assert ends.process.wait(PROMPT_S) == 3
    assert ends.stderr == ""
    until(lambda: stays.do("world") == 1, "the process has left", limit_s=PROMPT_S)


def test_signal_handler_that_raises_or_closes(run: Run) -> None:
    stays, other = run(2)
    for worker in (stays, other):
        worker.do("array", name="x", count=1000, value=1)
    before = other.do("digest", name="x")
    for how, raised in (("raise", "ZeroDivisionError"), ("close", "NOT_INITIALIZED")):
        other.do("on_terminate", how=how)
        other.begin("all_reduce", name="x", tag=1)
        other.until_asleep()
        other.process.terminate()
        assert other.answer(PROMPT_S).error == raised
        if how == "raise":
            assert other.do("digest", name="x") == before
            all_reduce_succeeds([stays, other])
    assert other.end() == 0
