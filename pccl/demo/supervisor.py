"""Runs the demo's processes: starts, reads, kills, and never leaves one behind.

Theory of operation. Only the main thread decides, by asking the `Conductor`; it sleeps on one queue. For each
process a thread reads its output into the queue until it ends, then puts its exit. All processes are in the group of a
`Guard`, so they end with this one however it ends, and a terminal's Ctrl-C reaches this process only.

Their standard error is silent when all is well (a lost peer makes the library log warnings, which are expected here),
and quoted when a process ends by itself.
"""

from __future__ import annotations

import queue
import time
from types import TracebackType
from typing import Protocol

import msgspec

from pccl.demo import corpus
from pccl.demo.conductor import Action, Conductor, Connect, Kill, Show, Start
from pccl.demo.messages import CONNECT, At, Message, WorkerOptions
from pccl.demo.plan import Plan
from pccl.demo.report import Report, Row
from pccl.launcher import Child, Guard, Heard, local_environment, module_command

MASTER_READY = b"pccl master listening on "
MASTER_SHOWS = b"pccl master shows the run at "
# Four peers on two cores: threads of one matrix product would only wait for each other.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Display(Protocol):
    """The display of a run while it goes on."""

    def moved(self, peers: dict[int, At]) -> None:
        """Show the positions of all running workers, one of which has changed."""

    def row(self, row: Row) -> None:
        """Show a step that is over on all peers."""

    def page(self, url: str) -> None:
        """Show where browsers see the run."""


class Supervisor:
    """One run: `with Supervisor(...) as supervisor: report = supervisor.run()`."""

    def __init__(self, plan: Plan, display: Display, http: str | None = None) -> None:
        """`http` is the address at which the master shows the run to browsers; None: it does not."""
        self._plan = plan
        self._http = http
        self._display = display
        self._guard = Guard()
        self._heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._master: Child | None = None
        self._workers: dict[int, Child] = {}
        self._address = ""
        self._conductor = Conductor(plan, time.monotonic())

    def run(self) -> Report:
        """Run to the end, or until the conductor gives up, and return the report."""
        started_s = time.monotonic()
        validation = corpus.split(corpus.standard_library_files(), self._plan.shards).validation
        unigram_bits = corpus.unigram_entropy_bits(corpus.read(validation))
        conductor = self._conductor
        shown = ["--http", self._http] if self._http is not None else []
        self._master = self._child("master", module_command("pccl", "master", "--listen", "127.0.0.1:0", *shown))
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
        for child in [*self._workers.values(), *([self._master] if self._master else [])]:
            child.close()

    def _wait(self) -> None:
        """Handle the next message or exit, or the end of the time for it."""
        conductor = self._conductor
        try:
            child, heard = self._heard.get(timeout=max(0.0, conductor.deadline_s() - time.monotonic()))
        except queue.Empty:
            conductor.overdue(time.monotonic())
            return
        if child is self._master:
            if isinstance(heard, int):
                conductor.master_exited(heard, child.last_words())
            elif heard.startswith(MASTER_READY):
                self._address = heard.removeprefix(MASTER_READY).decode().strip()
            elif heard.startswith(MASTER_SHOWS):
                self._display.page(heard.removeprefix(MASTER_SHOWS).decode().strip())
        elif isinstance(heard, int):
            peer = next(peer for peer, each in self._workers.items() if each is child)
            self._do(conductor.exited(peer, heard, child.last_words()))
        elif (message := _decoded(heard)) is not None:
            self._do(conductor.heard(message, time.monotonic()))
        self._display.moved(conductor.peers)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Kill(peer):
                    self._workers[peer].popen.kill()
                case Start(peer):
                    options = msgspec.json.encode(WorkerOptions(self._address, peer, self._plan)).decode()
                    command = module_command("pccl.demo.worker", options)
                    self._workers[peer] = self._child(f"peer {peer}", command)
                case Connect(peer):
                    self._workers[peer].say(CONNECT)
                case Show(row):
                    self._display.row(row)

    def _child(self, name: str, command: list[str]) -> Child:
        environment = {**local_environment(), **_ONE_THREAD}
        return Child(name, command, guard=self._guard, heard=self._heard, environment=environment)


def _decoded(line: bytes) -> Message | None:
    try:
        message: Message = msgspec.json.decode(line, type=Message)
    except msgspec.DecodeError:
        return None  # something printed by whatever the interpreter loads at its start
    return message
