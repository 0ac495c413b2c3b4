"""`pccl stress` end to end: a short run that passes, one that must fail, and one that is interrupted."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Command
from tests.support.cluster import until
from tests.support.commands import ended, pccl
from tests.support.streams import TIMEOUT_S, Lines

SHORT = ("stress", "--peers", "3", "--peers-max", "4", "--kill-every", "0.3..1", "--seed", "1")


def passed(tmp_path: Path, *disturbances: str, minutes: float = 0.1) -> tuple[Any, str]:
    """Return the report of a short run without problems, and its output."""
    report_file = tmp_path / "report.json"
    done = ended(*SHORT, *disturbances, "--token", "--minutes", str(minutes), "--json", str(report_file))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(report_file.read_text())
    assert report["passed"]
    assert report["counts"]["ops_committed"] > 0
    return report, done.stdout


@pytest.mark.slow
def test_short_run(tmp_path: Path) -> None:
    report, printed = passed(tmp_path)
    assert report["problems"] == []
    assert report["plan"]["seed"] == 1
    assert report["counts"]["participants_max"] >= 2
    assert report["disturbances"]["started"] >= 3
    assert "passed" in printed


@pytest.mark.slow
def test_threads_timeouts_and_interrupts(tmp_path: Path) -> None:
    report, _ = passed(tmp_path, "--interrupts", "0.3..0.6", "--threads", "2", "--timeouts", minutes=0.3)
    assert report["disturbances"]["interrupted"] > 0
    assert report["plan"]["threads"] == 2
    assert report["counts"]["results_checked"] > 0


@pytest.mark.slow
def test_kill_of_master_with_state(tmp_path: Path) -> None:
    report, _ = passed(tmp_path, "--kill-every", "1..2", "--kill-master-every", "2..3", minutes=0.3)
    assert report["disturbances"]["masters_killed"] >= 1


@pytest.mark.slow
def test_kill_of_masters_with_standby(tmp_path: Path) -> None:
    report, _ = passed(tmp_path, "--standbys", "1", "--kill-master-every", "1..2", minutes=0.3)
    assert report["plan"]["standbys"] == 1
    assert report["disturbances"]["masters_killed"] >= 2


def test_hang_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No run can meet this bound. The report states the calls in which peers wait."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = ended(*SHORT, "--minutes", "1", "--hang", "0.01", "--json")
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert not report["passed"]
    assert report["problems"][0].startswith("a hang: peer ")
    assert re.search(r"^  peer \d \(slot \d, group 0\): \w+ at revision 0 for ", report["problems"][0], re.MULTILINE)
    assert "FAILED with --seed 1" in done.stderr
    assert (Path(report["logs"]) / "peer-1.log").exists()


def test_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = pccl(*SHORT, "--minutes", "10", stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    lines = Lines(process.stdout)
    try:
        lines.expect(r"pccl stress: seed 1, 3 to 4 peers, 10 min, kill, join, leave, freeze")
        children = until(lambda: _children(process.pid), "its processes have started")
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130
    finally:
        process.kill()
        process.wait()
    lines.rest()
    until(lambda: not any(Path(f"/proc/{child}").exists() for child in children), "its processes have ended")
    assert list(tmp_path.iterdir()) == []


def _children(pid: int) -> list[int]:
    """Return its children once they are at least the guard, the master and a peer."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    if not listed.exists():
        pytest.skip("needs /proc with children")
    children = [int(child) for child in listed.read_text().split()]
    return children if len(children) >= 3 else []


@pytest.mark.parametrize(
    "arguments", [("--kill-every", "3..1"), ("--kill-every", "often"), ("--freeze-for", "x"), ("--interrupts", "0")]
)
def test_bad_arguments(arguments: tuple[str, ...], command: Command) -> None:
    done = command("stress", *arguments)
    assert done.returncode == 2
    assert f"argument {arguments[0]}: " in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "limits"),
    [("--peers-max", "99", "from 2 to 12"), ("--standbys", "4", "from 0 to 3"), ("--threads", "17", "from 0 to 16")],
)
def test_invalid_plan(option: str, value: str, limits: str, command: Command) -> None:
    done = command("stress", option, value)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"pccl stress: {option} {value}: must be {limits}" in done.stderr
