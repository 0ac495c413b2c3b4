"""torch's arithmetic on the CPU in the default floating-point environment, on all of its threads.

The threads of torch's pool have the environment of the thread that made them. A product whose digits depend on the
environment, large enough for each thread to compute a part, shows theirs; where one is wrong the caller computes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pccl._floating_point import default_environment

GRAIN = 1 << 15
"""Elements that are worth a thread to torch (at::internal::GRAIN_SIZE)."""
FACTORS = np.array(
    [
        (2.0**-126, 0.5),  # a result that is subnormal
        (2.0**-130, 2.0**10),  # an operand that is
        (1 + 2.0**-12 + 2.0**-23, 1 + 2.0**-12 + 2.0**-23),  # to be rounded up
        (-1 - 2.0**-23, 1 + 2.0**-23),  # not to be rounded down
        (1 + 2.0**-23, 1 + 2.0**-23),  # not to be rounded up
    ],
    np.float32,
)
"""Pairs whose products show their environment."""


@contextmanager
def default_torch_arithmetic(torch: Any) -> Iterator[None]:
    """Compute in the default floating-point environment within the block, also on torch's threads."""
    with default_environment():
        threads = torch.get_num_threads()
        if threads == 1 or _is_default_on_all(torch, threads):
            yield
            return
        try:
            torch.set_num_threads(1)
            yield
        finally:
            torch.set_num_threads(threads)


def _is_default_on_all(torch: Any, threads: int) -> bool:
    if not torch.backends.openmp.is_available():
        return False  # it is not known which threads take which part
    with torch.no_grad():
        left, right, product = (torch.from_numpy(each) for each in _probe(threads))
        torch.mul(left, right, out=product)
    rows = product.numpy().reshape(-1, GRAIN)[:, : len(FACTORS)]
    expected = FACTORS[:, 0] * FACTORS[:, 1]
    return bool((rows.view(np.uint32) == expected.view(np.uint32)).all())


@lru_cache(maxsize=2)
def _probe(threads: int) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Return both operands, and room for their product."""
    operands = np.ones((2, threads, GRAIN), np.float32)
    operands[:, :, : len(FACTORS)] = FACTORS.T[:, None, :]
    return operands[0].reshape(-1), operands[1].reshape(-1), np.empty(threads * GRAIN, np.float32)
