"""`pccl demo` with all its processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.conftest import Command
from tests.support.commands import ended, pccl

TIMEOUT_S = 120


def _group_is_empty(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("quantize", "optimizer"), [("none", "muon"), ("min-max", "adamw")])
def test_run_with_kill_and_join(quantize: str, optimizer: str, tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    options = ["--peers", "3", "--steps", "6", "--inner-steps", "25", "--quantize", quantize]
    options += ["--optimizer", optimizer, "--json", str(path)]
    done = ended("demo", *options)
    assert done.returncode == 0, done.stdout + done.stderr

    facts = json.loads(path.read_text())
    assert facts["passed"] is True
    assert [row["world_size"] for row in facts["rows"]] == [3, 3, 2, 2, 3, 3, 3]
    assert facts["killed"]["peer"] == 2
    assert facts["killed"]["launched"] == 2
    assert facts["joined"]["peer"] == 3
    assert facts["joined"]["received_bytes"] > 1_000_000
    assert [survivor["peer"] for survivor in facts["survivors"]] == [0, 1, 3]
    assert len({survivor["digest"] for survivor in facts["survivors"]}) == 1
    assert facts["end_bits"] < facts["unigram_bits"] - 0.5

    # Without a terminal: plain lines, one per step.
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    steps = [found[1] for line in lines if (found := re.match(r" {0,3}(\d+) ", line))]  # a digest may begin with digits
    assert steps == [str(step) for step in range(7)]
    assert max(map(len, lines)) <= 80
    assert facts["survivors"][0]["digest"] in done.stdout


@pytest.mark.slow
def test_json_on_stdout() -> None:
    options = ["--peers", "1", "--steps", "1", "--inner-steps", "5", "--no-kill", "--no-join", "--json"]
    done = ended("demo", *options)
    assert done.returncode == 0
    facts = json.loads(done.stdout)
    assert facts["unigram_bits"] < facts["end_bits"] < facts["start_bits"], "the threshold fits the length"
    assert "passed" in done.stderr


@pytest.mark.slow
def test_page() -> None:
    options = ["--peers", "1", "--steps", "50", "--inner-steps", "5", "--no-kill", "--no-join", "--http"]
    with pccl("demo", *options) as running:
        assert running.stdout is not None
        address = next(line for line in running.stdout if line.startswith("the run's status page is at ")).split()[-1]
        with urllib.request.urlopen(f"{address}status.json", timeout=TIMEOUT_S) as status:
            assert status.status == 200
        running.send_signal(signal.SIGINT)
        running.stdout.read()


def test_ctrl_c() -> None:
    running = pccl("demo", "--peers", "2", "--steps", "500", "--inner-steps", "5")
    assert running.stdout is not None
    while not running.stdout.readline().strip().startswith("1 "):
        assert running.poll() is None, running.communicate()
    guard = int(subprocess.run(["pgrep", "-P", str(running.pid), "-f", "the guard kills"], capture_output=True).stdout)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 130
    assert errors.strip() == "pccl demo: interrupted; all its processes have ended"
    assert _group_is_empty(guard)


def test_contradicting_options(command: Command) -> None:
    done = command("demo", "--peers", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("pccl demo: --kill needs --peers 2 or more")
