"""The hosts of a run: a master or a peer on each, what the network between them does, their clocks and disks.

Theory of operation. Faults overlap. So what they take away is counted: packets between two hosts are dropped as long
as any fault wants it, and a path has the worst of everything that is wanted of it. All hosts are in one `Lab`, whose
namespaces have no names and end with their holders; everything that runs is in the lab's guarded group. So whatever
ends this process, a Ctrl-C or SIGKILL, leaves no namespace, device, process or mount behind, and runs never meet.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pccl.tools.harness import Guard, local_environment, module_command
from tests.wan.lab import Host, Lab, Link
from tests.wan.lab import Path as Way
from tests.wan.nemesis import clock
from tests.wan.nemesis.clock import Clock
from tests.wan.nemesis.disk import Disk
from tests.wan.nemesis.history import Reader
from tests.wan.nemesis.progress import Life
from tests.wan.nemesis.script import Settings
from tests.wan.nemesis.values import Load

MASTER_PORT = 48148
PIPE_BYTES = 4096
RECORDS = "256"
"""What flight recorders hold: so little that they are full before the checker looks for leaks."""
READY = b"pccl master listening on "
READY_S = 60.0
Log = Literal["file", "full pipe"]


@dataclass(frozen=True)
class Setting:
    """The parts of a stage."""

    peers: int = 4
    masters: int = 1
    """The first, and its standbys."""
    keeps_state: bool = False
    """Whether masters record the run on disk."""
    late: int = 0
    """The number of peers, the last ones, that do not start with the rest."""
    workload: str = "steps"
    load: Load = field(default_factory=Load)
    log: Log = "file"
    jumps: bool = False
    """Whether the hosts' wall clocks can jump."""
    encrypts: bool = False
    """Whether the run has a token, and what goes between peers is encrypted."""
    disk_bytes: int = 0
    """The size of a disk of each host's own, for records and checkpoints; 0: a folder of this machine's."""
    link: Link = field(default_factory=lambda: Link(delay_ms=1))
    peer_timeout_s: float = 3.0
    master_timeout_s: float = 20.0

    @property
    def hosts(self) -> int:
        return self.masters + self.peers

    @property
    def master_hosts(self) -> list[int]:
        return list(range(self.masters))

    @property
    def peer_hosts(self) -> list[int]:
        return list(range(self.masters, self.hosts))


@dataclass
class Seat:
    """A host, and what runs there."""

    number: int
    host: Host
    is_master: bool
    folder: Path
    disk: Disk | None = None
    clock: Clock | None = None
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None
    reader: Reader | None = None
    """The history of the present process, if it is a peer."""
    name: str = ""
    begun_s: float = 0.0
    ready_s: float = 0.0
    """When the present process, of a master, was seen to listen; 0: not yet."""
    is_stopped: bool = False

    def __str__(self) -> str:
        return f"{'master' if self.is_master else 'peer'} on host {self.number}"


