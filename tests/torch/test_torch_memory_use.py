"""Which calls of a process group have to wait for each other, because they use the same memory."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")

from pccl.torch.memory_use import Span, Use, Uses, use_of  # noqa: E402


def _is_disturbed(one: Use, other: Use) -> bool:
    def places(spans: Sequence[Span]) -> set[int]:
        return {place for span in spans for place in range(*span)}

    used, others = places([*one.reads, *one.writes]), places([*other.reads, *other.writes])
    return bool(places(one.writes) & others or used & places(other.writes))


def _some_use(chance: random.Random) -> Use:
    def spans() -> list[Span]:
        starts = [chance.randrange(100) for _ in range(chance.randrange(3))]
        return [(start, start + chance.choice((1, 2, 30))) for start in starts]

    return Use(spans(), spans())


def test_conflicting_uses_found() -> None:
    chance = random.Random(1)
    uses: Uses[int] = Uses()
    known: dict[int, Use] = {}
    for number in range(400):
        use = _some_use(chance)
        expected = {owner for owner, other in known.items() if _is_disturbed(use, other)}
        found = uses.disturbed_by(use)
        assert set(found) == expected
        assert len(found) == len(expected)
        uses.add(number, use)
        known[number] = use
        if len(known) > 10:
            gone = chance.choice(list(known))
            uses.remove(gone)
            del known[gone]
    uses.remove(-1)


def test_memory_of_tensors() -> None:
    whole = torch.zeros(4, 6)
    start = whole.data_ptr()
    assert use_of([whole], [whole[1], whole[:, 1], torch.zeros(0)]) == Use(
        [(start, start + 96)], [(start + 24, start + 48), (start + 4, start + 4 + 76)]
    )
