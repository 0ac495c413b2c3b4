"""Named NumPy arrays in the bytes of an `.npz`."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

TRIES = 20


def arrays_of(content: bytes) -> dict[str, NDArray[Any]]:
    """Return the arrays by their names. What NumPy and zipfile raise, if the bytes are no `.npz`. Thread-safe.

    NumPy parses an array's header as Python, and there CPython 3.11 and 3.12 count the depth of all threads together
    (https://github.com/python/cpython/issues/106905): now and then a sound text is refused, and not the next time.
    """
    for _ in range(TRIES):
        try:
            return _arrays_of(content)
        except SystemError:
            pass
    return _arrays_of(content)


def _arrays_of(content: bytes) -> dict[str, NDArray[Any]]:
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return dict(archive)
