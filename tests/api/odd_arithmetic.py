"""Changes the floating-point environment of the calling thread, as a program of a user's may.

With libc's fenv.h, so that it says nothing of how pccl does that. On Linux with glibc, on x86-64 and 64-bit ARM.
"""

from __future__ import annotations

import ctypes
import platform

_X86 = platform.machine() in ("x86_64", "AMD64")
_ARM = platform.machine() == "aarch64"
IS_KNOWN = platform.libc_ver()[0] == "glibc" and (_X86 or _ARM)
"""Whether this module knows the machine."""

_FENV_BYTES = 64
_CONTROL_AT = 28 if _X86 else 0
"""The offset of MXCSR or FPCR within a fenv_t."""
_FLUSH = 0x8040 if _X86 else 1 << 24 | 1 << 19
_DOWNWARD = 0x400 if _X86 else 2 << 22
"""FE_DOWNWARD of <fenv.h>."""
_DOWNWARD_BIT = 0x2000 if _X86 else _DOWNWARD

ENVIRONMENTS = ("usual", "flush", "downward")


def _control() -> tuple[ctypes.Array[ctypes.c_char], ctypes.c_uint32]:
    environment = ctypes.create_string_buffer(_FENV_BYTES)
    assert ctypes.CDLL(None).fegetenv(environment) == 0
    return environment, ctypes.c_uint32.from_buffer(environment, _CONTROL_AT)


def take(name: str) -> None:
    """Gives the calling thread one of ENVIRONMENTS."""
    libc = ctypes.CDLL(None)
    if name == "downward":
        assert libc.fesetround(_DOWNWARD) == 0
    elif name == "flush":
        environment, control = _control()
        control.value |= _FLUSH
        assert libc.fesetenv(environment) == 0
    assert current() == name


def current() -> str:
    """Which of ENVIRONMENTS the calling thread has."""
    control = _control()[1].value
    return "downward" if control & _DOWNWARD_BIT else "flush" if control & _FLUSH else "usual"
