"""Fixtures for tests that need a run, and how Hypothesis works here."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from hypothesis import settings

from pccl import MasterNode
from pccl.cli import main
from tests.support import fake_device
from tests.support.cluster import Cluster, run_of
from tests.support.fake_device import FakeDevice

# Examples use real sockets, so their times vary; a failure prints the blob that reproduces it. CI has the same
# examples each time.
settings.register_profile("pccl", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("pccl")

# Processes that tests start use cached bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A background job of a shell ignores SIGINT, and so would the processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Masters at a fixed port keep no record in the home directory.
os.environ["PCCL_STATE"] = ""

# Peers of a stopped master fail soon.
os.environ.setdefault("PCCL_MASTER_TIMEOUT", "0.2")


def pytest_xdist_auto_num_workers() -> int:
    """Return how many tests run at once: they wait for half of their time."""
    return 3 + (os.cpu_count() or 1)


def pytest_collection(session: pytest.Session) -> None:
    """Import all test modules before they are collected, in another order in each worker of xdist.

    On a clean checkout, this divides the compilation of the modules among the workers.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    root = Path(__file__).parents[1]
    paths = sorted(path.relative_to(root).with_suffix("") for path in root.glob("tests/**/test_*.py"))
    first = len(paths) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for path in [*paths[first:], *paths[:first]]:
        with suppress(Exception, pytest.skip.Exception):
            import_module(".".join(path.parts))


@pytest.fixture
def new_port() -> Iterator[Callable[[], int]]:
    """Ports of 127.0.0.1 that refuse connections until pccl listens there. They are bound: no other test gets them."""
    with ExitStack() as resources:

        def bind() -> int:
            held = resources.enter_context(socket.socket())
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            port: int = held.getsockname()[1]
            return port

        yield bind


@pytest.fixture
def nobody(new_port: Callable[[], int]) -> str:
    """An address that refuses connections until pccl listens there."""
    return f"127.0.0.1:{new_port()}"


@pytest.fixture
def master() -> Iterator[MasterNode]:
    """A master in this process, on a free port."""
    with MasterNode("127.0.0.1:0") as node:
        yield node


@pytest.fixture
def cluster(master: MasterNode) -> Iterator[Cluster]:
    """A run without peers yet."""
    cluster = Cluster(master.address)
    yield cluster
    cluster.close_all()


@pytest.fixture(scope="module")
def three_peers() -> Iterator[Cluster]:
    """A run of three that is kept for a module's tests: making one takes longer than an op."""
    with run_of(3) as cluster:
        yield cluster


@pytest.fixture
def devices() -> Iterator[list[FakeDevice]]:
    """A fake device for each of three peers, with arrays that pccl takes."""
    with fake_device.running(3) as found:
        yield found


@pytest.fixture
def reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers report, and their master shows, without the usual pauses."""
    monkeypatch.setattr("pccl.runtime.session.reports.REPORT_S", 0.01)
    monkeypatch.setattr("pccl.runtime.master.requests.REFRESH_S", 0.0)


@pytest.fixture
def full_pipe() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe that is full."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x")
    os.set_blocking(writing, True)
    yield reading, writing
    os.close(reading)
    with suppress(OSError):
        os.close(writing)


Command = Callable[..., CompletedProcess[str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """`command(*arguments)` is the command `pccl`, within this process: one that only answers needs none of its own."""

    def run(*arguments: str) -> CompletedProcess[str]:
        try:
            code: Any = main(arguments)
        except SystemExit as end:  # argparse's
            code = end.code
        return CompletedProcess(arguments, code, *capsys.readouterr())

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    logger = logging.getLogger("pccl")
    log_handlers, propagates, level = logger.handlers[:], logger.propagate, logger.level
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logger.handlers[:], logger.propagate = log_handlers, propagates  # a master's handler has the test's stderr
    logger.setLevel(level)


@pytest.fixture(params=["memory", "device"])
def place(request: pytest.FixtureRequest) -> Iterator[None]:
    """The place of all peers' torch tensors: in memory, or on a device whose copies come late."""
    if request.param == "memory":
        yield
        return
    with fake_device.running() as (device,), fake_device.torch_tensors(device):
        yield
    assert device.writes > 0
