"""The life of a session at its edges."""

from __future__ import annotations

import logging

import trio
import trio.lowlevel

from pccl.runtime.session.lifetime import Lifetime


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
