"""Calls of the portal that are given up: whoever waits for one hears of its end, and nothing is kept of it."""

from __future__ import annotations

import asyncio
import threading

import pytest
import trio

from pccl.runtime.threads import portal
from pccl.runtime.threads.waking import Latch
from tests.support.cluster import WAIT_S, until


def test_a_cancelled_call_of_asyncio_ends_with_the_portal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it waits for what its task undoes, which comes to no end."""
    monkeypatch.setattr(portal, "_closers", set())
    has_begun, ends = threading.Event(), trio.Event()

    async def undo() -> None:
        with trio.CancelScope(shield=True):
            has_begun.set()
            await ends.wait()

    async def run() -> None:
        own = portal.Portal()
        assert own._token is not None
        task = asyncio.create_task(own.call_from_asyncio(undo))
        await asyncio.to_thread(has_begun.wait, WAIT_S)
        task.cancel()
        await asyncio.sleep(0)
        own._token.run_sync_soon(own._break, OSError("as if somebody had closed its descriptors"))
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, WAIT_S)
        assert not own._jobs
        for end in (ends.set, own._stop.set):
            own._token.run_sync_soon(end)
        await asyncio.to_thread(own._thread.join, WAIT_S)

    asyncio.run(run())


def test_nothing_is_kept_of_a_call_that_never_came_to_the_portal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portal, "INTERRUPT_GRACE_S", 0.001)
    own = portal.current()
    until(lambda: not own._jobs, "others have ended")

    waits = 0

    def wait(_: Latch, timeout_s: float | None = None) -> bool:
        nonlocal waits
        waits += 1
        if waits == 1:
            raise KeyboardInterrupt
        return False

    with monkeypatch.context() as patch:
        patch.setattr(Latch, "wait", wait)
        patch.setattr(own, "_token", _Deaf())
        with pytest.raises(KeyboardInterrupt):
            own.call(trio.sleep_forever)
    assert not own._jobs


class _Deaf:
    """A token whose trio run takes nothing."""

    def run_sync_soon(self, *_: object) -> None:
        pass
