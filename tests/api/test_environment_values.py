"""Values in the environment that are none: whoever has set one is told which."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pccl import Communicator, Result
from tests.support.cluster import refusal


@pytest.mark.parametrize("text", ["nan", "soon"])
def test_a_master_timeout(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PCCL_MASTER_TIMEOUT", text)
    error = refusal(lambda: Communicator("127.0.0.1:1"))
    assert error.result is Result.INVALID_ARGUMENT
    assert f"PCCL_MASTER_TIMEOUT '{text}' is not a number of seconds" in str(error)


@pytest.mark.parametrize("text", ["16 MiB", "-1"])
def test_a_size_of_pieces(text: str) -> None:
    environment = {**os.environ, "PCCL_PIECE_BYTES": text}
    ended = subprocess.run(
        [sys.executable, "-c", "import pccl"], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert f"PCCL_PIECE_BYTES={text}: not a number of bytes" in ended.stderr
