"""Tasks of pccl's own within a user's trio program.

Where trio runs in the main thread, Ctrl-C is raised in whatever is running then, unless that is protected. In a task of
pccl it would end the session, and trio with it, for neither expects it there. So all of them are protected, and so are
the calls that users make, where these are not waiting: trio then has the main task raise KeyboardInterrupt where it
next waits, or waits already. That is the program's own code, or a call of pccl that undoes what it began.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVarTuple

import trio

Args = TypeVarTuple("Args")


@trio.lowlevel.enable_ki_protection
async def _protected(function: Callable[[*Args], Awaitable[object]], *args: *Args) -> None:
    await function(*args)


def start_task(nursery: trio.Nursery, function: Callable[[*Args], Awaitable[object]], *args: *Args) -> None:
    """Start a task in the nursery, protected from KeyboardInterrupt."""
    nursery.start_soon(_protected, function, *args, name=function)
