"""Signal handlers that close the communicator, wherever they interrupt it."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from pccl import PCCLError
from pccl.runtime.data_plane import engine
from tests.support.cluster import run_of


@pytest.mark.parametrize("what", ["stats", "recording"])
def test_a_signal_handler_may_close_whoever_is_asked_for_counters(what: str) -> None:
    """Wherever it interrupts that: nobody waits for a lock that is held there."""
    step, is_over = 0, False
    while not is_over:
        with run_of(2) as cluster:
            left, is_over = step, True

            def trace(frame: FrameType, event: str, _: Any) -> Any:
                nonlocal left, is_over
                if frame.f_code.co_filename == engine.__file__ and event == "line":
                    left -= 1
                    if left == -1:
                        is_over = False
                        sys.settrace(None)
                        signal.raise_signal(signal.SIGUSR1)
                return trace

            before = signal.signal(signal.SIGUSR1, lambda *_: cluster[0].close())
            sys.settrace(trace)
            try:
                with suppress(PCCLError):
                    _ = cluster[0].stats if what == "stats" else cluster[0].flight_recorder()
            finally:
                sys.settrace(None)
                signal.signal(signal.SIGUSR1, before)
            assert cluster[0].is_connected == is_over
        step += 1
    assert step > 2
