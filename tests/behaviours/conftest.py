"""The simulated run that tests share."""

from tests.simulation.conftest import world

__all__ = ["world"]
