"""The simulated run that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation.world import World


@pytest.fixture(params=["whole", "byte by byte"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """An empty run. Whatever a test leaves under way must come to rest, and hang nobody."""
    world = World(cut_bytes=request.param == "byte by byte")
    yield world
    for node in world.alive:
        world.thaw(node)
    world.engines.held_back.clear()
    world.run()
    world.check_rest()
