"""Makes a trio run a function of a seed.

What would differ from one run to the next is taken from the seed: the order of tasks that are ready at
the same moment, secrets, jitter, and worker threads, which do their work on the spot. Waits are measured in virtual
time, because reports contain them and the network divides messages by their lengths. System tasks belong to the
process of the simulation that starts them, so that they die with it. It does not change what the code under test
does, only which possible order is taken.

Names and sets of text follow PYTHONHASHSEED, which `campaign` sets.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import trio
import trio._core._run as trio_run

from pccl.runtime.data_plane import overlapped_waits
from pccl.runtime.session import control
from pccl.runtime.state import tensor_blocks

BLOCK_BYTES = 1024
"""Size of the blocks of a state."""

process_nursery: ContextVar[trio.Nursery] = ContextVar("process_nursery")
"""Holds the tasks of the process that the present task belongs to."""


async def _on_the_spot(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
    await trio.lowlevel.checkpoint()
    return function(*args)


def _spawn_system_task(function: Callable[..., Awaitable[Any]], *args: Any, name: object = None, **_: Any) -> None:
    process_nursery.get().start_soon(function, *args, name=name)


def _virtual_ns() -> int:
    return round(trio.current_time() * 1e9)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Have what happens follow from the seed."""
    chance = random.Random(f"secrets {seed}")
    with ExitStack() as stack:
        for target, name, value in (
            (trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
            (trio_run, "_r", random.Random(f"order {seed}")),
            (secrets, "token_bytes", chance.randbytes),
            (secrets, "token_hex", lambda size: chance.randbytes(size).hex()),
            (control, "_jitter", random.Random(f"jitter {seed}")),
            (trio.to_thread, "run_sync", _on_the_spot),
            (trio.lowlevel, "spawn_system_task", _spawn_system_task),
            (tensor_blocks, "BLOCK_BYTES", BLOCK_BYTES),
            (overlapped_waits, "time", SimpleNamespace(monotonic_ns=_virtual_ns)),
        ):
            stack.enter_context(patch.object(target, name, value))
        yield
