"""Memory in which a process group receives what it then copies into the tensors of a list.

Memory that is fresh from the system costs more than the copy, since every page of it has to be made first. So a group
keeps one array of at most `KEPT_BYTES_MAX` for the next call. A call that fails does not give its array back, and
neither does one that finds the kept one taken: then it is freed with the last reference to it.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from pccl.torch.tensors import Tensor

KEPT_BYTES_MAX = 64 << 20


class Scratch:
    """The memory of one process group. Thread-safe."""

    def __init__(self) -> None:
        self._taking = threading.Lock()
        self._kept: Tensor | None = None

    @contextmanager
    def rows(self, shape: tuple[int, int], dtype: Any) -> Generator[Tensor, None, None]:
        """Provide a tensor of this shape on the host, for the time of the context."""
        size_bytes = shape[0] * shape[1] * dtype.itemsize
        with self._taking:
            array, self._kept = self._kept, None
        if array is None or array.numel() < size_bytes:
            array = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        yield array[:size_bytes].view(dtype).view(shape)
        if array.numel() <= KEPT_BYTES_MAX:
            with self._taking:
                self._kept = array
