"""`pccl launch` runs a master and N copies of a script as one command.

The main thread makes all decisions and waits on one queue, into which signal handlers and each `Child`'s threads put
events. Threads copy the output, so that a full terminal does not delay the reaction to a signal. All processes are in
a `Guard`'s group, so a terminal's Ctrl-C does not reach them directly; this process sends it to them once.
"""

from __future__ import annotations

import io
import math
import os
import queue
import secrets
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import IO

from pccl.tools.harness import Child, Copy, Event, Guard, local_environment, master_line, module_command
from pccl.tools.report import PlanError

LINE_CHARACTERS_MAX = 1 << 20
RUN_CHARACTERS_MAX = 100
SLOW_START_S = 5.0
SIGNAL_POLL_S = 1.0
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
COLOURS = (32, 33, 34, 35, 36, 31)
COLOUR_MASTER = 2
TERMINATING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


# torchrun's environment variables for the copies of `pccl launch`.

TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STORE_PORT = 29500
MASTER_PORT = 48148


@dataclass(frozen=True, slots=True)
class Nodes:
    """The number of machines, each with a launcher and the same number of copies, and this machine's number."""

    count: int = 1
    rank: int = 0


def nodes(count: int | None, rank: int | None, environment: Mapping[str, str]) -> Nodes:
    """Return the nodes from `--nnodes` and `--node-rank`, else from NNODES and NODE_RANK in the environment.

    Schedulers such as Kubeflow's PyTorchJob start one launcher per node, with the node's RANK and WORLD_SIZE. These are
    used if WORLD_SIZE is the number of nodes. Raise PlanError if the values are invalid.
    """
    count = count if count is not None else _number("NNODES", environment, 1)
    if count < 1:
        raise PlanError(f"{count} nodes: must be at least one")
    if rank is None and count > 1:
        is_per_node = environment.get("WORLD_SIZE", "") == str(count)
        rank = _number("RANK" if is_per_node and "NODE_RANK" not in environment else "NODE_RANK", environment, None)
    rank = rank or 0
    if not 0 <= rank < count:
        raise PlanError(f"node rank {rank}: must be from 0 to {count - 1} with {count} nodes")
    return Nodes(count, rank)


def _number(name: str, environment: Mapping[str, str], default: int | None) -> int:
    text = environment.get(name, "")
    if not text and default is None:
        raise PlanError("this node's number is unknown: give --node-rank, or set NODE_RANK")
    try:
        return int(text) if text else default or 0
    except ValueError:
        raise PlanError(f"{name} {text!r} is not a number") from None


def masters_address(these: Nodes, given: str | None, environment: Mapping[str, str]) -> str | None:
    """Return the address of the copies' master, or None if this node starts it. Raise PlanError if it is unknown.

    Node 0 starts the master; the other nodes find it at MASTER_ADDR unless its address is given.
    """
    if given is not None or these.rank == 0:
        return given
    host = environment.get("MASTER_ADDR", "")
    if not host:
        raise PlanError("the address of node 0's master is unknown: give --master HOST:PORT, or set MASTER_ADDR")
    return f"[{host}]:{MASTER_PORT}" if ":" in host else f"{host}:{MASTER_PORT}"


