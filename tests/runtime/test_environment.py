"""Numbers in the environment."""

from __future__ import annotations

import warnings

import pytest

from pccl.runtime.threads.process import number_of


@pytest.mark.parametrize(("text", "value"), [("0", 0.0), (" 7 ", 7.0), ("2.5", 2.5), ("", 4.0)])
def test_a_number(monkeypatch: pytest.MonkeyPatch, text: str, value: float) -> None:
    monkeypatch.setenv("PCCL_TEST", text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert number_of("PCCL_TEST", 4, 10) == value
        assert number_of("PCCL_TEST_NOT_SET", 4, 10) == 4


@pytest.mark.parametrize("text", ["many", "-1", "11", "nan", "inf"])
def test_what_is_none_is_warned_of_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    monkeypatch.setenv("PCCL_TEST", text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert number_of("PCCL_TEST", 4, 10) == 4
    (record,) = caplog.records  # each session asks, and would say the same
    assert record.getMessage() == f"PCCL_TEST={text}: not a number from 0 to 10; using 4"