class Stage:
    """`with Stage(setting, seed, folder) as stage:`. Everything is for one thread."""

    def __init__(self, setting: Setting, seed: int, folder: Path) -> None:
        self.setting = setting
        self.seed = seed
        self.folder = folder
        self.seats: list[Seat] = []
        self.lives: list[Life] = []
        self.readers: dict[str, Reader] = {}
        self.unexpected: list[tuple[float, Seat, str, int]] = []
        """Processes that ended by themselves: when, where, which, and how."""
        self._blocked: Counter[tuple[int, int]] = Counter()
        self._shaped: dict[tuple[int, int], list[Way]] = {}
        self._limited: dict[tuple[int, int], list[int]] = {}
        self._resources = ExitStack()
        self._pipes: list[int] = []
        self._lab: Lab

    def __enter__(self) -> Stage:
        setting = self.setting
        with ExitStack() as resources:
            self._lab = resources.enter_context(Lab(setting.hosts, setting.link, seed=self.seed))
            # Leaves before the lab does, so that no process waits for a holder whose pipe is open.
            guard = resources.enter_context(Guard())
            resources.callback(self._close_pipes)
            built = clock.library(self.folder) if setting.jumps else None
            for number, host in enumerate(self._lab.hosts):
                folder = self.folder / f"host-{number}"
                folder.mkdir()
                seat = Seat(number, host, number < setting.masters, folder)
                # A host that has lost its power does not go on telling its peers that it had connections.
                host.set_sysctl("net.ipv4.tcp_orphan_retries", "1")
                if setting.disk_bytes:
                    seat.disk = Disk(folder, setting.disk_bytes, guard.group)
                    resources.callback(seat.disk.close)
                if built is not None:
                    seat.clock = Clock(self.folder / f"clock-{number}", built)
                    resources.callback(seat.clock.close)
                self.seats.append(seat)
            resources.callback(self.kill_all)
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.__exit__(kind, error, trace)

    def _close_pipes(self) -> None:
        for pipe in self._pipes:
            os.close(pipe)

    @property
    def masters(self) -> str:
        """The addresses of all masters, as peers are given them."""
        return ",".join(f"{seat.host.address}:{MASTER_PORT}" for seat in self.seats if seat.is_master)

    @property
    def running(self) -> list[Seat]:
        return [seat for seat in self.seats if seat.process is not None]

    # Processes.

    def start(self, number: int) -> None:
        """Start the next process of this host; no effect where one runs."""
        seat = self.seats[number]
        if seat.process is not None:
            return
        seat.starts += 1
        seat.name = f"{number}.{seat.starts}"
        command = self._master_command(seat) if seat.is_master else self._peer_command(seat)
        if seat.disk is not None:
            command = [*seat.disk.prefix, *command]
        environment = {**local_environment(), "PCCL_LOG_LEVEL": "INFO", "PYTHONFAULTHANDLER": "1"}
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PCCL_STATE": ""}
        environment["PCCL_FLIGHT_RECORDS"] = RECORDS
        environment["PCCL_TOKEN"] = f"token of {self.seed}" if self.setting.encrypts else ""
        environment["PCCL_ENCRYPT"] = "1" if self.setting.encrypts else "0"
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(each).resolve()) for each in sys.path if each)
        if seat.clock is not None:
            environment |= seat.clock.environment
        stderr: int | Any
        with ExitStack() as files:
            out = files.enter_context((self.folder / f"{seat.name}.out").open("wb"))
            if self.setting.log == "full pipe":
                environment["PCCL_LOG_LEVEL"] = "DEBUG"
                unread, stderr = os.pipe()
                fcntl.fcntl(stderr, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
                self._pipes.append(unread)
                files.callback(os.close, stderr)
            else:
                stderr = files.enter_context((self.folder / f"{seat.name}.log").open("wb"))
            seat.begun_s, seat.ready_s = time.monotonic(), 0.0
            seat.process = seat.host.popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=stderr, env=environment
            )

    def _master_command(self, seat: Seat) -> list[str]:
        words = ["--listen", f"{seat.host.address}:{MASTER_PORT}", "--peer-timeout", f"{self.setting.peer_timeout_s:g}"]
        if seat.number > 0:
            others = [each for each in self.seats if each.is_master and each is not seat]
            words += ["--standby-of", ",".join(f"{each.host.address}:{MASTER_PORT}" for each in others)]
        elif seat.starts == 1:
            words.append("--found")
        if self.setting.keeps_state:
            words += ["--state", str(seat.folder / "state")]
        return module_command("pccl", "master", *words)

    def _peer_command(self, seat: Seat) -> list[str]:
        setting = self.setting
        path = self.folder / f"{seat.name}.jsonl"
        checkpoints = str(seat.folder) if setting.disk_bytes else ""
        settings = Settings(
            masters=self.masters,
            peer=seat.name,
            history=str(path),
            seed=self.seed,
            load=setting.load,
            workload=setting.workload,
            master_timeout_s=setting.master_timeout_s,
            folder=checkpoints,
        )
        seat.reader = self.readers[seat.name] = Reader(path, seat.name)
        module = "tests.wan.nemesis.peer" if setting.workload == "steps" else "tests.wan.nemesis.trainer"
        return module_command(module, settings.encode())

    def kill(self, number: int) -> None:
        """SIGKILL, and wait for the end. No effect where none runs."""
        seat = self.seats[number]
        if seat.process is not None:
            seat.process.kill()
            seat.process.wait()
            self._ended(seat)

    def kill_all(self) -> None:
        for seat in self.seats:
            self.kill(seat.number)

    def stop(self, number: int, yes: bool) -> None:
        seat = self.seats[number]
        seat.is_stopped = yes
        self.signal(number, signal.SIGSTOP if yes else signal.SIGCONT)

    def signal(self, number: int, which: signal.Signals) -> None:
        process = self.seats[number].process
        if process is not None:
            process.send_signal(which)

    def reap(self, is_expected: bool = False) -> None:
        """Take notice of processes that have ended; by themselves, unless all are to."""
        for seat in self.running:
            assert seat.process is not None
            status = seat.process.poll()
            if status is not None:
                if not is_expected or status != 0:
                    self.unexpected.append((time.monotonic(), seat, seat.name, status))
                self._ended(seat)

    def note_listening(self) -> None:
        for seat in self.running:
            if seat.is_master and not seat.ready_s and self.is_listening(seat.number):
                seat.ready_s = time.monotonic()

    def _ended(self, seat: Seat) -> None:
        now = time.monotonic()
        if seat.reader is not None:
            seat.reader.poll()
            seat.ready_s = seat.reader.events[0].at_s if seat.reader.events else 0.0
        self.lives.append(Life(seat.name, seat.number, seat.begun_s, now, seat.is_master, seat.ready_s or now))
        seat.process = None
        seat.reader = None
        seat.is_stopped = False

    def is_listening(self, number: int) -> bool:
        """Whether the present process of this master's host has said that it listens."""
        seat = self.seats[number]
        path = self.folder / f"{seat.name}.out"
        with suppress(FileNotFoundError):
            return READY in path.read_bytes()
        return False

    def last_words(self, name: str, size: int = 3000) -> str:
        """Return the end of a process's log."""
        try:
            data = (self.folder / f"{name}.log").read_bytes()
        except FileNotFoundError:
            return "(its log was not read)"
        return data[-size:].decode(errors="replace").strip()

    # The network.

    def block(self, pairs: frozenset[tuple[int, int]], yes: bool) -> None:
        hosts = self._lab.hosts
        for pair in pairs:
            before = self._blocked[pair]
            self._blocked[pair] += 1 if yes else -1
            if (before > 0) != (self._blocked[pair] > 0):
                self._lab.block(hosts[pair[0]], hosts[pair[1]], yes)

    def shape(self, pairs: frozenset[tuple[int, int]], way: Way, yes: bool) -> None:
        hosts = self._lab.hosts
        for pair in pairs:
            wanted = self._shaped.setdefault(pair, [])
            (wanted.append if yes else wanted.remove)(way)
            self._lab.reshape(hosts[pair[0]], hosts[pair[1]], _worst(wanted) if wanted else None)

    def limit(self, pairs: frozenset[tuple[int, int]], bytes_max: int, yes: bool) -> None:
        hosts = self._lab.hosts
        for pair in pairs:
            wanted = self._limited.setdefault(pair, [])
            (wanted.append if yes else wanted.remove)(bytes_max)
            self._lab.limit(hosts[pair[0]], hosts[pair[1]], min(wanted, default=0))


def _worst(ways: list[Way]) -> Way:
    rates = [way.rate_mbit for way in ways if way.rate_mbit is not None]
    delays = [way.delay_ms for way in ways if way.delay_ms is not None]
    losses = [way.loss for way in ways if way.loss is not None]
    return Way(
        delay_ms=max(delays, default=None),
        loss=max(losses, default=None),
        rate_mbit=min(rates, default=None),
        reordered=max(way.reordered for way in ways),
        held_ms=max(way.held_ms for way in ways),
    )
