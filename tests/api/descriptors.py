"""Descriptors of many ops that are made in one call."""

from __future__ import annotations

from typing import Any

import numpy as np

from pccl import ReduceDescriptor, ReduceOpDescriptor
from tests.support.cluster import SUM


def descriptors(count: int, tags: list[int]) -> tuple[list[Any], list[ReduceOpDescriptor]]:
    """Return arrays that are full of their tags, and what reduces them in many ops at once."""
    arrays = [np.full(count, tag, np.float64) for tag in tags]
    return arrays, [
        ReduceOpDescriptor.from_numpy(x, x, ReduceDescriptor(x.size, SUM, tag))
        for x, tag in zip(arrays, tags, strict=True)
    ]
