"""What a standby says of the other masters."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from pccl.runtime.master import server

OTHER = ("198.18.0.1", 48148)


async def logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, own: str, theirs: list[str]
) -> list[str]:
    """Return the warnings of a standby that leads `own`, while the other leads these runs one after the other."""
    runs = iter(theirs)

    async def ask(*_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return SimpleNamespace(run=next(runs), term=3, members=[SimpleNamespace(state="accepted")])

    monkeypatch.setattr(server, "ask", ask)
    with caplog.at_level(logging.INFO, logger="pccl.master"), trio.move_on_after(len(theirs) - 0.5):
        await server.watch([OTHER], "", None, 1.0, lambda _: None, lambda: own)
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, own: str, theirs: list[str]) -> list[str]:
    clock = trio.testing.MockClock(autojump_threshold=0)
    return trio.run(logged, monkeypatch, caplog, own, theirs, clock=clock)


def test_two_runs_warn_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = of(monkeypatch, caplog, "run-a", ["run-b"] * 3)
    assert "198.18.0.1:48148 leads run run-b" in warning
    assert "leads run run-a" in warning
    assert "restart the peers of one" in warning


@pytest.mark.parametrize("own", ["", "run-b"])
def test_one_run_does_not_warn(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, own: str) -> None:
    assert of(monkeypatch, caplog, own, ["run-b"] * 3) == []


def test_silent_master_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    asked = 0

    async def ask(*_: Any) -> Any:
        nonlocal asked
        asked += 1
        await trio.lowlevel.checkpoint()
        if asked < 36:
            raise server.NoAnswer("nobody is there")
        return SimpleNamespace(run="r", term=3, members=[])

    async def watch() -> None:
        with caplog.at_level(logging.WARNING, logger="pccl.master"), trio.move_on_after(40):
            await server.watch([OTHER], "", None, 1.0, lambda _: None, lambda: "")

    monkeypatch.setattr(server, "ask", ask)
    trio.run(watch, clock=trio.testing.MockClock(autojump_threshold=0))
    first, second, over = (record.getMessage() for record in caplog.records)
    what = "for the master at 198.18.0.1:48148 (nobody is there); `pccl doctor 198.18.0.1:48148`"
    assert first.startswith(f"the standby's status request has waited 10 s {what}")
    assert second.startswith(f"the standby's status request has waited 30 s {what}")
    assert over == "the master at 198.18.0.1:48148 answers again: the standby's status request has ended after 35.0 s"
