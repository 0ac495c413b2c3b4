"""The floating-point environment of a thread, for arithmetic that has to give the same bits on every peer.

It says which way operations round and whether subnormal numbers are flushed to zero. A thread begins with a copy of the
environment of the thread that made it, and a program may change its own: `torch.set_flush_denormal` does, fesetround,
and the mere import of a library that was built with -ffast-math. The engine's threads compute in the default one, to
nearest and even with subnormals as they are, and so does `pccl.training` within `default_environment`.
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
