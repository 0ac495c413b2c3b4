"""Processes end, fork and wait without hanging, without disturbing others, without burning time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from pccl import MasterNode
from tests.processes.conftest import Start
from tests.processes.harness import Worker
from tests.support.cluster import WAIT_S, until

Run = Callable[..., list[Worker]]

PROMPT_S = 3.0


def until_alone(worker: Worker) -> None:
    until(lambda: worker.do("world") == 1, "the loss is noticed", limit_s=PROMPT_S)


# Ending.


def test_exit_without_close_is_quick_and_a_leave(run: Run) -> None:
    stays, ends = run(2)
    stays.do("array", name="x", count=1000)
    stays.do("launch", name="x", tag=5)
    until(lambda: stays.do("stats") == 1, "the op is under way")
    stays.begin("result", tag=5)
    start_s = time.monotonic()
    assert ends.end() == 0
    assert time.monotonic() - start_s < PROMPT_S
    answer = stays.answer(PROMPT_S)
    assert (answer.error, "left" in answer.text) == ("RANK_CONNECTION_LOST", True)
    assert ends.stderr == ""


@pytest.mark.parametrize("command", ["all_reduce", "update_topology", "sync"])
def test_exit_while_a_call_waits_in_another_thread_is_quick(run: Run, command: str) -> None:
    stays, ends = run(2)
    ends.do("array", name="x", count=1000)
    ends.do("state", name="s", arrays=["x"])
    ends.do("launch", name="x", tag=5)
    if command != "all_reduce":  # the others exclude ops in flight
        stays.do("array", name="x", count=1000)
        stays.do("launch", name="x", tag=5)
        assert ends.do("wait", tag=5) == "SUCCESS"
    needs: dict[str, dict[str, Any]] = {"all_reduce": {"name": "x"}, "sync": {"name": "s"}}
    ends.do("background", command=command, **needs.get(command, {}))
    start_s = time.monotonic()
    assert ends.end() == 0
    assert time.monotonic() - start_s < PROMPT_S
    until_alone(stays)
    assert ends.stderr == ""


OVERTAKEN = """
import atexit, os, sys, threading
over, hashing = threading.Event(), threading.Event()
atexit.register(over.wait, 60)  # the last to be called
import numpy, pccl
from pccl import _session_holder

def fingerprint(tensors):
    hashing.set()
    threading.Event().wait()

def call():
    try:
        peer.sync_shared_state(pccl.SharedState.from_numpy({"x": numpy.zeros(10)}))
    except pccl.PCCLError as error:
        os.write(1, str(error).encode())
    over.set()

