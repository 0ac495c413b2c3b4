"""Everything here needs a lab, or is skipped with the reason why there can be none."""

from __future__ import annotations

import pytest

from tests.wan.lab import unavailable


@pytest.fixture(scope="session")
def reason_against_labs() -> str | None:
    return unavailable()


@pytest.fixture(autouse=True)
def _needs_a_lab(reason_against_labs: str | None) -> None:
    if reason_against_labs is not None:
        pytest.skip(reason_against_labs)


def is_over(pid: int) -> bool:
    """Ended, but perhaps not reaped, where its parent was killed."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
