"""Calls that are interrupted, as by a signal, at any chosen place of them."""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from pccl.runtime.threads.latch import wait_any


class Interrupt(BaseException):
    """An interrupt, as KeyboardInterrupt is one."""


def at_step(step: int, call: Callable[[], object], happens: Callable[[], object]) -> bool:
    """Makes the call; `happens` is called, in its thread, at that one of the places where Python looks for signals
    (where functions begin and built-in ones return), at the latest where the call sleeps. True if it was the last
    place: the call slept, or had ended before. An Interrupt that `happens` raises must come out of the call."""
    steps = itertools.count()
    is_asleep = has_happened = has_raised = False

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal is_asleep, has_happened, has_raised
        if event == "c_call" and frame.f_code is wait_any.__code__ and argument.__name__ == "acquire":
            is_asleep = frame.f_locals["lock"].locked()
        if is_asleep or (event in ("call", "c_return") and next(steps) == step):
            sys.setprofile(None)
            has_happened = True
            try:
                happens()
            except Interrupt:
                has_raised = True
                raise

    # Python swallows what is raised within a collection of garbage, which may come anywhere.
    gc.disable()
    sys.setprofile(profile)
    try:
        call()
        assert not has_raised, f"the interrupt at step {step} was swallowed"
    except Interrupt:
        pass
    finally:
        sys.setprofile(None)
        gc.enable()
    return is_asleep or not has_happened


def interrupted_at(step: int, call: Callable[[], object]) -> bool:
    """Do as `at_step` does, with Interrupt raised there."""

    def interrupt() -> None:
        raise Interrupt

    return at_step(step, call, interrupt)
