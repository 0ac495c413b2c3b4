"""Load the compiled extension: `ffi` and `lib` from a `pccl._native` that was built for this package.

A source tree without an extension, such as the working directory after `pip install .`, uses the installed one. The
interface number shows whether the two match.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]


def _is_source_tree() -> bool:
    return (PACKAGE.parent / "bindings" / "build_native.py").exists()


def _what_to_do() -> str:
    if _is_source_tree():
        return f"Run: {sys.executable} -m pip install -e {PACKAGE.parent}"
    return f"Reinstall pccl-collectives with {sys.executable} -m pip"


def _import_installed() -> None:
    """Import `pccl._native` from an installed pccl for this source tree. Raises ImportError if none is installed."""
    others = [Path(entry, PACKAGE.name) for entry in sys.path]
    spec = PathFinder.find_spec("pccl._native", [str(each) for each in others if each.resolve() != PACKAGE])
    if spec is None or spec.loader is None:
        where = "a source tree, and pccl is not installed here" if _is_source_tree() else "incomplete"
        raise ImportError(f"no C engine for pccl: {PACKAGE} is {where}. {_what_to_do()}", name="pccl._native")
    module = module_from_spec(spec)
    sys.modules["pccl._native"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["pccl._native"]
        raise
    setattr(sys.modules["pccl"], "_native", module)  # noqa: B010  as a plain import does; unknown to mypy


try:
    from pccl._native import ffi, lib
except ModuleNotFoundError as _error:
    if _error.name != "pccl._native":
        raise
    _is_missing = True
else:
    _is_missing = False
if _is_missing:
    _import_installed()
    from pccl._native import ffi, lib

ABI = 32

if lib.pccl_native_abi() != ABI or lib.PCCL_NATIVE_ABI != ABI:
    raise ImportError(
        f"{sys.modules['pccl._native'].__file__} was built for interface {lib.pccl_native_abi()}, but the pccl in "
        f"{PACKAGE} needs {ABI}. {_what_to_do()}"
    )


def text(chars: Any) -> str:
    raw: bytes = ffi.string(chars)
    return raw.decode("utf-8", "replace")


__all__ = ["ABI", "ffi", "lib", "text"]
