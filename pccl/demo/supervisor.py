"""Runs the demo's processes: starts, reads, kills, and never leaves one behind.

Theory of operation. Only the main thread decides, by asking the `Conductor`; it sleeps on one queue. For each
process a thread reads its output into the queue until it ends, then puts its exit. All processes are in the group of a
`Guard`, so they end with this one however it ends, and a terminal's Ctrl-C reaches this process only.

Standard error goes to a file per process that has no name in any folder: silent when all is well (a lost peer makes
the library log warnings, which are expected here), quoted when a process ends by itself.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, TypeAlias

import msgspec

import pccl
from pccl.demo import corpus
from pccl.demo.conductor import Action, Conductor, Connect, Kill, Show, Start
from pccl.demo.messages import CONNECT, At, Finished, Message, Ready, StepDone, Synced, WorkerOptions
from pccl.demo.plan import Plan
from pccl.demo.report import Report, Row
from pccl.launcher.guard import Guard
from pccl.launcher.interpreter import local_environment

MASTER_READY = "pccl master listening on "
LAST_WORDS_BYTES = 2000
# Four peers on two cores: threads of one matrix product would only wait for each other.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

_Heard: TypeAlias = "tuple[_Process, Message | str | int]"
"""A worker's message, a line of the master, or an exit's return code."""


class Display(Protocol):
    """What is told while the run goes on."""

    def moved(self, peers: dict[int, At]) -> None:
        """Where each running worker stands has changed."""

    def row(self, row: Row) -> None:
        """A step is over on all peers."""


class _Process:
    """One child and the thread that reads it; `peer` is None for the master."""

    def __init__(self, peer: int | None, arguments: list[str], guard: Guard, heard: queue.SimpleQueue[_Heard]) -> None:
        self.peer = peer
        self._heard = heard
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._popen = subprocess.Popen(
            [sys.executable, *_interpreter_options(), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**local_environment(), **_ONE_THREAD},
            process_group=guard.group,
        )
        self._reader = threading.Thread(target=self._read, name=f"reads peer {peer}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        output = self._popen.stdout
        assert output is not None
        for line in output:
            if self.peer is None:
                self._heard.put((self, line.decode(errors="replace").strip()))
            else:
                self._heard.put((self, _decode(line)))
        self._heard.put((self, self._popen.wait()))

    def kill(self) -> None:
        self._popen.kill()

    def command(self, line: str) -> None:
        stdin: IO[bytes] | None = self._popen.stdin
        assert stdin is not None
        try:
            stdin.write(line.encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; its exit is on the way

    def last_words(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - LAST_WORDS_BYTES))
        return self._errors.read().decode(errors="replace").strip()

    def close(self) -> None:
        """To be called when the process has ended or is sure to end."""
        self._reader.join()
        for file in (self._popen.stdin, self._popen.stdout, self._errors):
            if file is not None:
                file.close()


class Supervisor:
    """One run: `with Supervisor(...) as supervisor: report = supervisor.run()`."""

    def __init__(self, plan: Plan, display: Display) -> None:
        self._plan = plan
        self._display = display
        self._guard = Guard()
        self._heard: queue.SimpleQueue[_Heard] = queue.SimpleQueue()
        self._processes: list[_Process] = []
        self._workers: dict[int, _Process] = {}
        self._address = ""
        self._conductor = Conductor(plan, time.monotonic())

    def run(self) -> Report:
        """Runs to the end, or to where the conductor gives up, and judges."""
        started_s = time.monotonic()
        validation = corpus.split(corpus.standard_library_files(), self._plan.shards).validation
        unigram_bits = corpus.unigram_entropy_bits(corpus.read(validation))
        conductor = self._conductor
        self._add(None, ["-m", "pccl", "master", "--listen", "127.0.0.1:0"])
        while not self._address and not conductor.given_up:
            self._wait()
        if not conductor.given_up:
            self._do(conductor.start())
        while not conductor.over:
            self._wait()
        return Report(
            plan=self._plan,
            unigram_bits=unigram_bits,
            rows=conductor.rows,
            killed=conductor.killed,
            joined=conductor.joined,
            survivors=conductor.survivors,
            problems=conductor.problems,
            seconds=time.monotonic() - started_s,
        )

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._guard.close()
        for process in self._processes:
            process.close()

    def _wait(self) -> None:
        """Handles the next thing that is heard, or the end of the time for it."""
        conductor = self._conductor
        try:
            process, heard = self._heard.get(timeout=max(0.0, conductor.deadline_s() - time.monotonic()))
        except queue.Empty:
            conductor.overdue(time.monotonic())
            return
        peer = process.peer
        match heard:
            case int() if peer is None:
                conductor.master_exited(heard, process.last_words())
            case int() if peer is not None:
                self._do(conductor.exited(peer, heard, process.last_words()))
            case str():
                if peer is None and heard.startswith(MASTER_READY):
                    self._address = heard.removeprefix(MASTER_READY)
            case Ready() | At() | Synced() | StepDone() | Finished():
                self._do(conductor.heard(heard, time.monotonic()))
        self._display.moved(conductor.peers)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Kill(peer):
                    self._workers[peer].kill()
                case Start(peer):
                    options = msgspec.json.encode(WorkerOptions(self._address, peer, self._plan)).decode()
                    self._workers[peer] = self._add(peer, ["-m", "pccl.demo.worker", options])
                case Connect(peer):
                    self._workers[peer].command(CONNECT)
                case Show(row):
                    self._display.row(row)

    def _add(self, peer: int | None, arguments: list[str]) -> _Process:
        process = _Process(peer, arguments, self._guard, self._heard)
        self._processes.append(process)
        return process


def _decode(line: bytes) -> Message | str:
    try:
        message: Message = msgspec.json.decode(line, type=Message)
    except msgspec.DecodeError:
        return line.decode(errors="replace")  # something printed by whatever the interpreter loads at its start
    return message


def _interpreter_options() -> list[str]:
    """Children import the pccl that runs here: from the working directory only if this process does."""
    return [] if Path(pccl.__file__).absolute().parents[1] == Path.cwd() else ["-P"]
