"""An order that is never stored: a bijection, of seed and epoch, and the same on every machine."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pccl.training.data.stream import Permutation


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_every_number_comes_once(size: int, seed: int, epoch: int) -> None:
    found = Permutation(size, seed, epoch)(np.arange(size))
    assert np.array_equal(np.sort(found), np.arange(size))


def test_it_is_the_same_everywhere() -> None:
    assert Permutation(10, 1, 2)(np.arange(10)).tolist() == [7, 6, 0, 4, 8, 3, 1, 5, 9, 2]
    large = Permutation(10**12, 2**64 - 1, 7)
    assert large(np.array([0, 1, 10**12 - 1])).tolist() == [29235459765, 728293579540, 631305953976]


def test_orders_of_other_seeds_and_epochs_are_others() -> None:
    places = np.arange(10_000)
    orders = [Permutation(10_000, seed, epoch)(places) for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    for i, order in enumerate(orders):
        for other in orders[:i]:
            assert np.count_nonzero(order == other) < 20  # one in the mean
