"""The simulated run, and the worker processes, of the tests here."""

from tests.processes.conftest import run, start
from tests.simulation.conftest import world

__all__ = ["run", "start", "world"]
