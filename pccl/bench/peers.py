"""The coordinator's side: a master and W workers on this machine, for as long as a `with` block lasts.

Workers are in no run before `connect`, which may be called again for another number of connections.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from pccl import MasterNode
from pccl.bench.errors import BenchError
from pccl.bench.messages import Connect, Hello, Ready, Reply, Request, Setup
from pccl.launcher import Guard, local_environment, module_command

SHUTDOWN_TIMEOUT_S = 5.0

ReplyT = TypeVar("ReplyT", bound=Reply)


class LocalPeers:
    def __init__(self, world_size: int, *, against_gloo: bool = False, encrypt: bool = False) -> None:
        self._world_size = world_size
        self._against_gloo = against_gloo
        self._encrypt = True if encrypt else None
        self._token = secrets.token_urlsafe() if encrypt else None
        self._master = ""
        self._workers: list[subprocess.Popen[bytes]] = []
        self._resources = ExitStack()

    def __enter__(self) -> LocalPeers:
        with ExitStack() as resources:
            guard = resources.enter_context(Guard())
            node = MasterNode(listen_address="127.0.0.1:0", token=self._token)
            node.run()
            resources.callback(node.wait, SHUTDOWN_TIMEOUT_S)
            resources.callback(node.interrupt)
            self._master = node.address
            gloo_store = None
            if self._against_gloo:
                folder = resources.enter_context(tempfile.TemporaryDirectory(prefix="pccl-bench-"))
                gloo_store = str(Path(folder) / "gloo")
            resources.push(self._shut_down)
            command = module_command("pccl.bench.worker")
            for _ in range(self._world_size):
                self._workers.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        env=local_environment(),
                        process_group=guard.group,
                    )
                )
            ports = [hello.ring_port for hello in self.receive_all(Hello)]
            for rank in range(self._world_size):
                self.send(rank, Setup(rank, ports, gloo_store))
            self.receive_all(Ready)
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.__exit__(kind, error, trace)

    def connect(self, connections: int = 0) -> None:
        """Have all workers join one run, with so many connections a link (0: the library's choice)."""
        self.send_all(Connect(self._master, connections, self._token, self._encrypt))
        self.receive_all(Ready)

    def send(self, rank: int, request: Request) -> None:
        stream = self._workers[rank].stdin
        assert stream is not None
        try:
            stream.write(msgspec.json.encode(request) + b"\n")
            stream.flush()
        except BrokenPipeError:
            raise self._ended(rank) from None

    def receive(self, rank: int, expected: type[ReplyT]) -> ReplyT:
        stream = self._workers[rank].stdout
        assert stream is not None
        line = stream.readline()
        if not line.endswith(b"\n"):  # it was killed, perhaps in the middle of one
            raise self._ended(rank)
        reply = msgspec.json.decode(line, type=Reply)
        if not isinstance(reply, expected):
            raise BenchError(f"rank {rank} said {reply}, but {expected.__name__} was expected")
        return reply

    def send_all(self, request: Request) -> None:
        for rank in range(self._world_size):
            self.send(rank, request)

    def receive_all(self, expected: type[ReplyT]) -> list[ReplyT]:
        return [self.receive(rank, expected) for rank in range(self._world_size)]

    def kill(self, rank: int) -> None:
        self._workers[rank].kill()

    def _ended(self, rank: int) -> BenchError:
        return BenchError(f"rank {rank} ended with {self._workers[rank].wait()}")

    def _shut_down(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let the workers leave in peace. After an error they are killed, as some may wait for the failed one."""
        deadline_s = time.monotonic() + (SHUTDOWN_TIMEOUT_S if kind is None else 0.0)
        for worker in self._workers:
            assert worker.stdin is not None
            assert worker.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.close()
            worker.stdout.close()
        for worker in self._workers:
            try:
                worker.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
