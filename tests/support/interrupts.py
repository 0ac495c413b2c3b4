"""Calls that are interrupted, as if by a signal, at a chosen place."""

from __future__ import annotations

import gc
import itertools
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from pccl.runtime.threads.waking import wait_any

SIGNAL = signal.SIGUSR1


class Interrupt(BaseException):
    """An interrupt such as KeyboardInterrupt."""


class AlarmError(Exception):
    """An ordinary exception from a signal handler."""


KINDS: dict[str, Callable[[], BaseException]] = {"interrupt": Interrupt, "exception": AlarmError}
"""What signal handlers raise."""


def at_step(step: int, call: Callable[[], object], happens: Callable[[], object]) -> bool:
    """Make the call, and call `happens` in its thread at place `step` of those where Python checks for signals (where
    functions begin and built-in functions return), or earlier if the call sleeps. Return whether this was the last
    place: the call slept, or ended before. An exception from `happens` must propagate out of the call."""
    steps = itertools.count()
    is_asleep = has_happened = False
    raised: BaseException | None = None

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal is_asleep, has_happened, raised
        if event == "c_call" and frame.f_code is wait_any.__code__ and argument.__name__ == "acquire":
            is_asleep = frame.f_locals["lock"].locked()
        if is_asleep or (event in ("call", "c_return") and next(steps) == step):
            del frame  # it shows a signal handler's call
            sys.setprofile(None)
            has_happened = True
            try:
                happens()
            except BaseException as error:
                raised = error
                raise

    # Python swallows exceptions raised during garbage collection, which may run anywhere.
    gc.disable()
    sys.setprofile(profile)
    try:
        call()
        assert raised is None, f"the interrupt at step {step} was swallowed"
    except BaseException as error:
        if error is not raised:
            raise
    finally:
        sys.setprofile(None)
        gc.enable()
        raised = None
    return is_asleep or not has_happened


def interrupted_at(step: int, call: Callable[[], object], error: Callable[[], BaseException] = Interrupt) -> bool:
    """Do as `at_step`, with a signal whose handler raises an error."""

    def handle(*_: object) -> None:
        raise error()

    def happens() -> None:
        signal.raise_signal(SIGNAL)
        for _ in range(3):  # it has been handled by then
            pass

    before = signal.signal(SIGNAL, handle)
    try:
        return at_step(step, call, happens)
    finally:
        signal.signal(SIGNAL, before)
