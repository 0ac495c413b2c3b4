"""A host whose large packets vanish costs the others an interruption, and none of them its place. How long it lasts is
printed by `python -m tests.wan.black_hole`."""

from __future__ import annotations

import pytest

from tests.wan.black_hole import watch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("when", "sick"), [("later", 1), ("later", 3), ("always", 3)])
def test_black_hole_is_evicted(when: str, sick: int) -> None:
    found = watch(when, peer_timeout_s=1.0, seconds=10.0, sick=sick)
    assert found.evicted_healthy == []
    assert found.evicted_sick
    assert "is the path's MTU right?" in found.evicted_sick[0]
    assert found.joins_of_sick == 0
    assert found.steps > 0


def test_black_hole_is_readmitted() -> None:
    found = watch("at first", peer_timeout_s=1.0, seconds=30.0)
    assert found.evicted_healthy == []
    assert found.joins_of_sick == 1
