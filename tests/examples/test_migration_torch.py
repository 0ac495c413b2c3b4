"""A script for torch's DistributedDataParallel and the same with pccl: few lines differ, and both train."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
BEFORE, AFTER = ROOT / "examples/migration/ddp_before.py", ROOT / "examples/migration/ddp_after.py"
CHANGES_MAX = 5
TIMEOUT_S = 120


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def difference() -> list[str]:
    """Removed and added lines with a line of context, as docs/pytorch.md shows them."""
    return [
        line
        for line in difflib.unified_diff(lines_of(BEFORE), lines_of(AFTER), n=1, lineterm="")
        if not line.startswith(("---", "+++", "@@")) and line.strip("+- ")
    ]


def test_few_lines_are_changed() -> None:
    before, after = ([line for line in lines_of(path) if line] for path in (BEFORE, AFTER))
    changes = [
        max(end - begin, new_end - new_begin)
        for kind, begin, end, new_begin, new_end in difflib.SequenceMatcher(None, before, after, False).get_opcodes()
        if kind != "equal"
    ]
    assert sum(changes) <= CHANGES_MAX
    assert len(lines_of(BEFORE)) == 27


def test_the_documentation_shows_what_is_changed() -> None:
    page = (ROOT / "docs" / "pytorch.md").read_text()
    (shown,) = re.findall(r"^```diff\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert shown.splitlines() == difference()


def test_newcomers_get_the_schedule() -> None:
    """A schedule, which decides the optimizer's steps, is handed over; otherwise the first newcomer ends the run."""
    after = AFTER.read_text(encoding="utf-8")
    made = set(re.findall(r"^(\w+) = torch\.optim\.lr_scheduler", after, re.MULTILINE))
    shared = re.search(r"DDP\.connect\(.*shared=\{(.*?)\}", after)
    assert made
    assert shared is not None
    assert made <= set(re.findall(r": (\w+)", shared[1]))


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(BEFORE)], marks=pytest.mark.slow
        ),
        pytest.param(["pccl", "launch", "-n", "2", "--fail-fast", str(AFTER)], marks=pytest.mark.slow),
    ],
    ids=["before", "after"],
)
def test_it_trains_and_ends_with_the_same_weights_everywhere(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Lines of two processes may run together.
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\d+\.\d{4})", done.stdout)]
    assert len(losses) == 8
    assert max(losses[-2:]) < 0.01
    weights = re.findall(r"weights (\w{16})", done.stdout)
    assert len(weights) == 2
    assert len(set(weights)) == 1
