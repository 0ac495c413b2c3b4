"""Who is cut off from whom: every kind and way, healed in time, and who may lose a place by it."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from pccl.stress.plan import Interval, Plan
from pccl.stress.splits import AT_ONCE_MAX, MASTER, Split, Splits, may_be_lost

PLAN = Plan(partition=Interval(1, 2), partition_for=Interval(0.5, 3))
SLOTS = [0, 2, 5, 7]


def _play(seed: int, count: int = 200) -> list[Split]:
    splits = Splits(PLAN, Random(seed), 0.0)
    made = []
    for _ in range(count):
        now = splits.next_at
        for healed in splits.heal(now):
            assert healed not in splits.active
        split = splits.split(now, SLOTS)
        assert 1 <= splits.next_at - now <= 2
        if split is not None:
            made.append(split)
            assert 0.5 <= split.seconds <= 3
            for sender, receiver in split.blocked:
                assert sender in splits.deaf_to(receiver)
        assert len(splits.active) <= AT_ONCE_MAX
        assert all(now < splits.heals_at <= now + 3 for _ in splits.active)
    splits.heal(float("inf"))
    assert not splits.active
    assert not splits.deaf_to(MASTER)
    return made


def test_every_kind_in_every_way() -> None:
    made = _play(1)
    assert {split.kind for split in made} == {"pair", "peer", "master", "half"}
    assert {str(split).rpartition(", ")[2] for split in made} == {"both ways", "outwards", "inwards"}
    for split in made:
        processes = {each for way in split.blocked for each in way}
        assert processes <= {*SLOTS, MASTER}
        if split.kind == "pair":
            assert len(processes - {MASTER}) == len(processes) == 2
        elif split.kind == "master":
            assert MASTER in processes
            assert len(processes) == 2
        else:
            assert processes == {*SLOTS, MASTER}
    assert made == _play(1) != _play(2)


def test_masters_are_cut_off_together_or_apart() -> None:
    plan = msgspec.structs.replace(PLAN, standbys=2)
    masters = {MASTER, MASTER - 1, MASTER - 2}
    cut_off, sides = set(), set()
    for seed in range(400):
        split = Splits(plan, Random(seed), 0.0).split(1.0, SLOTS)
        assert split is not None
        here = masters & {each for way in split.blocked for each in way}
        assert split.involved == {each for way in split.blocked for each in way} - masters
        if split.kind == "master":
            cut_off.add(frozenset(here))
        elif split.kind == "peer":
            assert here == masters
        elif split.kind == "half":
            sides.add(len(masters & split.island))
    assert cut_off == {frozenset((master,)) for master in masters} | {frozenset(masters)}
    assert sides == {0, 1, 2, 3}


def test_one_peer_has_nobody_to_be_cut_off_from_but_the_master() -> None:
    for seed in range(20):
        split = Splits(PLAN, Random(seed), 0.0).split(1.0, [3])
        assert split is not None
        assert split.blocked <= {(3, MASTER), (MASTER, 3)}
    assert Splits(PLAN, Random(1), 0.0).split(1.0, []) is None


def test_nobody_is_split_where_it_is_not_asked_for() -> None:
    assert Splits(Plan(), Random(1), 0.0).next_at == float("inf")


def _cut(kind: str, island: set[int], others: set[int]) -> Split:
    blocked = frozenset((a, b) for a in island for b in others)
    return Split(kind, frozenset(island), blocked, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("split", "lost"),
    [
        (_cut("pair", {0}, {2}), {0, 2}),
        (_cut("master", {0}, {MASTER}), {0}),
        (_cut("peer", {0}, {2, 5, 7, MASTER}), {0}),
        (_cut("peer", {7}, {0, 2, 5, MASTER}), {0, 2, 5, 7}),  # its group has only two
        (_cut("half", {0, 2}, {5, 7, MASTER}), {0, 2, 5, 7}),
        (_cut("half", {0, MASTER}, {2, 5, 7}), {0, 2, 5, 7}),
    ],
)
def test_who_may_lose_its_place(split: Split, lost: set[int]) -> None:
    assert may_be_lost(split, {0: 0, 2: 0, 5: 0, 7: 1, 8: 1}) == lost