def store_address(these: Nodes, master: str | None, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return MASTER_ADDR and MASTER_PORT for all copies. `master` is the address of a master on another node."""
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if these.count > 1:
        host = host or (_host(master) if master else socket.gethostname())
        return host, port or str(STORE_PORT)
    return host or "127.0.0.1", port or str(_free_port())


def run_name(these: Nodes, given: str | None, master: str | None, script: str, environment: Mapping[str, str]) -> str:
    """Return the run's name: `given`, or else the script's name, plus a random suffix if there are no other nodes,
    which would have to know it. For a running master, which may serve other programs, return "", which matches any
    run."""
    known = given if given is not None else environment.get("PCCL_RUN", "")
    if known or (these.count == 1 and master is not None):
        return known
    name = "".join(filter(str.isprintable, os.path.basename(script)))[:RUN_CHARACTERS_MAX]
    return name if these.count > 1 else f"{name}-{secrets.token_hex(3)}"


def variables(these: Nodes, count: int, index: int, master: str, store: tuple[str, str]) -> dict[str, str]:
    rank, world_size = these.rank * count + index, these.count * count
    return {
        "PCCL_MASTER": master,
        "PCCL_LAUNCH_INDEX": str(rank),
        "PCCL_LAUNCH_COUNT": str(world_size),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(index),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": store[0],
        "MASTER_PORT": store[1],
    }


def _host(address: str) -> str:
    first = address.split(",")[0].strip()
    if first.startswith("["):
        return first[1:].partition("]")[0]
    return first.rpartition(":")[0] or first


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10")
NOT_PASSED_ON = {"PCCL_MASTER", "PCCL_RUN", "PCCL_LAUNCH_INDEX", "PCCL_LAUNCH_COUNT"}


def shell_script(first: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return a shell script that runs `pccl launch` with these arguments, in this directory and with this interpreter.
    The shell reads it from standard input, so that process lists do not show the token. `first` is the first host."""
    passed_on = {name: value for name, value in environment.items() if name.startswith("PCCL_")}
    exports = {"MASTER_ADDR": first, **{name: passed_on[name] for name in passed_on.keys() - NOT_PASSED_ON}}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in exports.items()]
    command = shlex.join([sys.executable, "-m", "pccl", "launch", "--until-eof", *arguments])
    return "\n".join([f"cd {shlex.quote(os.getcwd())} || exit", *lines, f"exec {command}", ""])


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    command: Sequence[str]
    count: int
    nodes: Nodes = Nodes()
    master: str | None = None
    """The address of a running master; None starts a master at `listen`."""
    run_name: str = ""
    listen: str = "127.0.0.1:0"
    http: str | None = None
    fail_fast: bool = False
    sets_ranks: bool = True
    tolerate_losses: bool = False
    """Copies ended by a signal do not count as failures."""
    grace_s: float = 10.0
    hosts: Sequence[tuple[str, str]] = ()
    """Machines to reach by ssh, each with the script for its shell. They run the copies instead of this machine."""
    until_eof: bool = False
    """The end of standard input counts as SIGTERM."""


