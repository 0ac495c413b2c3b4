"""Effects of a master's machine: what must be on disk goes before what follows it, and no event waits for the disk."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from pccl.protocol.failover.durable_state import RecordedView, RunRecord
from pccl.protocol.master.run_state import Close, Effect, Persist, TakeHeartbeats
from pccl.runtime.master import durable_state
from pccl.runtime.master.durable_state import LOCK, DurableEffects, StateDirectory

WAIT_S = 60.0


def record(term: int) -> RunRecord:
    return RunRecord("a run", b"secret", term, RecordedView.of(7, [1, 2, 3]), [], False, 90.0)


class Disk(StateDirectory):
    """A directory that takes a record when the test says so."""

    def __init__(self, directory: Path, is_optional: bool = False) -> None:
        super().__init__(str(directory), "here", is_optional)
        self.may_write = threading.Semaphore(0)
        self.failures = 0
        self.written: list[int] = []

    def write(self, record: RunRecord) -> None:
        assert self.may_write.acquire(timeout=WAIT_S)
        if self.failures:
            self.failures -= 1
            raise OSError(28, "No space left on device")
        super().write(record)
        self.written.append(record.term)


def with_effects(disk: StateDirectory | None, use: Callable[[DurableEffects, list[Effect]], Awaitable[None]]) -> None:
    """Runs `use` with a queue of effects and the list of those that it has performed."""
    performed: list[Effect] = []

    async def main() -> None:
        effects = DurableEffects(disk, performed.extend)
        try:
            with trio.fail_after(WAIT_S):
                async with trio.open_nursery() as effects.nursery:
                    await use(effects, performed)
        finally:
            effects.close()

    trio.run(main)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - a thread makes it true
        await trio.sleep(0.002)


def test_effects_without_directory() -> None:
    async def use(effects: DurableEffects, performed: list[Effect]) -> None:
        effects.execute([Close(1), TakeHeartbeats(2)])
        assert performed == [Close(1), TakeHeartbeats(2)]

    with_effects(None, use)


def test_effects_wait_for_record(tmp_path: Path) -> None:
    disk = Disk(tmp_path)

    async def use(effects: DurableEffects, performed: list[Effect]) -> None:
        effects.execute([Close(1), Persist(record(1)), Close(2)])
        effects.execute([Close(3), Persist(record(2)), Close(4)])
        assert performed == [Close(1)]
        disk.may_write.release()
        await until(lambda: len(performed) == 3)
        assert performed == [Close(1), Close(2), Close(3)]
        assert disk.written == [1]
        disk.may_write.release()
        await until(lambda: len(performed) == 4)
        assert disk.written == [1, 2]
        effects.execute([Close(5)])
        assert performed[-1] == Close(5), "nothing is left to wait for"

    with_effects(disk, use)


def test_heartbeat_connections_do_not_wait(tmp_path: Path) -> None:
    disk = Disk(tmp_path)

    async def use(effects: DurableEffects, performed: list[Effect]) -> None:
        effects.execute([Persist(record(1)), Close(1)])
        effects.execute([TakeHeartbeats(2)])
        assert performed == [TakeHeartbeats(2)]
        disk.may_write.release()
        await until(lambda: performed == [TakeHeartbeats(2), Close(1)])

    with_effects(disk, use)


def test_failed_write_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(durable_state, "WRITE_AGAIN_S", 0.001)
    disk = Disk(tmp_path)
    disk.failures = 3

    async def use(effects: DurableEffects, performed: list[Effect]) -> None:
        for _ in range(4):
            disk.may_write.release()
        effects.execute([Persist(record(1)), Close(1)])
        await until(lambda: performed == [Close(1)])

    with caplog.at_level(logging.WARNING, "pccl.master"):
        with_effects(disk, use)
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [
        f"the run pauses until its state can be written to {tmp_path}: No space left on device",
        f"the state has been written to {tmp_path}",
    ]
    again = StateDirectory(str(tmp_path), "another")
    assert again.record == record(1), "closing has given the directory free"
    again.close()


def test_default_record_does_not_stop_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk(tmp_path, is_optional=True)
    disk.failures = 1

    async def use(effects: DurableEffects, performed: list[Effect]) -> None:
        effects.execute([Persist(record(1)), Close(1), Persist(record(2)), Close(2)])
        disk.may_write.release()
        await until(lambda: performed == [Close(1), Close(2)])

    with caplog.at_level(logging.WARNING, "pccl.master"):
        with_effects(disk, use)
    assert f"this master no longer keeps a record of its run: {tmp_path}: No space left on device" in caplog.text
    again = StateDirectory(str(tmp_path), "here", is_optional=True)
    assert again.record is None
    again.close()


def test_directory_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_state, "TOUCH_S", 0.002)
    disk = Disk(tmp_path)

    async def use(effects: DurableEffects, performed: list[Effect]) -> None:
        assert effects.nursery is not None
        os.utime(tmp_path / LOCK, (0, 0))
        effects.nursery.start_soon(effects.keep_touching)
        await until(lambda: os.stat(tmp_path / LOCK).st_mtime > 0)
        effects.nursery.cancel_scope.cancel()

    with_effects(disk, use)
