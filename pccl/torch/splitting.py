"""`torch.distributed.split_group` for groups of pccl that are bound to no GPU, for which torch's own asks.

A split is what `new_group` makes of some ranks that alone take part in making it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def split_group(
    parent: Any,
    split_ranks: Sequence[Sequence[int]] | None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: Any = None,
) -> Any:
    """Return the new group that this rank is in, or None. All ranks of the parent call it alike.

    Args:
        parent: The group to split.
        split_ranks: The ranks of each new group, as ranks of the parent. Each is in one of them at most.

    Raises:
        ValueError: If they are empty, or a group has a rank twice.
    """
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    for ranks in split_ranks:
        if not ranks:
            raise ValueError("the split group cannot be empty")
        if len(ranks) > parent.size():
            raise ValueError("the split group's size should be less or equal to the world_size of the parent group")
        if len(ranks) != len(set(ranks)):
            raise ValueError("the split group cannot have duplicate ranks")
    own = next((ranks for ranks in split_ranks if parent.rank() in ranks), None)
    if own is None:
        return None
    everybody = dist.get_process_group_ranks(parent)
    return dist.new_group(
        sorted(everybody[rank] for rank in own),
        timeout=timeout,
        backend=backend or dist.get_backend(parent),
        use_local_synchronization=True,
        group_desc=group_desc or f"{parent.group_desc}:split",
    )
