"""Random numbers by step and peer: reproducible, and never the same twice."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from pccl.training import RandomStreams


def test_a_stream_is_a_function_of_seed_step_and_peer() -> None:
    first = RandomStreams(5).numpy(7, 3).random(4)
    assert np.array_equal(first, RandomStreams(5).numpy(7, 3).random(4))
    assert first.tolist() == RandomStreams(5).numpy(step=7, peer=3).random(4).tolist()
    assert RandomStreams(5).number(7, 3) == 8152173121867318944


def test_streams_of_steps_peers_and_seeds_differ() -> None:
    keys = list(product([0, 1, 2**64 - 1], [0, 1, 2], [0, 1, 2**63]))
    numbers = [int(RandomStreams(seed).numpy(step, peer).integers(2**63)) for seed, step, peer in keys]
    seeds = [RandomStreams(seed).number(step, peer) for seed, step, peer in keys]
    assert len({*numbers, *seeds}) == 2 * len(keys)


def test_newcomers_get_the_seed() -> None:
    newcomer = RandomStreams(1)
    newcomer.load_state_dict(RandomStreams(2).state_dict())
    assert newcomer.number(0) == RandomStreams(2).number(0)


def test_numbers_beyond_64_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="seed -1 is not an integer in"):
        RandomStreams(-1)
    with pytest.raises(ValueError, match="step 18446744073709551616"):
        RandomStreams().numpy(2**64)
    with pytest.raises(ValueError, match="peer -2"):
        RandomStreams().number(0, -2)


def test_a_generator_of_torch() -> None:
    torch = pytest.importorskip("torch")
    streams = RandomStreams(9)
    masks = [torch.rand(5, generator=streams.torch(4, peer)) for peer in (0, 1, 0)]
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])
