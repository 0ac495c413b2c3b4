"""The simulated run that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation.world import World


@pytest.fixture
def world() -> Iterator[World]:
    """An empty run whose messages arrive in two parts. At the end it must come to rest without a hang."""
    world = World(cut_bytes=True)
    yield world
    for node in world.alive:
        world.thaw(node)
    world.engines.held_back.clear()
    world.run()
    world.check_rest()
