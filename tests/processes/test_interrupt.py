"""Ctrl-C in every call that waits: the call ends with KeyboardInterrupt at once, and the others are not harmed."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pccl import MasterNode
from tests.processes.conftest import Start
from tests.processes.harness import Worker
from tests.support.cluster import until

Run = Callable[..., list[Worker]]

PROMPT_S = 3.0
"""About a second, on a machine that has other things to do as well."""


def interrupt(worker: Worker, command: str, **arguments: Any) -> None:
    """Interrupts the command while it waits, and checks that it ends as it should."""
    worker.begin(command, **arguments)
    worker.until_asleep()
    worker.interrupt()
    assert worker.answer(PROMPT_S).error == "KeyboardInterrupt"


def terminate_in(worker: Worker, how: str, command: str, **arguments: Any) -> None:
    worker.do("on_terminate", how=how)
    worker.begin(command, **arguments)
    worker.until_asleep()
    worker.process.terminate()


@pytest.mark.parametrize("command", ["all_reduce", "wait", "update_topology", "sync"])
def test_a_signal_handler_that_exits(run: Run, command: str) -> None:
    stays, ends = run(2)
    ends.do("array", name="x", count=1000)
    ends.do("state", name="s", arrays=["x"])
    if command == "wait":
        ends.do("launch", name="x", tag=3)
    needs: dict[str, dict[str, Any]] = {
        "all_reduce": {"name": "x"},
        "wait": {"tag": 3},
        "sync": {"name": "s"},
    }
    terminate_in(ends, "exit", command, **needs.get(command, {}))
    assert ends.process.wait(PROMPT_S) == 3
    assert ends.stderr == ""
    until(lambda: stays.do("world") == 1, "it has left", limit_s=PROMPT_S)


def test_a_signal_handler_that_ends_a_process_that_connects(run: Run, start: Start, master: MasterNode) -> None:
    (accepted,) = run(1)
    for how, status in (("exit", 3), ("end", 4)):
        (newcomer,) = start(1)
        terminate_in(newcomer, how, "connect", master=master.address)
        assert newcomer.process.wait(PROMPT_S) == status
        assert newcomer.stderr == ""
        until(lambda: not accepted.do("are_peers_pending"), "it is gone")


def test_signal_handlers_that_raise_or_close(run: Run) -> None:
    stays, other = run(2)
    for worker in (stays, other):
        worker.do("array", name="x", count=1000, value=1)
    before = other.do("digest", name="x")
    terminate_in(other, "raise", "all_reduce", name="x", tag=1)
    assert other.answer(PROMPT_S).error == "ZeroDivisionError"
    assert other.do("digest", name="x") == before
    terminate_in(other, "raise", "update_topology")
    assert other.answer(PROMPT_S).error == "ZeroDivisionError"
    for worker in (stays, other):
        worker.begin("all_reduce", name="x", tag=2)
    assert [worker.answer().value for worker in (stays, other)] == [2, 2]
    terminate_in(other, "close", "all_reduce", name="x", tag=2)
    assert other.answer(PROMPT_S).error == "NOT_INITIALIZED"
    assert other.end() == 0


def test_connect_that_waits_to_be_admitted(run: Run, start: Start, master: MasterNode) -> None:
    (accepted,) = run(1)
    (newcomer,) = start(1)
    interrupt(newcomer, "connect", master=master.address)
    until(lambda: not accepted.do("are_peers_pending"), "it has withdrawn")
    newcomer.begin("connect", master=master.address)
    accepted.do("gather", world=2)
    assert newcomer.answer().error == ""


@pytest.fixture
def closed_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # bound but not listening: nobody else gets it
        yield sock.getsockname()[1]


def test_connect_that_tries_again_and_again(start: Start, closed_port: int) -> None:
    (worker,) = start(1)
    interrupt(worker, "connect", master=f"127.0.0.1:{closed_port}", attempts=1000)


def test_connect_to_a_silent_server(start: Start) -> None:
    (worker,) = start(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        interrupt(worker, "connect", master=f"127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize("command", ["update_topology", "are_peers_pending", "optimize_topology", "sync"])
def test_a_group_call(run: Run, command: str) -> None:
    workers = run(2)
    for worker in workers:
        worker.do("array", name="x", count=10)
        worker.do("state", name="s", arrays=["x"])
    arguments = {"name": "s"} if command == "sync" else {}
    interrupt(workers[0], command, **arguments)
    for worker in workers:  # it has withdrawn from that call, and may make another one with the others
        worker.begin(command, **arguments)
    assert [worker.answer().error for worker in workers] == ["", ""]


def test_all_reduce_gives_its_buffer_back(run: Run) -> None:
    one, other = run(2)
    for worker in (one, other):
        worker.do("array", name="x", count=4 * 2**20, seed=1)
    before = one.do("digest", name="x")
    interrupt(one, "all_reduce", name="x")
    assert one.do("digest", name="x") == before
    # The op was aborted for all: the one that comes late hears of it, and both can go on.
    answer = other.ask("all_reduce", name="x")
    assert answer.error == "TIMEOUT"
    assert re.search(r"peer 1 \(.*\) gave up the op with tag", answer.text)
    for worker in (one, other):
        worker.begin("all_reduce", name="x")
    assert [worker.answer().value for worker in (one, other)] == [2, 2]


def test_waiting_for_a_handle_lets_the_op_go_on(run: Run) -> None:
    one, other = run(2)
    for worker in (one, other):
        worker.do("array", name="x", count=1000, value=1)
    one.do("launch", name="x", tag=3)
    interrupt(one, "wait", tag=3)
    assert other.do("all_reduce", name="x", tag=3) == 2
    assert one.do("wait", tag=3) == "SUCCESS"


def test_all_reduce_multiple_with_retry(run: Run) -> None:
    one, other = run(2)
    for worker in (one, other):
        for name in "abc":
            worker.do("array", name=name, count=1000, value=1)
    interrupt(one, "all_reduce_multiple", names=["a", "b", "c"])
    assert other.ask("all_reduce_multiple", names=["a", "b", "c"]).error == "TIMEOUT"
    for worker in (one, other):
        worker.begin("all_reduce_multiple", names=["a", "b", "c"])
    assert [worker.answer().value for worker in (one, other)] == [2, 2]


def test_waiting_for_a_master_node(start: Start) -> None:
    (master, peer) = start(2)
    address = master.do("listen")
    interrupt(master, "wait_for_master")
    peer.do("connect", master=address)  # it was not the master that was interrupted
    assert peer.do("world") == 1
