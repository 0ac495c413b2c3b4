"""Random numbers that belong to a peer and a step, so that dropout masks differ between peers and can be made again.

Theory of operation. Philox4x64 (Salmon et al. 2011) turns a key and a counter into random bits. Here the key is the
seed and what the numbers are for, and the upper half of the 256-bit counter is (step, peer). A stream counts in the
lower half, so streams of different steps, peers or purposes have no counter in common: they never overlap, in whatever
order and on whatever machine they are made. Nothing has to be stored or handed on but the seed.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from pccl._integers import as_int

NUMBERS, SEEDS = 0, 1
"""The purposes of random numbers, the upper half of the key."""


class RandomStreams:
    """Generators by step and peer, of one seed. Give it to a training class as `shared={"random": streams}`, and
    newcomers go on with the seed of the run. Thread-safe as far as `load_state_dict` is not called meanwhile.

    `peer` is whatever number tells peers apart: their rank or number (`communicator.membership`), or the same on all
    for numbers that all are to have alike.
    """

    def __init__(self, seed: int = 0) -> None:
        """ValueError: the seed has more than 64 bits. TypeError: it is no integer."""
        self._seed = _word("seed", seed)

    def numpy(self, step: int, peer: int = 0) -> np.random.Generator:
        """A NumPy generator at the begin of its stream. ValueError: `step` or `peer` has more than 64 bits."""
        return np.random.Generator(self._philox(NUMBERS, step, peer))

    def torch(self, step: int, peer: int = 0, device: Any = "cpu") -> Any:
        """A `torch.Generator` on `device`, seeded with `number(step, peer)`. ValueError as `numpy`."""
        return sys.modules["torch"].Generator(device=device).manual_seed(self.number(step, peer))

    def number(self, step: int, peer: int = 0) -> int:
        """63 random bits, for what takes a seed, such as `torch.manual_seed`. ValueError as `numpy`."""
        return int(self._philox(SEEDS, step, peer).random_raw()) >> 1

    def _philox(self, purpose: int, step: int, peer: int) -> np.random.Philox:
        counter = np.array([0, 0, _word("step", step), _word("peer", peer)], np.uint64)
        return np.random.Philox(key=np.array([self._seed, purpose], np.uint64), counter=counter)

    def state_dict(self) -> dict[str, int]:
        return {"seed": self._seed}

    def load_state_dict(self, state_dict: dict[str, int], /) -> None:
        """Takes up the seed of the run. KeyError, ValueError: this is no such state."""
        self._seed = _word("seed", int(state_dict["seed"]))


def _word(name: str, value: int) -> int:
    value = as_int(name, value)
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{name} {value}: must be from 0 to 2**64 - 1")
    return value
