"""A forked child has no part in the run: its calls fail, the parent's go on, and it keeps no connection alive.

Over real processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from pccl import MasterNode
from tests.processes.conftest import Run, Start
from tests.support.cluster import until

PROMPT_S = 10.0


@pytest.fixture
def master() -> Iterator[MasterNode]:
    """A master whose peers have two engine threads each."""
    with MasterNode("127.0.0.1:0", engine_threads=2) as node:
        yield node


def test_calls_in_a_forked_child_fail(run: Run) -> None:
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
    ]
    parent.begin("fork", commands=commands, then="exit")
    messages = [parent.hear() for _ in range(len(commands) + 1)]
    (child,) = (message["value"] for message in messages if "child" not in message)
    answers = [message.get("error") or message["value"] for message in messages if "child" in message]
    assert answers == ["NOT_INITIALIZED"] * 9 + [None]
    assert all("parent process" in message.get("text", "parent process") for message in messages)
    assert parent.do("join_child", pid=child) == 0
    other.do("launch", name="x", tag=7)
    assert [worker.do("wait", tag=7) for worker in (parent, other)] == ["SUCCESS", "SUCCESS"]
    assert [worker.do("world") for worker in (parent, other)] == [2, 2]


def test_forked_child_can_be_a_peer_of_its_own(run: Run, master: MasterNode) -> None:
    parent, other = run(2)
    connect = {"do": "connect", "master": master.address}
    parent.begin("fork", commands=[connect, {"do": "world"}], then="exit")
    child = parent.answer().value
    for worker in (parent, other):
        worker.begin("gather", world=3)
    messages = [parent.hear() for _ in range(3)]
    assert [message.get("value") for message in messages if message.get("child")] == [None, 3]
    assert other.answer().error == ""
    assert parent.do("join_child", pid=child) == 0
    until(lambda: [worker.do("world") for worker in (parent, other)] == [2, 2], "the child has left")


def test_fork_keeps_no_connection_of_a_killed_peer_alive(run: Run) -> None:
    parent, other = run(2)
    child = parent.do("fork", commands=[], then="sleep")
    try:
        parent.kill()
        until(lambda: other.do("world") == 1, "the loss is noticed", limit_s=PROMPT_S)
    finally:
        os.kill(child, signal.SIGKILL)


def test_fork_keeps_no_connection_of_a_killed_master_alive(start: Start, run: Run) -> None:
    (host,) = start(1)
    (peer,) = run(1, host.do("listen"))
    child = host.do("fork", commands=[], then="sleep")
    try:
        host.kill()
        until(lambda: peer.ask("world").error == "MASTER_CONNECTION_FAILED", "the loss is noticed", limit_s=PROMPT_S)
    finally:
        os.kill(child, signal.SIGKILL)
