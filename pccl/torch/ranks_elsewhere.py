"""What torch keeps of a group's ranks outside of the group, brought up to date when the group is reconfigured.

torch takes a process's rank for constant. Where it does not hold, programs would compute with the rank of an earlier
world, and not notice:

    DTensor   keeps the results of its sharding rules by mesh. A mesh of as many ranks as one before is equal to that,
              so tensors would get that one's object, which has this process at another coordinate: shards would be
              saved at offsets that are others', or twice.
    c10d      keeps the global rank of each rank of a group. In the default group these are the same numbers.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.distributed import distributed_c10d as c10d


def update(group: Any, size: int) -> None:
    """Have torch forget the ranks that this process and others had before `group` was reconfigured."""
    if group is c10d._world.default_pg:
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    if "torch.distributed.tensor" in sys.modules:
        _forget_shardings()


def _forget_shardings() -> None:
    from torch.distributed.tensor import DTensor, _redistribute, debug

    # Not every release has all of these.
    propagator = DTensor._op_dispatcher.sharding_propagator
    caches = [*vars(_redistribute).values(), *vars(type(propagator)).values(), *vars(propagator).values()]
    for cached in caches:
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    for name, cached in list(vars(propagator).items()):
        if hasattr(cached, "cache_info") and not hasattr(cached, "cache_clear"):
            # Its caches, one for each thread, can only be replaced all at once (torch 2.6).
            setattr(propagator, name, type(cached)(cached.cache.__wrapped__))
    for name in ("_clear_sharding_prop_cache", "_clear_python_sharding_prop_cache"):
        if hasattr(debug, name):
            getattr(debug, name)()
            break