_session_holder.fingerprint = fingerprint
peer = pccl.Communicator(sys.argv[1])
peer.connect()
threading.Thread(target=call, daemon=True).start()
hashing.wait()
"""


def test_a_call_that_the_exit_overtakes_fails_as_any_other(master: MasterNode) -> None:
    command = [sys.executable, "-P", "-c", OVERTAKEN, master.address]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "sync_shared_state: NOT_INITIALIZED: the interpreter is exiting"


def test_exit_after_the_master_has_died_is_quick(start: Start, run: Run) -> None:
    (master,) = start(1)
    workers = run(2, master.do("listen"))
    master.kill()
    start_s = time.monotonic()
    assert [worker.end() for worker in workers] == [0, 0]
    assert time.monotonic() - start_s < PROMPT_S


def test_exit_while_the_master_hangs_is_quick(start: Start, run: Run) -> None:
    (master,) = start(1)
    (one, other) = run(2, master.do("listen"))
    master.stop()
    one.do("background", command="update_topology")
    other.do("array", name="x", count=1000)
    other.do("background", command="all_reduce", name="x")
    start_s = time.monotonic()
    assert [worker.end() for worker in (one, other)] == [0, 0]
    assert time.monotonic() - start_s < 2 * PROMPT_S
    assert one.stderr == other.stderr == ""


def test_exit_of_a_process_that_runs_its_master_and_a_peer_is_quick(start: Start) -> None:
    (worker, other) = start(2)
    address = worker.do("listen")
    worker.do("connect", master=address)
    other.begin("connect", master=address)
    worker.do("gather", world=2)
    assert other.answer().error == ""
    start_s = time.monotonic()
    worker.do("interrupt_master")
    assert worker.end() == 0
    assert time.monotonic() - start_s < PROMPT_S
    until(lambda: other.ask("world").error == "MASTER_CONNECTION_FAILED", "the master is missed", limit_s=PROMPT_S)


def test_a_communicator_that_is_garbage_collected_leaves(run: Run) -> None:
    stays, forgets = run(2)
    forgets.do("forget")
    until_alone(stays)
    stays.do("update_topology")


# Forking.


def test_calls_in_a_forked_child_fail_and_its_exit_disturbs_nobody(run: Run) -> None:
    parent, other = run(2)
    for worker in (parent, other):
        worker.do("array", name="x", count=1000, value=1)
        worker.do("state", name="s", arrays=["x"])
    parent.do("launch", name="x", tag=7)
    commands: list[dict[str, Any]] = [
        {"do": "world"},
        {"do": "all_reduce", "name": "x"},
        {"do": "launch", "name": "x", "tag": 1},
        {"do": "all_reduce_multiple", "names": ["x"]},
        {"do": "update_topology"},
        {"do": "are_peers_pending"},
        {"do": "sync", "name": "s"},
        {"do": "stats"},
        {"do": "wait", "tag": 7},
        {"do": "close"},
        {"do": "close"},
    ]
    parent.begin("fork", commands=commands, then="exit")
    answers: dict[int, Any] = {}
    child = 0
    for _ in range(len(commands) + 1):
        message = parent.hear()
        if not message.pop("child", False):
            child = message["value"]
        else:
            answers[len(answers)] = message.get("error") or message["value"]
            if "text" in message:
                assert "parent process" in message["text"] or "closed" in message["text"]
    assert list(answers.values()) == ["NOT_INITIALIZED"] * 9 + [None, None], answers
    assert parent.do("join_child", pid=child) == 0
    other.do("launch", name="x", tag=7)
    assert [worker.do("wait", tag=7) for worker in (parent, other)] == ["SUCCESS", "SUCCESS"]
    assert [worker.do("world") for worker in (parent, other)] == [2, 2]


def test_a_forked_child_can_be_a_peer_of_its_own(run: Run, master: MasterNode) -> None:
    parent, other = run(2)
    connect = {"do": "connect", "master": master.address}
    parent.begin("fork", commands=[connect, {"do": "world"}], then="exit")
    child = parent.answer().value
    for worker in (parent, other):
        worker.begin("gather", world=3)
    said = [parent.hear() for _ in range(3)]
    assert [message.get("value") for message in said if message.get("child")] == [None, 3]
    assert other.answer().error == ""
    assert parent.do("join_child", pid=child) == 0
    until(lambda: [worker.do("world") for worker in (parent, other)] == [2, 2], "the child has left")


def test_a_killed_parent_is_missed_although_its_child_lives_on(run: Run) -> None:
    parent, other = run(2)
    child = parent.do("fork", commands=[], then="sleep")
    try:
        parent.kill()
        until_alone(other)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_killed_master_is_missed_although_its_child_lives_on(start: Start, run: Run) -> None:
    (master,) = start(1)
    (peer,) = run(1, master.do("listen"))
    child = master.do("fork", commands=[], then="sleep")
    try:
        master.kill()
        until(lambda: peer.ask("world").error == "MASTER_CONNECTION_FAILED", "the loss is noticed", limit_s=PROMPT_S)
    finally:
        os.kill(child, signal.SIGKILL)


# Waiting.


def test_waiting_takes_no_processor_time(run: Run) -> None:
    one, other = run(2)
    one.do("array", name="x", count=4 * 2**20)
    other.stop()
    waits: dict[str, dict[str, Any]] = {"update_topology": {}, "all_reduce": {"name": "x"}}
    for command, arguments in waits.items():
        before_s = one.do("cpu_s")
        assert one.ask(command, timeout=1.0, **arguments).error == "TIMEOUT"
        assert one.do("cpu_s") - before_s < 0.25, f"{command} does not sleep"
    other.resume()
