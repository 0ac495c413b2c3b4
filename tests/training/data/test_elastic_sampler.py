"""Each sample of an epoch is used once, through losses and joins at any moment of a step."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl import PCCLError, Result
from pccl.training import ElasticSampler
from pccl.training.data.stream import Assignment, Pool
from tests.training.data.sampler_group import Group, Loader


@given(
    st.integers(0, 100),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=5),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 20)), min_size=1, max_size=4),
)
def test_assignment_gives_each_position_once(
    begun: int, gaps: list[tuple[int, int]], members: list[tuple[int, int]]
) -> None:
    free, at = [], 0
    for used, left in gaps:
        free.append((at + used, at + used + left))
        at += used + left
    pool = Pool(max(begun, at) + 1, free)
    deal = Assignment(pool, [block for block, _ in members])
    counts = [count for _, count in members]
    # The naive way: the pool's positions in order, dealt round by round.
    positions = [p for each in pool.free for p in range(*each)] + list(range(pool.begun, pool.begun + 1000))
    hands: list[list[int]] = [[] for _ in members]
    rest = iter(positions)
    while min(map(len, hands)) < 40:
        for hand, (block, _) in zip(hands, members, strict=True):
            hand += islice(rest, block)
    for i, count in enumerate(counts):
        found = [p for each in deal.ranges(i, 0, count) for p in range(*each)]
        assert found == hands[i][:count]
    used = {p for i, count in enumerate(counts) for p in hands[i][:count]}
    left = deal.rest(counts)
    assert deal.lowest(counts) == min(set(positions) - used) == left.position(0)
    remaining = {p for each in left.free for p in range(*each)} | set(range(left.begun, pool.begun + 1000))
    assert remaining == set(positions) - used


@settings(max_examples=15)
@given(
    st.randoms(use_true_random=False),
    st.integers(1, 300),
    st.sampled_from([0, 1]),
    st.sampled_from([None, 1, 3]),
    st.booleans(),
)
def test_samples_are_used_once_through_churn(
    choice: random.Random, size: int, lag: int, quota: int | None, shuffle: bool
) -> None:
    group = Group(size, choice, lag=lag, quota=quota, shuffle=shuffle)
    group.admit(choice.randint(1, 5))
    for _ in range(15):
        group.step(choice.choice([0.0, 0.0, 0.1, 0.3]))
        if choice.random() < 0.3:
            group.drain()
            group.admit(choice.randint(0, 3))


def test_shares_follow_speeds() -> None:
    """A peer that makes a tenth of the others' steps holds no epoch up."""
    choice = random.Random(0)
    group = Group(10_000, choice)
    group.admit(3)
    for _ in range(40):
        for member, batches in zip(group.members, (40, 40, 4), strict=True):
            member.train(batches * 7 // (member.sampler.batch_size or 1))
            member.claim()
        amounts = {member.number: member.sampler.drawn for member in group.members}
        for member in group.members:
            member.sampler._claim(amounts)
        group.flights += 1
        group._land(0.0)
    state = group.members[0].sampler.state_dict()
    lowest = min([state["begun"], *(begin for begin, _ in state["free"])])
    assert state["begun"] - lowest < 3 * 84 * 7
    assert len(state["free"]) < 20


def alone(size: int = 10, **options: Any) -> ElasticSampler:
    sampler = ElasticSampler(size, **options)
    sampler.regroup(None)
    return sampler


def step(sampler: ElasticSampler) -> None:
    sampler.claim(None)
    sampler.commit()


def test_iteration_ends_with_the_epoch_and_batches_are_full() -> None:
    sampler = alone(batch_size=4)
    seen: list[int] = []
    for epoch in range(1, 4):
        for batch in sampler:
            assert len(batch) == 4
            seen += batch
            step(sampler)
        assert sampler.epoch == epoch
        assert sorted(seen[10 * epoch - 10 : 10 * epoch]) == list(range(10))
    assert len(seen) == 32
    assert seen[:10] != seen[10:20]


def test_numpy_batches_are_endless() -> None:
    sampler = alone()
    batches = sampler.batches(3)
    first = next(batches)
    assert first.dtype == np.int64
    found = [first, *islice(batches, 9)]
    assert sorted(np.concatenate(found)[:10].tolist()) == list(range(10))
    assert sampler.drawn == 30
    step(sampler)
    assert sampler.epoch == 3


def test_unshuffled_order() -> None:
    assert list(islice(alone(shuffle=False), 4)) == [0, 1, 2, 3]


def test_discarded_samples_are_drawn_again() -> None:
    sampler = alone(batch_size=2)
    first = list(islice(iter(sampler), 2))
    sampler.discard()
    assert sampler.drawn == 0
    assert list(islice(iter(sampler), 2)) == first


def test_batches_end_with_the_step() -> None:
    sampler = alone(100, batch_size=4, samples_per_step=10)
    draws = iter(sampler)
    assert [len(next(draws)) for _ in range(3)] == [4, 4, 2]
    with pytest.raises(RuntimeError, match="10 samples were drawn since the last step, and samples_per_step=10 allows"):
        next(draws)
    assert len(sampler) == 30


def test_too_few_samples_are_refused_before_claim() -> None:
    sampler = alone(batch_size=2, samples_per_step=4)
    next(iter(sampler))
    with pytest.raises(RuntimeError, match="2 samples were drawn for this step, but samples_per_step=4"):
        sampler.claim(None)
    next(iter(sampler))
    step(sampler)
    assert sampler.state_dict()["begun"] == 4


def test_claim_without_average_joins_the_next() -> None:
    sampler = alone(100, batch_size=2)
    next(iter(sampler))
    sampler.claim(None)  # and the average fails
    next(iter(sampler))
    step(sampler)
    assert sampler.state_dict()["begun"] == 4
    assert sampler.state_dict()["steps"] == 1


def test_prefetched_batches_are_kept() -> None:
    sampler = alone(30, batch_size=3)
    loader = Loader(sampler, ahead=4)
    order = [batch.tolist() for batch in islice(alone(30).batches(3), 20)]
    found = list(islice(sampler.track(loader), 2))
    step(sampler)
    assert sampler.state_dict()["begun"] == 6
    for batch in sampler.track(loader):
        found.append(batch)
        step(sampler)
    assert sampler.epoch == 1
    for batch in islice(sampler.track(loader), 5):
        found.append(batch)
    assert found == order[:15]
    # Another loader begins where the last batch was handed out.
    assert next(sampler.track(Loader(sampler, ahead=1))) == order[15]


def test_prefetched_batches_are_dropped_on_regroup() -> None:
    sampler = alone(30, batch_size=3)
    loader = Loader(sampler, ahead=4)
    found = [next(sampler.track(loader))]
    step(sampler)
    sampler._form(0, {0: sampler._announcement(), 1: [5, 3, 0]})
    order = [batch.tolist() for batch in islice(alone(30).batches(3), 20)]
    found += islice(sampler.track(loader), 3)
    assert found == [order[0], order[1], order[3], order[5]]


def test_track_counts_loader_batches_of_single_indices() -> None:
    sampler = alone(30)
    loader = Loader(sampler, ahead=2, batch_size=4)
    batches = list(islice(sampler.track(loader), 3))
    assert [len(batch) for batch in batches] == [4, 4, 4]
    assert sampler.drawn == 12


def test_state_of_another_stream_is_refused() -> None:
    state = alone(10, seed=1).state_dict()
    with pytest.raises(ValueError, match="the run's ElasticSampler has seed 1, not 0 as here: use the same"):
        alone(10).load_state_dict(state)
    with pytest.raises(ValueError, match="dataset_size 10, not 11 as here"):
        alone(11, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="not the state of an ElasticSampler: KeyError"):
        alone(10).load_state_dict({})
    for wrong in ({"free": [[3, 2]]}, {"begun": -1}, {"free": [[0, 9]], "begun": 4}):
        with pytest.raises(ValueError, match="are not the state of a sampler"):
            alone(10, seed=1).load_state_dict({**state, **wrong})


def test_drawing_before_join_is_refused() -> None:
    sampler = ElasticSampler(10)
    with pytest.raises(RuntimeError, match="not in a run yet: pass it to the training class"):
        next(iter(sampler))


def test_commit_of_unclaimed_peers_is_refused() -> None:
    sampler = alone()
    sampler.claim(None)
    with pytest.raises(PCCLError, match=r"peers \[0, 7\] took part in a step, but only \[0\]") as caught:
        sampler.commit([0, 7])
    assert caught.value.result is Result.INVALID_USAGE


def test_samples_per_step_on_some_peers_is_refused() -> None:
    sampler = ElasticSampler(10, samples_per_step=2)
    with pytest.raises(ValueError, match=r"of the peers \[4, 9\] only \[4\] have samples_per_step"):
        sampler._form(4, {4: sampler._announcement(), 9: [1, 2, 0]})


def test_wrong_arguments(tmp_path: Path) -> None:
    for options in ({"batch_size": 0}, {"samples_per_step": 0}):
        with pytest.raises(ValueError, match=" 0 is not an integer of at least 1"):
            ElasticSampler(10, **options)
    with pytest.raises(ValueError, match="dataset_size 0 is not an integer in"):
        ElasticSampler(0)
    with pytest.raises(ValueError, match="seed -1"):
        ElasticSampler(1, -1)
    with pytest.raises(ValueError, match="batch_size None is not an integer"):
        alone().batches()
    with pytest.raises(ValueError, match="does not draw from this sampler"):
        alone(batch_size=3).track(Loader(alone(batch_size=3), 0))
