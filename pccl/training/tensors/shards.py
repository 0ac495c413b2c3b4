"""A rank's shard of a parameter that torch.distributed spreads over several (DTensor, as FSDP2 makes them)."""

from __future__ import annotations

from typing import Any


def is_distributed(tensor: Any) -> bool:
    return hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh")


def local_shard(tensor: Any) -> Any:
    """Return this rank's part of a distributed tensor, sharing its memory and without its gradient's history; any other
    tensor as it is. ValueError: it holds partial sums, which are no part of the values."""
    if not is_distributed(tensor):
        return tensor.detach()
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"a tensor placed as {tensor.placements} holds partial sums; redistribute it first")
    return tensor.detach().to_local()


def describe(tensor: Any) -> str:
    """Return where the shard is among those of the site: equal for the same rank of another site. Empty without
    shards."""
    if not is_distributed(tensor):
        return ""
    mesh = tensor.device_mesh
    return f" shard {mesh.get_coordinate()} of {tuple(mesh.shape)} {tensor.placements}"
