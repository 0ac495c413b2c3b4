"""Most of these tests need no lab; those that do ask for it by name."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _needs_a_lab() -> None:
    """Take the place of what the other tests of a lab have."""


@pytest.fixture
def lab(reason_against_labs: str | None) -> None:
    if reason_against_labs is not None:
        pytest.skip(reason_against_labs)
