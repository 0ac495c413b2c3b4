"""Random numbers that belong to a peer and a step, so that dropout masks differ between peers and can be made again.

Philox4x64 (Salmon et al. 2011) turns a key and a counter into random bits. The key is the seed and the purpose, and the
upper half of the 256-bit counter is (step, peer). A stream counts in the lower half, so streams never overlap.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from pccl._integers import as_int

NUMBERS, SEEDS = 0, 1
"""The purposes of random numbers, the upper half of the key."""


class RandomStreams:
    """Generators by step and peer, of one seed.

    Give it to a training class as `shared={"random": streams}`, and newcomers continue with the seed of the run. `peer`
    is a number that differs between peers, such as their rank, or the same on all for common numbers. Thread-safe,
    except for `load_state_dict`.
    """

    def __init__(self, seed: int = 0) -> None:
        """Raises ValueError: the seed has more than 64 bits. TypeError: it is not an integer."""
        self._seed = _word("seed", seed)

    def numpy(self, step: int, peer: int = 0) -> np.random.Generator:
        """Return a NumPy generator at the begin of its stream. Raises ValueError: `step` or `peer` has more than 64
        bits."""
        return np.random.Generator(self._philox(NUMBERS, step, peer))

    def torch(self, step: int, peer: int = 0, device: Any = "cpu") -> Any:
        """Return a `torch.Generator` on `device`, seeded with `number(step, peer)`. Raises ValueError as `numpy`."""
        return sys.modules["torch"].Generator(device=device).manual_seed(self.number(step, peer))

    def number(self, step: int, peer: int = 0) -> int:
        """Return 63 random bits, for `torch.manual_seed` and the like. Raises ValueError as `numpy`."""
        return int(self._philox(SEEDS, step, peer).random_raw()) >> 1

    def _philox(self, purpose: int, step: int, peer: int) -> np.random.Philox:
        counter = np.array([0, 0, _word("step", step), _word("peer", peer)], np.uint64)
        return np.random.Philox(key=np.array([self._seed, purpose], np.uint64), counter=counter)

    def state_dict(self) -> dict[str, int]:
        return {"seed": self._seed}

    def load_state_dict(self, state_dict: dict[str, int], /) -> None:
        """Load the seed of the run. Raises KeyError, ValueError: malformed."""
        self._seed = _word("seed", int(state_dict["seed"]))


def _word(name: str, value: int) -> int:
    value = as_int(name, value)
    if not 0 <= value < 1 << 64:
        raise ValueError(f"{name} {value}: must be from 0 to 2**64 - 1")
    return value
