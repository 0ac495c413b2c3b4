"""Makes "pccl" known to torch.distributed, at the end of every `import torch` (entry-point group `torch.backends`).

It is a module of its own, outside the package, because it must cost next to nothing and may not fail: pccl itself is
imported when the first process group is made.
"""

from __future__ import annotations

import warnings
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
    )
