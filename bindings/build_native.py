"""Builds `pccl._native`, the cffi (API mode) binding of the C engine in `native/`.

cffi reads its declarations from the public header, without the preprocessor lines, so that the two cannot diverge.

The extension uses only Python's limited API as of 3.11, so that one file works with that version and all later ones;
setup.py describes the exceptions.
"""

from __future__ import annotations

import os
import platform
import re
import sysconfig
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"
HEADER = NATIVE / "include" / "pccl_native.h"

LIMITED_API = "0x030b0000"
IS_LIMITED = os.environ.get("PCCL_LIMITED_API", "1") != "0" and not sysconfig.get_config_var("Py_GIL_DISABLED")

COMPILE_ARGS = [
    "-std=c99",
    "-O3",
    "-Wall",
    "-Wextra",
    # Results must not depend on the CPU, so the compiler must not fuse multiplications and additions.
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-pthread",
    *os.environ.get("PCCL_EXTRA_CFLAGS", "").split(),
]


def declarations() -> str:
    """Return the header in the form that cffi's parser needs: no comments, preprocessor lines or linkage blocks."""
    text = HEADER.read_text(encoding="utf-8")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r'#ifdef __cplusplus\n(?:extern "C" \{|\})\n#endif\n', "", text)
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


def sources() -> list[str]:
    """Return the engine's sources, relative to the project root as setuptools requires."""
    return sorted(str(path.relative_to(ROOT)) for path in (NATIVE / "src").glob("*.c"))


ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "pccl._native",
    '#include "pccl_native.h"',
    sources=sources(),
    include_dirs=["native/include", "native/src"],
    extra_compile_args=COMPILE_ARGS,
    extra_link_args=["-pthread", "-ldl"],
    define_macros=[
        *([("_GNU_SOURCE", "1")] if platform.system() == "Linux" else []),
        *([("Py_LIMITED_API", LIMITED_API)] if IS_LIMITED else []),
    ],
    py_limited_api=IS_LIMITED,
)

if __name__ == "__main__":
    os.chdir(ROOT)
    ffibuilder.compile(verbose=True)
