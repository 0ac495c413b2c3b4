"""The boundaries between deliveries at which families of tests have something happen, and their default share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

SHARES = pytest.mark.parametrize(
    "share", [pytest.param((0,), id="a sixth"), pytest.param((1, 2, 3, 4, 5), id="the others", marks=pytest.mark.slow)]
)
"""The tests of a family whose boundaries are tried by default, and the others."""


def boundaries(share: tuple[int, ...], stride: int) -> Iterator[int]:
    """Yield the numbers of deliveries, without end, before which a share of a family's faults are tried."""
    return (1 + index * stride for index in count() if index % 6 in share)
