"""Calls that are interrupted, as by a signal, at any chosen place of them."""

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
    """An interrupt, as KeyboardInterrupt is one."""


class AlarmError(Exception):
    """An ordinary exception of a signal handler."""


KINDS: dict[str, Callable[[], BaseException]] = {"interrupt": Interrupt, "exception": AlarmError}
"""What signal handlers raise."""


def at_step(step: int, call: Callable[[], object], happens: Callable[[], object]) -> bool:
    """Makes the call; `happens` is called, in its thread, at that one of the places where Python looks for signals
    (where functions begin and built-in ones return), at the latest where the call sleeps. True if it was the last
    place: the call slept, or had ended before. What `happens` raises must come out of the call."""
    steps = itertools.count()
    is_asleep = has_happened = False
    raised: BaseException | None = None

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal is_asleep, has_happened, raised
        if event == "c_call" and frame.f_code is wait_any.__code__ and argument.__name__ == "acquire":
            is_asleep = frame.f_locals["lock"].locked()
        if is_asleep or (event in ("call", "c_return") and next(steps) == step):
            del frame  # which tells a signal handler's call
            sys.setprofile(None)
            has_happened = True
            try:
                happens()
            except BaseException as error:
                raised = error
                raise

    # Python swallows what is raised within a collection of garbage, which may come anywhere.
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
    """Do as `at_step` does; a signal comes there, whose handler raises an error."""

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
