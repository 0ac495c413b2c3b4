"""Lets servers outlast the program that started them: its end waits until they are interrupted.

The end of the interpreter is a callback in the main thread, where Python calls handlers of signals. SIGINT and SIGTERM,
unless the program handles or ignores them, have the servers stop in order; then the process ends as if by the signal,
so that whoever waits for it learns that it was told to end. What a handler of the program's raises has them stop, too.

1. A program that ends by an exception is not outlasted: it has failed, and whoever supervises it is to see that.
2. A server that was interrupted is not waited for, beyond what its stopping may take.
3. Nothing waits in silence: a line on stderr says who goes on, and how to end it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Protocol

from pccl.runtime.extension import lib
from pccl.runtime.threads.latch import Latch

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP_TIMEOUT_S = 5.0
"""Time that an orderly stop may take."""
SAY_S = 0.5
"""Time for which a full stderr is waited for."""


class Server(Protocol):
    stopped: Latch
    is_interrupted: bool
    description: str
    fault: str
    """The reason why it has stopped by itself, if it has."""

    def interrupt(self) -> None:
        """Begin to stop. Never waits; also for signal handlers."""


def has_failed() -> bool:
    """Return whether the program is ending by an exception. An exit is none, nor does one count in the interactive
    interpreter."""
    ending_by = getattr(sys, "last_value", None) if not hasattr(sys, "ps1") else None
    return any(error is not None and not isinstance(error, SystemExit) for error in (ending_by, sys.exc_info()[1]))


def outlast(servers: Sequence[Server]) -> None:
    """Wait until all servers have stopped. For the main thread, where the program has ended."""
    ending_by: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        ending_by.append(number)
        interrupt()

    def interrupt() -> None:
        for server in servers:
            server.interrupt()

    try:
        with suppress(ValueError):  # not the main thread
            for number in SIGNALS:
                if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                    signal.signal(number, end)
        names = " and ".join(server.description for server in servers)
        _say(f"the program has ended, {names} goes on until Ctrl-C or SIGTERM")
        for server in servers:
            server.stopped.wait()
    except KeyboardInterrupt:
        ending_by.append(signal.SIGINT)
    except SystemExit:
        pass
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    interrupt()
    for server in servers:
        server.stopped.wait(STOP_TIMEOUT_S)
        if server.fault:
            _say(server.fault)
    if ending_by:
        lib.pccl_end_by_signal(ending_by[0])


def _say(line: str) -> None:
    with suppress(Exception):  # there may be no stderr
        poll = select.poll()
        poll.register(sys.stderr.fileno(), select.POLLOUT)
        if poll.poll(SAY_S * 1000):  # so a line of this length does not wait, as on a pipe that nobody reads
            os.write(sys.stderr.fileno(), f"pccl: {line}\n".encode(errors="backslashreplace"))


def at_the_end_of_a_child(callback: Callable[[], object]) -> None:
    """Have `callback` called at the end of a process of multiprocessing, which may end without the interpreter's
    end."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        sys.modules["multiprocessing.util"].Finalize(None, callback, exitpriority=0)
