"""Runs that the tests of a module share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.support.cluster import Cluster, run_of

ClusterOf = Callable[[int, int], Cluster]
"""A run with this number of peers, and segments of this number of bytes (0: the default)."""


def clusters() -> Iterator[ClusterOf]:
    """Yield a function that makes runs, and makes each of them once."""
    made: dict[tuple[int, int], Cluster] = {}
    with ExitStack() as stack:

        def get(world: int, segment_bytes: int) -> Cluster:
            key = world, segment_bytes
            if key not in made:
                options = {"segment_bytes": segment_bytes, "p2p_connection_pool_size": 1 + segment_bytes % 3}
                made[key] = stack.enter_context(run_of(world, **options))
            return made[key]

        yield get


@pytest.fixture(scope="module")
def cluster_of() -> Iterator[ClusterOf]:
    yield from clusters()
