"""Turns of a machine, a fast path and an engine that are made up: what comes before what, and when the clock ticks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from pccl.runtime.session.driver import Driver

FIRST, SECOND = "the start of one view", "that of the next"


class Played:
    """A machine, and the fast path and the engine beside it, with a log of what is done to them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.start: str | None = None
        self.opened_for: str | None = None
        self.heard: Callable[[], None] = lambda: None
        """What changes when the engine is heard."""
        self.deadline_s: float | None = None
        self.is_over = False
        self.open_ops: list[int] = []
        self.ticks: list[float] = []
        self.is_broken = False
        played: Any = self
        self.driver = Driver(played, played, played, self._hear, lambda messages: None)

    def _hear(self, machine: object) -> None:
        self.log.append("hear")
        self.heard()

    # The machine.

    def tell(self) -> None:
        self.log.append("tell")

    def tick(self, now_s: float) -> None:
        self.ticks.append(now_s)
        self.deadline_s = None

    def drain(self) -> list[Any]:
        return []

    def plain_start(self) -> str | None:
        return self.start

    def deadline(self) -> float | None:
        return self.deadline_s

    # The fast path.

    def close(self) -> bool:
        was_open, self.opened_for = self.opened_for is not None, None
        self.log.append("close")
        return was_open

    def open(self, start: str) -> None:
        self.log.append(f"open for {start}")
        self.opened_for = start

    @property
    def open_with(self) -> str | None:
        return self.opened_for


def test_what_came_through_the_fast_path_is_heard_before_the_machine_is_told() -> None:
    played = Played()
    played.start = played.opened_for = FIRST
    with played.driver.taking_over as machine:
        machine.tell()  # type: ignore[attr-defined]
    assert played.log == ["close", "hear", "tell", "close", f"open for {FIRST}"]
    assert played.opened_for == FIRST


@pytest.mark.parametrize("then", [None, SECOND])
def test_the_fast_path_is_never_open_for_what_has_changed_while_it_was_closed(then: str | None) -> None:
    played = Played()
    played.opened_for, played.start = SECOND, FIRST

    def change() -> None:
        played.start = then

    played.heard = change
    with played.driver.after_hearing:
        pass
    assert f"open for {FIRST}" not in played.log
    assert played.opened_for == then


def test_a_deadline_that_is_sooner_wakes_the_clock() -> None:
    async def run() -> None:
        played = Played()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(played.driver.watch_clock)
            await trio.testing.wait_all_tasks_blocked()
            begun_s = trio.current_time()
            for deadline_s in (begun_s + 50, begun_s + 5):
                with played.driver.taking_over:
                    played.deadline_s = deadline_s
                await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(1000)
            assert played.ticks == [begun_s + 5]
            nursery.cancel_scope.cancel()

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_session_is_drained_when_the_engine_has_given_all_back() -> None:
    played = Played()
    played.is_over, played.open_ops = True, [1]
    with played.driver.hearing:
        pass
    assert not played.driver.drained.is_set()
    with played.driver.hearing:
        played.open_ops.clear()
    assert played.driver.drained.is_set()