class LinePrinter:
    """Writes lines to a file descriptor. Printers that share a lock never interleave lines.

    Once the descriptor's reader has closed it, `on_closed` is called and later lines are dropped.
    """

    def __init__(self, descriptor: int, lock: threading.Lock, on_closed: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._lock = lock
        self._on_closed = on_closed
        self._closed = False

    def write(self, line: bytes) -> None:
        data = memoryview(line)
        with self._lock:
            while data and not self._closed:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except OSError:
                    self._closed = True
                    self._on_closed()


def copy_lines(source: IO[bytes], printer: LinePrinter, prefix: bytes) -> None:
    """Copy a stream to a printer until the stream ends.

    A line ends at a newline or at a carriage return, which progress bars use. A line longer than LINE_CHARACTERS_MAX is
    printed in parts.
    """
    with io.TextIOWrapper(source, "utf-8", "surrogateescape") as lines:
        while line := lines.readline(LINE_CHARACTERS_MAX):
            printer.write(prefix + line.removesuffix("\n").encode("utf-8", "surrogateescape") + b"\n")


class Supervisor:
    def __init__(self, options: LaunchOptions, guard: Guard) -> None:
        self._options = options
        self._guard = guard
        self._events: queue.SimpleQueue[Event | signal.Signals] = queue.SimpleQueue()
        self._master: Child | None = None
        self._scripts: list[Child] = []
        self._running: set[Child] = set()
        self._failures: list[str] = []
        self._losses: list[str] = []
        self._exit_code = 0
        self._interrupts = 0
        self._stopping = False
        self._kill_at_s: float | None = None
        self._slow_start_at_s: float | None = None
        lock = threading.Lock()
        self._stdout = LinePrinter(1, lock, self._output_closed)
        self._stderr = LinePrinter(2, lock, self._output_closed)

    def run(self) -> int:
        with self._signals_as_events():
            if self._options.until_eof:
                threading.Thread(target=self._await_eof, daemon=True).start()
            if self._options.hosts:
                self._start_hosts()
            elif self._options.master is None:
                self._start_master()
            else:
                self._start_scripts(self._options.master)
            while self._running:
                self._handle(self._next_event())
        # Grandchildren in the group keep their script's output open.
        self._guard.close()
        for script in self._scripts:
            script.drain()
        if self._losses:
            are_all = len(self._losses) == len(self._scripts)
            lost = (
                f"all {len(self._losses)} copies were" if are_all else f"{len(self._losses)} of {self._options.count}"
            )
            self._note(f"{lost} lost: {', '.join(self._losses)}")
            if are_all:
                self._exit_code = self._exit_code or 1
        if self._failures:
            self._note(f"{len(self._failures)} of {self._options.count} failed: {', '.join(self._failures)}")
        return self._exit_code

    # Starting

    def _start_master(self) -> None:
        shown = ["--http", self._options.http] if self._options.http is not None else []
        command = module_command("pccl", "master", "--found", "--listen", self._options.listen, *shown)
        self._slow_start_at_s = time.monotonic() + SLOW_START_S
        environment = {"PCCL_STATE": "", **os.environ, "PCCL_RUN": self._options.run_name}
        self._master = self._start("[master]", command, environment, None)

    def _start_hosts(self) -> None:
        for number, (host, script) in enumerate(self._options.hosts):
            colour = COLOURS[number % len(COLOURS)]
            command = [*SSH, host, "sh", "-s"]
            self._scripts.append(self._start(f"[{host}]", command, dict(os.environ), colour, script.encode()))

    def _await_eof(self) -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        self._events.put(signal.SIGTERM)

    def _start(
        self, name: str, command: Sequence[str], environment: dict[str, str], colour: int | None, script: bytes = b""
    ) -> Child:
        """Start a copy of the script, whose output gets a prefix in `colour`, or the master, whose standard output
        becomes events. The standard input is empty or, with `script`, stays open after this text."""
        child = Child(
            name,
            command,
            guard=self._guard,
            events=self._events,
            environment=environment,
            stdout=None if colour is None else self._copy(1, self._stdout, name, colour),
            stderr=self._copy(2, self._stderr, name, COLOUR_MASTER if colour is None else colour),
        )
        assert child.popen.stdin is not None
        with suppress(BrokenPipeError):
            child.popen.stdin.write(script)
            child.popen.stdin.flush()
        if not script:
            child.close_input()
        self._running.add(child)
        return child

    def _copy(self, descriptor: int, printer: LinePrinter, name: str, colour: int) -> Copy:
        return partial(copy_lines, printer=printer, prefix=_prefix(descriptor, name, colour))

    def _start_scripts(self, master: str) -> None:
        options = self._options
        is_alone = self._master is not None and options.nodes.count == 1
        inherited = local_environment() if is_alone else dict(os.environ)
        store = store_address(options.nodes, options.master, os.environ)
        for index in range(options.count):
            own = variables(options.nodes, options.count, index, master, store)
            environment = {**inherited, **own, "PCCL_RUN": options.run_name, "PYTHONUNBUFFERED": "1"}
            if not options.sets_ranks:
                environment = {name: value for name, value in environment.items() if name not in TORCHRUNS}
            name = f"[{own['PCCL_LAUNCH_INDEX']}]"
            self._scripts.append(self._start(name, options.command, environment, COLOURS[index % len(COLOURS)]))

    # Events

    def _next_event(self) -> Event | signal.Signals | None:
        """Return the next event, or None when the grace period is over.

        This polls because a signal that arrives just before the thread sleeps does not wake it.
        """
        while True:
            ends_s = [end_s for end_s in (self._kill_at_s, self._slow_start_at_s) if end_s is not None]
            left_s = min(ends_s, default=math.inf) - time.monotonic()
            try:
                return self._events.get(timeout=min(SIGNAL_POLL_S, max(0.0, left_s)))
            except queue.Empty:
                if self._slow_start_at_s is not None and time.monotonic() >= self._slow_start_at_s:
                    self._slow_start_at_s = None
                    self._note(f"the master has not listened within {SLOW_START_S:g} s; still waiting for it")
                if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
                    return None

    def _handle(self, event: Event | signal.Signals | None) -> None:
        match event:
            case None:
                self._kill_at_s = None
                left = ", ".join(sorted(process.name for process in self._running))
                self._note(f"{left} did not end within {self._options.grace_s:g} s after the request; killing it")
                self._send(self._running, signal.SIGKILL)
            case signal.Signals():
                self._signalled(event)
            case (child, int(returncode)):
                self._running.discard(child)
                self._exited(child, returncode)
            case (_, bytes(line)):
                self._master_printed(line)

    def _master_printed(self, line: bytes) -> None:
        address, page = master_line(line)
        if page:
            self._note(f"the run's status page is at {page}")
        if address:
            self._slow_start_at_s = None
        if address and not self._stopping:
            self._start_scripts(_dialable(address))
            self._tell_how_to_join(address)

    def _tell_how_to_join(self, address: str) -> None:
        options, count = self._options, self._options.nodes.count
        host, _, port = address.rpartition(":")
        master = f"{socket.gethostname() if host in ('0.0.0.0', '[::]') else host}:{port}"
        where = "terminal of this machine" if host in ("127.0.0.1", "[::1]") else "machine"
        script = shlex.join(options.command[1:])
        token = "PCCL_TOKEN=... " if os.environ.get("PCCL_TOKEN") else ""
        self._note(f"to add a peer from another {where}: {token}PCCL_MASTER={master} python {script}")
        if count > 1 and not options.until_eof:
            nodes = f"--nnodes {count} --node-rank {'I' if count > 2 else 1} --master {master} -n {options.count}"
            self._note(f"on the other node{'s' if count > 2 else ''}: {token}pccl launch {nodes} {script}")

    def _exited(self, process: Child, returncode: int) -> None:
        if process is self._master:
            if not self._stopping:
                self._note(f"the master {_describe(returncode)}")
            if not self._scripts:
                self._exit_code = self._exit_code or _shell_code(returncode) or 1
            return
        if returncode < 0 and self._options.tolerate_losses and not self._stopping:
            self._note(f"{process.name} {_describe(returncode)}; the others continue")
            self._losses.append(f"{process.name} {_short(returncode)}")
        elif returncode != 0:
            self._note(f"{process.name} {_describe(returncode)}")
            self._failures.append(f"{process.name} {_short(returncode)}")
            self._exit_code = self._exit_code or _shell_code(returncode)
            if self._options.fail_fast and not self._stopping:
                self._stop(signal.SIGTERM)
        if self._master in self._running and self._running == {self._master}:
            self._stop(signal.SIGTERM)

    def _signalled(self, number: signal.Signals) -> None:
        if number not in TERMINATING:
            self._send(self._scripts, number)
            return
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            self._send(self._running, signal.SIGKILL)
            return
        if not self._scripts:
            self._exit_code = 128 + number
        self._stop(number)

    # Stopping

    def _stop(self, number: signal.Signals) -> None:
        """Ask the scripts to end, or the master if no script is left. Others are killed after `grace_s`."""
        self._stopping = True
        if self._kill_at_s is None:
            self._kill_at_s = time.monotonic() + self._options.grace_s
        running = [script for script in self._scripts if script in self._running]
        if running:
            self._send(running, number)
        else:
            self._send(self._running, signal.SIGTERM)

    def _send(self, processes: set[Child] | list[Child], number: signal.Signals) -> None:
        for process in processes:
            if process not in self._running:
                continue
            if not self._options.hosts or number == signal.SIGKILL:
                process.popen.send_signal(number)
            elif number in TERMINATING:  # ssh does not pass signals on; the launcher there sees the end of its input
                process.close_input()

    @contextmanager
    def _signals_as_events(self) -> Iterator[None]:
        def put(number: int, frame: FrameType | None) -> None:
            self._events.put(signal.Signals(number))

        previous = {}
        for number in FORWARDED:
            # Under nohup, this process and its children keep ignoring SIGHUP.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                previous[number] = signal.signal(number, put)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    # Output

    def _output_closed(self) -> None:
        self._events.put(signal.SIGTERM)

    def _note(self, text: str) -> None:
        self._stderr.write(f"pccl launch: {text}\n".encode())


def _prefix(descriptor: int, name: str, colour: int) -> bytes:
    if os.isatty(descriptor) and "NO_COLOR" not in os.environ:
        return f"\x1b[{colour}m{name}\x1b[0m ".encode()
    return f"{name} ".encode()


def _dialable(address: str) -> str:
    """Return the address that local processes use to reach a master that listens on `address`."""
    host, _, port = address.rpartition(":")
    return {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host) + ":" + port


def _describe(returncode: int) -> str:
    return f"exited with code {returncode}" if returncode >= 0 else f"was killed by {_short(returncode)}"


def _short(returncode: int) -> str:
    if returncode >= 0:
        return f"code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:  # a real-time signal
        return f"signal {-returncode}"


def _shell_code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode


def launch(options: LaunchOptions) -> int:
    """Run everything. Return the exit code of the first script that failed, as a shell would report it, or 0.

    Call this in the main thread, which receives the signals.
    """
    with Guard() as guard:
        return Supervisor(options, guard).run()
