"""The floating-point environment of a thread: rounding, and the flush of subnormal numbers to zero.

Programs and libraries may change it (`torch.set_flush_denormal`, -ffast-math). The engine's threads compute in the
default one, for the same bits on every peer, and so does `pccl.training` within `default_environment`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pccl.runtime.extension import lib


@contextmanager
def default_environment() -> Iterator[None]:
    """Compute in the default environment within a `with` block or a decorated function."""
    before = lib.pccl_fpenv_get()
    try:
        lib.pccl_fpenv_set(lib.pccl_fpenv_default())
        yield
    finally:
        lib.pccl_fpenv_set(before)
