"""The life of a session at its edges."""

from __future__ import annotations

import logging

import pytest
import trio
import trio.lowlevel

from pccl.runtime.session.driver import Lifetime


def test_nothing_starts_in_a_session_whose_tasks_have_ended() -> None:
    """A trio run that ends cancels the session's tasks; a thread may ask for its arrays before the session knows."""
    started = []

    async def task() -> None:
        started.append(True)

    async def body() -> None:
        lifetime = Lifetime(logging.LoggerAdapter(logging.getLogger("pccl.peer")), lambda _: None)
        async with trio.open_nursery() as nursery:
            lifetime.nursery = nursery
        lifetime.spawn(task)
        await trio.lowlevel.checkpoint()

    trio.run(body)
    assert not started


def test_no_other_error_of_a_start_is_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the nursery that is closed is no fault: anything else would lose a task without a word."""

    def fail(*_: object) -> None:
        raise RuntimeError("something else")

    async def body() -> None:
        lifetime = Lifetime(logging.LoggerAdapter(logging.getLogger("pccl.peer")), lambda _: None)
        async with trio.open_nursery() as nursery:
            lifetime.nursery = nursery
            monkeypatch.setattr(lifetime, "start", fail)
            with pytest.raises(RuntimeError, match="something else"):
                lifetime.spawn(trio.sleep, 0)

    trio.run(body)
