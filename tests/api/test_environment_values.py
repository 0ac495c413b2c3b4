"""Values in the environment that are none: whoever has set one is told which."""

from __future__ import annotations

import pytest

from pccl import Communicator, Result
from tests.support.cluster import refusal


@pytest.mark.parametrize("text", ["nan", "soon"])
def test_a_master_timeout(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PCCL_MASTER_TIMEOUT", text)
    error = refusal(lambda: Communicator("127.0.0.1:1"))
    assert error.result is Result.INVALID_ARGUMENT
    assert f"PCCL_MASTER_TIMEOUT '{text}' is not a number of seconds" in str(error)
