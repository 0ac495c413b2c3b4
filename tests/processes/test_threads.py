"""Processes with several engine threads each: killed mid-reduce, and forked."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from pccl import MasterNode
from tests.processes.harness import Worker
from tests.processes.test_kill import attempts_of, hear_iteration, start_loops
from tests.support.cluster import until

Run = Callable[..., list[Worker]]


@pytest.fixture
def master() -> Iterator[MasterNode]:
    with MasterNode("127.0.0.1:0", engine_threads=2) as node:
        yield node


def test_survivors_of_a_kill_keep_equal_results_and_inputs(run: Run) -> None:
    workers = run(3)
    start_loops(workers)
    hear_iteration(workers[1], 4)
    workers[1].kill()
    attempts = [attempts_of(worker) for worker in (workers[0], workers[2])]
    one, other = ([end for end in ends if end["verdict"] == "SUCCESS"] for ends in attempts)
    assert one == other
    assert [end["world"] for end in one][-3:] == [3, 2, 2]
    aborted = [end for ends in attempts for end in ends if end["verdict"] != "SUCCESS"]
    assert all(end["verdict"] == "RANK_CONNECTION_LOST" and end["restored"] for end in aborted), aborted


def test_child_of_a_fork_keeps_no_connection_alive(run: Run) -> None:
    parent, other = run(2)
    child = parent.do("fork", commands=[], then="sleep")
    try:
        parent.kill()
        until(lambda: other.do("world") == 1, "the parent is missed")
    finally:
        os.kill(child, signal.SIGKILL)
