"""Waiting for other ranks at a c10d store, never in silence and never for somebody unnamed.

A store says which keys it waits for, and not for whom; and while it waits it says nothing. Here each key is a rank's,
so that warnings of long waits (`protocol.long_wait`) and errors name the ranks that have not come. The store is asked
again and again, since a wait of torch's own that ends early leaves warnings of sockets behind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed import DistStoreError

from pccl.protocol.long_wait import LongWait
from pccl.torch.errors import Names

logger = logging.getLogger("pccl.torch")

PAUSE_S_MIN = 0.001
PAUSE_S_MAX = 0.1
"""Seconds between two looks, which grow from the first to the second."""


def wait_for_ranks(
    store: Any,
    rank_of: Mapping[str, int],
    names: Names,
    deadline_s: float,
    is_moot: Callable[[], bool] = lambda: False,
) -> bool:
    """Return True when the store has all keys, each of which a rank sets when it has called the same as this one.

    False: `is_moot()` says, which is asked now and then, that nobody will set them any more.

    Raises:
        DistStoreError: with the ranks that have not come, when the time has passed.
    """
    began = time.monotonic()
    wait = LongWait(f"making {names.group}", began)
    missing, now, pause_s = list(rank_of.values()), began, PAUSE_S_MIN
    while missing:
        missing = [rank for key, rank in rank_of.items() if not store.check([key])]
        now = time.monotonic()
        if not missing or is_moot():
            break
        ranks = ", ".join(map(names.of, missing))
        if now >= deadline_s:
            have = "has" if len(missing) == 1 else "have"
            text = f"making {names.group} timed out on {names.of(names.rank)} after {now - began:.1f} s: {ranks} {have}"
            raise DistStoreError(f"{text} not called it, or cannot reach the store")
        if wait.is_due(now):
            whom = f"{ranks}, which {'has' if len(missing) == 1 else 'have'} not called it"
            logger.warning("%s", wait.warning(now, whom, "look at what the program does there"))
        time.sleep(min(pause_s, deadline_s - now))
        pause_s = min(PAUSE_S_MAX, pause_s * 1.5)
    if wait.is_told:
        logger.warning("%s", wait.ending(now))
    return not missing
