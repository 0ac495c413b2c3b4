"""Recordings that sessions write when nobody can ask them any more."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from pccl.logs import AboutLogger
from pccl.protocol.recording import Recording
from pccl.runtime.session import dumps
from pccl.runtime.session.dumps import Dumps

LOGGER = AboutLogger(logging.getLogger("pccl.peer"), dict)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PCCL_TRACE_DIR", str(tmp_path / "traces"))
    return tmp_path / "traces"


def session(peer: int, times: int = 1) -> None:
    """A session that ends with a failure, and makes its dumps."""
    host = socket.gethostname()
    recording = Recording("run", peer, 0, "name", host, os.getpid(), "clock", 1, 1)
    recorder = SimpleNamespace(recording=lambda _: recording)
    made = Dumps(cast(Any, recorder), cast(Any, SimpleNamespace(ops={})), LOGGER)
    try:
        for _ in range(times):
            trio.run(made.last, "over")
    finally:
        made.close()


def test_sessions_that_fail_again_and_again_do_not_fill_the_disk(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dumps, "FILES_KEPT", 3, raising=False)
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


def test_that_is_seen_where_nobody_has_set_up_logging(directory: Path) -> None:
    directory.write_text("a file in the way")
    code = "import pccl; from tests.runtime.session.test_dumps import session; session(1)"
    environment = {name: value for name, value in os.environ.items() if name != "PCCL_LOG_LEVEL"}
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("WARNING pccl.peer: the flight recorder cannot be written to") == 1
