"""The harness that runs torch's own tests, and some of these on pccl."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torch.suite.report import Outcome, verdict
from tests.torch.suite.source import with_name_added

SOURCE = """
@skip_if(BACKEND != "gloo", "for Gloo")
@skip_if(BACKEND != "gloo" and BACKEND != "nccl", "for both")
@require_backend_is_available({"gloo"})
@require_backend_is_available({"nccl"})
@skip_if(BACKEND == "nccl", "not for NCCL")
@skip_if(BACKEND == "mpi", "not for MPI")
def test(): ...
"""


def test_backend_name_added_to_cpu_tests() -> None:
    tree, places = with_name_added(SOURCE, "pccl")
    text = ast.unparse(tree)
    assert places == 3
    assert "skip_if(BACKEND not in ('gloo', 'pccl'), 'for Gloo')" in text
    assert "BACKEND not in ('gloo', 'pccl') and BACKEND != 'nccl'" in text
    assert "require_backend_is_available({'gloo', 'pccl'})" in text
    assert "require_backend_is_available({'nccl'})" in text
    assert "skip_if(BACKEND == 'nccl', 'not for NCCL')" in text
    assert "skip_if(BACKEND == 'mpi', 'not for MPI')" in text


def outcome(test: str, how: str, reason: str = "") -> Outcome:
    return Outcome(test, how, reason, 1.0, 4)


def test_unlisted_skip_is_failure() -> None:
    listed = {"test_cuda": "needs CUDA", "test_other": "needs CUDA"}
    fine = [outcome("test_cuda", "skipped", "No CUDA"), outcome("test_sum", "passed")]
    text, is_fine = verdict(fine, listed)
    assert is_fine
    assert "1 skipped: needs CUDA" in text
    assert text.endswith("1 passed, 0 failed, 1 skipped")
    for wrong in (outcome("test_new", "skipped", "small"), outcome("test_other", "passed"), outcome("x", "failed")):
        text, is_fine = verdict([*fine, wrong], listed)
        assert not is_fine
        assert f"FAILED {wrong.test}" in text
    assert verdict([outcome("test_new", "skipped", "small")], None)[1]


@pytest.mark.slow
def test_sample_of_torch_tests(tmp_path: Path) -> None:
    pytest.importorskip("pccl.torch")
    pytest.importorskip("expecttest", reason="torch's test modules import it")
    words = ["all_reduce_full_group_sum", "unequal_split_full_group", "scatter_object", "monitored_barrier_gloo_sub"]
    command = [sys.executable, "-m", "tests.torch.suite", *words, "--logs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout
