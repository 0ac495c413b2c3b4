"""The compiled extension, checked: `ffi` and `lib` of a `pccl._native` that was built for this package."""

from __future__ import annotations

from typing import Any

from pccl._native import ffi, lib

ABI = 25

if lib.pccl_native_abi() != ABI or lib.PCCL_NATIVE_ABI != ABI:
    raise ImportError(
        f"pccl._native was built for interface {lib.pccl_native_abi()}, this pccl needs {ABI}: reinstall with "
        f"pip install ."
    )


def text(chars: Any) -> str:
    """A C string."""
    raw: bytes = ffi.string(chars)
    return raw.decode("utf-8", "replace")


__all__ = ["ABI", "ffi", "lib", "text"]
