"""The latch: waiting and setting in every order, and signals in the middle of anything."""

from __future__ import annotations

import sys
import threading
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

import pytest

from pccl.runtime.threads.waking import Latch, wait_any
from tests.support.cluster import Background, until


def test_it_happens_once_for_all_who_wait() -> None:
    latch = Latch()
    waiting = [Background(latch.wait) for _ in range(5)]
    until(lambda: len(latch._waiters) == 5, "they wait")
    assert not latch.is_set()
    latch.set()
    assert [thread.result() for thread in waiting] == [True] * 5
    assert latch.is_set()
    latch.set()
    assert latch.wait()
    assert latch.wait(0)


@pytest.mark.parametrize("timeout_s", [0, -1, 0.001])
def test_a_wait_that_times_out_leaves_nothing_behind(timeout_s: float) -> None:
    latch = Latch()
    assert latch.wait(timeout_s) is False
    assert latch._waiters == []


def test_no_time_is_too_long() -> None:
    latch = Latch()
    waiting = Background(lambda: latch.wait(1e300))
    latch.set()
    assert waiting.result() is True


def test_sets_and_waits_race() -> None:
    for _ in range(300):
        latch = Latch()
        threads = [Background(call) for call in (latch.wait, latch.set, latch.wait, latch.set)]
        assert [thread.result() for thread in threads] == [True, None, True, None]


def test_a_wait_for_any_of_several() -> None:
    latches = [Latch() for _ in range(3)]
    assert wait_any(latches, 0.001) is False
    waiting = [Background(lambda: wait_any(latches)) for _ in range(2)]
    until(lambda: all(len(latch._waiters) == 2 for latch in latches), "they wait")
    latches[1].set()
    assert [thread.result() for thread in waiting] == [True, True]
    assert all(latch._waiters == [] for latch in latches)
    assert wait_any(latches)
    assert not wait_any([latches[0], latches[2]], 0)


def test_several_latches_are_set_while_somebody_waits_for_any() -> None:
    for _ in range(300):
        latches = [Latch() for _ in range(3)]
        threads = [Background(call) for call in (partial(wait_any, latches), *(latch.set for latch in latches))]
        assert [thread.result() for thread in threads] == [True, None, None, None]


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt."""


def interrupted_at(step: int, call: Any) -> bool:
    """Makes the call, and raises Interrupt before that instruction of it. Whether there was one."""
    steps = count()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode" and next(steps) == step:
            raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_an_interrupt_at_any_instruction_of_a_wait_blocks_nobody() -> None:
    """threading.Event does not pass this: its lock stays held, and `set` waits for ever."""
    for step in count():
        latch = Latch()
        was_there = interrupted_at(step, lambda latch=latch: latch.wait(0.001))
        other = threading.Thread(target=latch.wait)
        other.start()
        Background(latch.set).result()
        other.join()
        assert latch.wait(0)
        if not was_there:
            assert step > 20
            return
