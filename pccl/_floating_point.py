"""A thread's floating-point environment: the rounding mode, and whether subnormal numbers are flushed to zero.

Programs and libraries may change it (`torch.set_flush_denormal`, -ffast-math). To get the same bits on every peer, the
engine's threads compute in the default environment, as does `pccl.training` within `default_environment`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pccl.runtime.extension import lib


@contextmanager
def default_environment() -> Iterator[None]:
    """Use the default environment within a `with` block or a decorated function."""
    before = lib.pccl_fpenv_get()
    try:
        lib.pccl_fpenv_set(lib.pccl_fpenv_default())
        yield
    finally:
        lib.pccl_fpenv_set(before)
