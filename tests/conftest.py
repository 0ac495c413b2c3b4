"""Fixtures for tests that need a run, and how Hypothesis works here."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from pccl import MasterNode
from tests.crew import Crew

# Examples talk over real sockets, so their time says nothing; a failure prints the blob that reproduces it.
settings.register_profile("pccl", deadline=None, print_blob=True)
settings.load_profile("pccl")

# A test that stops its master as a rule wants to see what becomes of peers that find no other.
os.environ.setdefault("PCCL_MASTER_TIMEOUT", "1")


@pytest.fixture
def master() -> Iterator[MasterNode]:
    """A master in this process, on a free port."""
    with MasterNode("127.0.0.1:0") as node:
        yield node


@pytest.fixture
def crew(master: MasterNode) -> Iterator[Crew]:
    """A run without peers yet."""
    crew = Crew(master.address)
    yield crew
    crew.close_all()
