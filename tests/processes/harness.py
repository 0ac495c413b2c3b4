"""Worker processes from the test's side: start, tell, hear, stop, continue, kill."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes import fork_server
from tests.support.cluster import WAIT_S, until

WORKER = "tests.processes.worker"


@dataclass(frozen=True)
class Answer:
    """The outcome of a command: a value, or the name of the Result (or of another exception) and the text."""

    value: Any
    error: str
    text: str
    seconds: float


class Worker:
    """A process that runs `tests.processes.worker`; `within` is put before the command, and replaces itself by it."""

    def __init__(self, within: Sequence[str] = ()) -> None:
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as this does
        self._messages: queue.SimpleQueue[tuple[float, dict[str, Any] | None]] = queue.SimpleQueue()
        self.process = self._popen(within)
        self.heard_at_s = 0.0
        """Arrival of the last answer, by time.monotonic."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _popen(self, within: Sequence[str]) -> subprocess.Popen[str]:
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._stderr}
        if not within:
            return fork_server.start(WORKER, **streams)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [*within, sys.executable, "-P", "-m", WORKER]
        return subprocess.Popen(command, text=True, env=environment, **streams)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._messages.put((time.monotonic(), json.loads(line)))
        self._messages.put((time.monotonic(), None))

    # Talking.

    def hear(self, limit_s: float = WAIT_S) -> dict[str, Any]:
        """The next thing it says."""
        try:
            self.heard_at_s, message = self._messages.get(timeout=limit_s)
        except queue.Empty:
            before = self.stderr
            self.process.send_signal(signal.SIGUSR1)  # has it write the stacks of its threads
            with suppress(AssertionError):
                until(lambda: self.stderr != before, "its stacks", limit_s=5.0)
            raise AssertionError(f"no message within {limit_s:g} s\n{self.stderr}") from None
        assert message is not None, f"ended with {self.process.wait(WAIT_S)}\n{self.stderr}"
        return message

    def begin(self, command: str, /, **arguments: Any) -> None:
        """Has a command begun."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": command, **arguments}) + "\n")
        self.process.stdin.flush()
        assert self.hear() == {"begun": command}

    def answer(self, limit_s: float = WAIT_S, **mark: Any) -> Answer:
        """Return the outcome of the command that was begun; with a mark, of a background command or of a child."""
        message = self.hear(limit_s)
        found = Answer(
            message.pop("value", None), message.pop("error", ""), message.pop("text", ""), message["seconds"]
        )
        del message["seconds"]
        assert message == mark, f"said {message} with {found}"
        return found

    def ask(self, command: str, /, limit_s: float = WAIT_S, **arguments: Any) -> Answer:
        self.begin(command, **arguments)
        return self.answer(limit_s)

    def do(self, command: str, /, **arguments: Any) -> Any:
        """A command that must succeed; returns its value."""
        answer = self.ask(command, **arguments)
        assert not answer.error, f"{command}: {answer.text or answer.error}"
        return answer.value

    # The process.

    @property
    def stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()

    @property
    def is_running(self) -> bool:
        """It has neither ended nor been stopped."""
        state = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        return state is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def stop(self) -> None:
        """SIGSTOP, and waits until it has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        self.until_stopped()

    def until_stopped(self) -> None:
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def until_asleep(self) -> None:
        """Waits until the main thread sleeps and goes on sleeping, and no other thread has anything to do: it is inside
        the call that it has begun, and the session has heard of that."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        if not tasks.exists():
            return  # no way to tell here; the test then checks less
        seen = [""]

        def is_asleep() -> bool:
            now = _status(tasks / str(self.process.pid))
            is_quiet = all("S (sleeping)" in _status(task) for task in tasks.iterdir())
            seen[:] = [*seen, now] if is_quiet and now == seen[-1] else [now]
            return len(seen) > 5

        until(is_asleep, "the main thread sleeps")

    def end(self) -> int:
        """Has it return from main, and gives its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(WAIT_S)

    def discard(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(1.0)  # a child that was forked may still hold the pipe
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None and not (stream is self.process.stdout and self._reader.is_alive()):
                with suppress(BrokenPipeError):
                    stream.close()
        self._stderr.close()


def _status(task: Path) -> str:
    """Whether a thread sleeps, and how often it has gone to sleep. One that has just ended does."""
    try:
        lines = (task / "status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return "S (sleeping)"
    return "".join(line for line in lines if line.startswith(("State", "volun")))
