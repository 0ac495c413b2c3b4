"""Recordings that sessions write when nobody can ask them any more."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from pccl.flight_recorder import load
from pccl.logs import AboutLogger
from pccl.protocol.recording import Recording
from pccl.runtime.session import recorder as recorders
from pccl.runtime.session.recorder import Dumps

LOGGER = AboutLogger(logging.getLogger("pccl.peer"), dict)
WRITE_S = 0.1


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PCCL_TRACE_DIR", str(tmp_path / "traces"))
    return tmp_path / "traces"


def session(peer: int, times: int = 1, reason: str = "over") -> None:
    """A session that ends with a failure, unless `reason` is empty, and makes its dumps."""
    host = socket.gethostname()
    recording = Recording("run", peer, 0, "name", host, os.getpid(), "clock", 1, 1)
    recorder = SimpleNamespace(recording=lambda _: recording, table={})
    made = Dumps(cast(Any, recorder), LOGGER)
    try:
        for _ in range(times):
            trio.run(made.last, reason)
    finally:
        made.close()


def test_sessions_that_fail_again_and_again_do_not_fill_the_disk(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorders, "FILES_KEPT", 3, raising=False)
    host = socket.gethostname()
    directory.mkdir()
    others = {"notes.json", f"pccl-run-peer-1-other-{host}-7.json", f"pccl-run-peer-1-{host}-7.txt"}
    left = f"pccl-run-peer-9-{host}-7.part"
    for name in [*others, left]:
        (directory / name).touch()
        os.utime(directory / name, (1, 1))
    for peer in range(1, 7):
        session(peer, times=2)
    own = {f"pccl-run-peer-{peer}-{host}-{os.getpid()}.json" for peer in (4, 5, 6)}
    assert set(os.listdir(directory)) == others | own


def test_a_directory_that_cannot_be_written_is_warned_of_once(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory.write_text("a file in the way")
    for peer in (1, 2):
        session(peer, times=2)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "cannot be written" in warnings[0]
    assert warnings[0].count(str(directory)) == 1


def test_unwritten_recording_is_seen_without_logging(directory: Path) -> None:
    directory.write_text("a file in the way")
    code = "import pccl; from tests.runtime.session.test_dumps import session; session(1)"
    environment = {name: value for name, value in os.environ.items() if name != "PCCL_LOG_LEVEL"}
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the flight recorder cannot be written to") == 1


class Slow:
    """A thread that takes WRITE_S of the trio run's clock."""

    def __init__(self, name: str) -> None:
        pass

    async def run(self, function: Callable[[], object], *, is_left: bool) -> object:
        await trio.sleep(WRITE_S)
        return function()

    def close(self) -> None:
        pass


@pytest.mark.parametrize("failure", ["", "the master is gone"])
@pytest.mark.parametrize("is_ended_s", [0.0, recorders.GATHER_S / 2, recorders.GATHER_S + WRITE_S / 2])
def test_a_session_that_ends_before_a_dump_is_made_makes_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch, is_ended_s: float, failure: str
) -> None:
    """The op's failure may not have been seen yet, or others be waited for that follow from it, or it is being written.
    Whoever waits for others has nothing left to do then."""
    monkeypatch.setattr(recorders, "HelperThread", Slow)
    written: list[str] = []

    def recorded(reason: str) -> Recording:
        written.append(reason)
        return Recording("run", 1, 0, "name", "host", 7, "clock", 1, 1)

    recorder = SimpleNamespace(recording=recorded, table={})
    made = Dumps(cast(Any, recorder), LOGGER)

    async def end() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.watch)
            await trio.sleep(recorders.LOOK_S - 0.01)
            made.ask("an op failed")
            await trio.sleep(0.01 + is_ended_s)
            await made.last(failure)
            assert written[0] == "an op failed"
            assert written[1:] in ([], [failure])
            told = list(written)
            await trio.sleep(2 * recorders.GATHER_S)
            assert written == told
            nursery.cancel_scope.cancel()

    trio.run(end, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_session_that_ends_well_makes_none(directory: Path) -> None:
    session(1, reason="")
    assert not directory.exists()


PROGRAM = """
import sys
from contextlib import suppress
from pccl import MasterNode, PCCLError
from tests.support.cluster import Cluster, ones

node = MasterNode("127.0.0.1:0", daemon=True)
node.run()
cluster = Cluster(node.address)
peer, _ = cluster.join(2)
how = sys.argv[1]
if how == "close":
    with suppress(PCCLError):
        peer.all_reduce(ones(), timeout=0.1)
    peer.close()
elif how == "with":
    with peer:
        peer.all_reduce(ones(), timeout=0.1)
else:
    peer.all_reduce(ones(), timeout=0.1)
"""


@pytest.mark.parametrize("how", ["close", "with", "exception"])
def test_a_program_that_ends_as_an_op_fails_leaves_a_dump(directory: Path, how: str) -> None:
    """Whether it closes its communicator or not."""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], cwd=root, capture_output=True, text=True)
    assert done.returncode == (how != "close"), done.stderr
    found = [peer.recording for peer in load(list(directory.glob("*.json"))).peers]
    assert any(each is not None and "failed: TIMEOUT" in each.reason for each in found), done.stderr
