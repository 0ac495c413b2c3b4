"""The library of the simulated engine: built when a source has changed, and loaded once.

`PCCL_SIMULATION_SANITIZE=address,undefined` in the environment has it built with these sanitizers; the first of them
must be loaded before Python is (`LD_PRELOAD`), which `python -m tests.simulation --sanitize` sees to.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import cffi

NATIVE = Path(__file__).resolve().parents[3] / "native"
SANITIZE = os.environ.get("PCCL_SIMULATION_SANITIZE", "")
SHIPPED = ("network.handshake", "data_plane.op_request", "data_plane.engine")
"""Modules of `pccl.runtime` that call the library, in import order."""


class _Lib:
    """The library's functions and numbers. Engines begin with the options that a run wants."""

    def __init__(self, lib: Any) -> None:
        self._lib = lib
        self.tune: Callable[[Any], None] = lambda options: None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._lib, name)
        setattr(self, name, found)
        return found

    def pccl_engine_options_default(self, options: Any) -> None:
        self._lib.pccl_engine_options_default(options)
        self.tune(options)


@dataclass(frozen=True)
class Library:
    ffi: Any
    lib: Any
    engine: ModuleType
    """`pccl.runtime.data_plane.engine`, on top of this library."""


@cache
def library() -> Library:
    ffi = cffi.FFI()
    for header in ("include/pccl_native.h", "simulation/simulated.h"):
        ffi.cdef(_declarations((NATIVE / header).read_text()))
    lib = _Lib(ffi.dlopen(str(_build())))
    modules = _load(ffi, lib)
    return Library(ffi, lib, modules["data_plane.engine"])


def _build() -> Path:
    command = ["make", "-s", "-C", str(NATIVE), "simulation", f"SANITIZE={SANITIZE}"]
    (NATIVE / "build").mkdir(exist_ok=True)
    with open(NATIVE / "build" / "simulation.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([*command, "-j", "2"], check=True, env={**os.environ, "LD_PRELOAD": ""})
        found = subprocess.run([*command, "print_simulation"], check=True, capture_output=True, text=True)
    return NATIVE / found.stdout.strip()


def _declarations(header: str) -> str:
    """The header as cffi's parser wants it, as in `bindings/build_native.py`."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    text = re.sub(r'#ifdef __cplusplus\n(?:extern "C" \{|\})\n#endif\n', "", text)
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


def _load(ffi: Any, lib: Any) -> dict[str, ModuleType]:
    """Load the shipped modules once more, on top of this library. Those of the extension stay as they are."""
    extension = ModuleType("pccl.runtime.extension")
    extension.__dict__.update(ffi=ffi, lib=lib, text=lambda chars: ffi.string(chars).decode("utf-8", "replace"))
    names = [f"pccl.runtime.{name}" for name in SHIPPED]
    originals = {name: importlib.import_module(name) for name in ("pccl.runtime.extension", *names)}
    loaded = {}
    try:
        sys.modules["pccl.runtime.extension"] = extension
        for short, name in zip(SHIPPED, names, strict=True):
            spec = originals[name].__spec__
            assert spec is not None
            assert spec.loader is not None
            module = loaded[short] = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    finally:
        sys.modules.update(originals)
    return loaded
