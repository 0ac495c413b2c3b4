"""Ranks of torch process groups as threads of one process, which share a store in memory.

torch keeps its groups in one world for each process. Here each thread has a world of its own, so that a test is written
as a script of one rank, with `torch.distributed` as a user calls it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.testing._internal.distributed import multi_threaded_pg

import pccl.torch  # noqa: F401  (registers the backend)

LIMIT_S = 60.0


@contextmanager
def worlds() -> Iterator[None]:
    """Give each thread a world of torch.distributed of its own."""
    multi_threaded_pg._install_threaded_pg()
    _distributed_c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        _distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()


def run_ranks(
    size: int, script: Callable[[int], Any], *, timeout: float = LIMIT_S, ends: bool = True, backend: str = "pccl"
) -> list[Any]:
    """Run `script(rank)` in a thread for each rank, with a default group of pccl, and return what each returns.

    What the first of them raises is raised here. `ends`: destroy the group at the end of each script.
    """
    assert "PCCL_MASTER" not in os.environ
    store = dist.HashStore()
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            limit = timedelta(seconds=timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
            results[rank] = script(rank)
        except BaseException as error:
            errors.append(error)
        finally:
            if ends and dist.is_initialized():
                dist.destroy_process_group()

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a rank has not come to its end"
    if errors:
        raise errors[0]
    return results
