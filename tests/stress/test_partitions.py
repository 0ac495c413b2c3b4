"""Partitions: every kind and way, healed in time, and who may lose a place by them."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from pccl.stress.partitions import AT_ONCE_MAX, MASTER, Partition, Partitions, may_be_lost
from pccl.stress.plan import Interval, Plan

PLAN = Plan(partition=Interval(1, 2), partition_for=Interval(0.5, 3))
SLOTS = [0, 2, 5, 7]


def _play(seed: int, count: int = 200) -> list[Partition]:
    partitions = Partitions(PLAN, Random(seed), 0.0)
    made = []
    for _ in range(count):
        now = partitions.next_at
        for healed in partitions.heal(now):
            assert healed not in partitions.active
        partition = partitions.begin(now, SLOTS)
        assert 1 <= partitions.next_at - now <= 2
        if partition is not None:
            made.append(partition)
            assert 0.5 <= partition.seconds <= 3
            for sender, receiver in partition.blocked:
                assert sender in partitions.blocked_for(receiver)
        assert len(partitions.active) <= AT_ONCE_MAX
        assert all(now < partitions.heals_at <= now + 3 for _ in partitions.active)
    partitions.heal(float("inf"))
    assert not partitions.active
    assert not partitions.blocked_for(MASTER)
    return made


def test_every_kind_in_every_way() -> None:
    made = _play(1)
    assert {partition.kind for partition in made} == {"pair", "peer", "master", "half"}
    assert {str(partition).rpartition(", ")[2] for partition in made} == {"both ways", "outwards", "inwards"}
    for partition in made:
        processes = {each for way in partition.blocked for each in way}
        assert processes <= {*SLOTS, MASTER}
        if partition.kind == "pair":
            assert len(processes - {MASTER}) == len(processes) == 2
        elif partition.kind == "master":
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
        partition = Partitions(plan, Random(seed), 0.0).begin(1.0, SLOTS)
        assert partition is not None
        here = masters & {each for way in partition.blocked for each in way}
        assert partition.involved == {each for way in partition.blocked for each in way} - masters
        if partition.kind == "master":
            cut_off.add(frozenset(here))
        elif partition.kind == "peer":
            assert here == masters
        elif partition.kind == "half":
            sides.add(len(masters & partition.island))
    assert cut_off == {frozenset((master,)) for master in masters} | {frozenset(masters)}
    assert sides == {0, 1, 2, 3}


def test_one_peer_has_nobody_to_be_cut_off_from_but_the_master() -> None:
    for seed in range(20):
        partition = Partitions(PLAN, Random(seed), 0.0).begin(1.0, [3])
        assert partition is not None
        assert partition.blocked <= {(3, MASTER), (MASTER, 3)}
    assert Partitions(PLAN, Random(1), 0.0).begin(1.0, []) is None


def test_nobody_is_cut_off_where_it_is_not_asked_for() -> None:
    assert Partitions(Plan(), Random(1), 0.0).next_at == float("inf")


def _cut(kind: str, island: set[int], others: set[int]) -> Partition:
    blocked = frozenset((a, b) for a in island for b in others)
    return Partition(kind, frozenset(island), blocked, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("partition", "lost"),
    [
        (_cut("pair", {0}, {2}), {0, 2}),
        (_cut("master", {0}, {MASTER}), {0}),
        (_cut("peer", {0}, {2, 5, 7, MASTER}), {0}),
        (_cut("peer", {7}, {0, 2, 5, MASTER}), {0, 2, 5, 7}),  # its group has only two
        (_cut("half", {0, 2}, {5, 7, MASTER}), {0, 2, 5, 7}),
        (_cut("half", {0, MASTER}, {2, 5, 7}), {0, 2, 5, 7}),
    ],
)
def test_who_may_lose_its_place(partition: Partition, lost: set[int]) -> None:
    assert may_be_lost(partition, {0: 0, 2: 0, 5: 0, 7: 1, 8: 1}) == lost
