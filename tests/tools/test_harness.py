"""Child processes and their messages."""

from __future__ import annotations

import os
import queue
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from pccl.tools.harness import Child, Event, Guard
from tests.support.streams import TIMEOUT_S

Start = Callable[[str], Child]

LINES, LENGTH = 40, 1_000_000
TALKER = f"""
import sys
from pccl.tools.harness import send
for number in range({LINES}):
    send("%d" % number * {LENGTH})
"""


@pytest.fixture
def events() -> queue.SimpleQueue[Event]:
    return queue.SimpleQueue()


@pytest.fixture
def start(events: queue.SimpleQueue[Event]) -> Iterator[Start]:
    """Python code as a child whose output is not buffered."""
    with ExitStack() as stack:
        guard = stack.enter_context(Guard())
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}

        def start(code: str) -> Child:
            command = [sys.executable, "-P", "-c", code]
            child = Child("child", command, guard=guard, events=events, environment=environment)
            stack.callback(child.close)
            stack.callback(child.popen.kill)
            return child

        yield start


def test_partial_line_of_killed_child_is_dropped(start: Start, events: queue.SimpleQueue[Event]) -> None:
    child = start("import os, signal; os.write(1, b'one\\ntw'); os.kill(os.getpid(), signal.SIGKILL)")
    assert [events.get(timeout=TIMEOUT_S) for _ in range(2)] == [(child, b"one\n"), (child, -signal.SIGKILL)]


def test_lines_are_whole_when_writer_is_stopped(start: Start, events: queue.SimpleQueue[Event]) -> None:
    child = start(TALKER)
    lines: list[bytes] = []
    while isinstance(what := events.get(timeout=TIMEOUT_S)[1], bytes):
        lines.append(what)
        for _ in range(5):
            child.popen.send_signal(signal.SIGSTOP)
            with suppress(ChildProcessError):  # it has ended, and was waited for
                os.waitid(os.P_PID, child.popen.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            child.popen.send_signal(signal.SIGCONT)
    assert what == 0, child.last_errors()
    assert lines == [b'"%s"\n' % (b"%d" % number * LENGTH) for number in range(LINES)]
