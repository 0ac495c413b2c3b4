"""Makes "pccl" known to torch.distributed, at the end of every `import torch` (entry-point group `torch.backends`).

It is a module of its own, outside the package, because it must cost next to nothing and may not fail: pccl itself is
imported when the first process group is made.

Two functions of torch.distributed ask for one of its own backends by name, or for a GPU, before they ask the group:
`monitored_barrier` and `split_group`. They are wrapped, and do what they did for the groups of other backends.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

NAME = "pccl"
DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Register the backend, unless it is registered already. It warns, and does not raise, where torch refuses it."""
    try:
        from torch import distributed

        if not distributed.is_available() or NAME.upper() in distributed.Backend._plugins:
            return
        distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))
        # torch 2.15 would attach its own flight recorder, which groups that are written in Python cannot have.
        recording: set[str] = getattr(distributed.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recording.add(NAME)
        _extend(distributed, "monitored_barrier", _monitored_barrier)
        _extend(distributed, "split_group", _split_group)
    except Exception as error:
        warnings.warn(f"torch.distributed does not take pccl as a backend: {error!r}", RuntimeWarning, stacklevel=2)


def _create(options: Any, _: Any) -> Any:
    """Return the process group that c10d asks for."""
    from pccl.torch.process_group import ProcessGroupPCCL

    ranks = list(options.global_ranks_in_group)
    return ProcessGroupPCCL(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        global_ranks=ranks,
        name=options.group_id,
        is_default=not ranks,
        enable_reconfigure=getattr(options, "enable_reconfigure", False),  # from torch 2.15 on
    )


# Functions of torch.distributed.


def _extend(distributed: Any, name: str, ours: Callable[..., Any]) -> None:
    """Let a function of torch.distributed call `ours` for groups of pccl, with itself as the first argument."""
    theirs = getattr(distributed.distributed_c10d, name, None)
    if theirs is None:
        return

    @functools.wraps(theirs)
    def either(*args: Any, **keywords: Any) -> Any:
        return ours(theirs, *args, **keywords)

    for module in (distributed, distributed.distributed_c10d):
        setattr(module, name, either)


def _of_pccl(group: Any) -> Any:
    """Return the group, or the default one if it is None, if it is one of pccl; else None."""
    from torch import distributed

    if group is None and distributed.is_initialized():
        group = distributed.distributed_c10d._get_default_group()
    return group if hasattr(group, "monitored_barrier") and getattr(group, "is_of_pccl", False) else None


def _monitored_barrier(theirs: Any, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
    ours = _of_pccl(group)
    if ours is None:
        return theirs(group, timeout, wait_all_ranks)
    return ours.monitored_barrier(timeout, wait_all_ranks)


def _split_group(theirs: Any, parent_pg: Any = None, split_ranks: Any = None, *args: Any, **keywords: Any) -> Any:
    ours = _of_pccl(parent_pg)
    if ours is None or ours.bound_device_id is not None:
        return theirs(parent_pg, split_ranks, *args, **keywords)
    from pccl.torch.splitting import split_group

    return split_group(ours, split_ranks, *args, **keywords)
