"""Builds the extension where it stands, and compiles only what is newer than its object: `python -m ...extension`.

setup.py compiles all of the engine each time, which takes a minute. Headers are not looked at: with a changed one all
objects have to be taken away first. pyproject.toml is not read: it is written for the setuptools of a build of its own,
and the one that is installed here may be older.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib import import_module
from typing import Any


def compile_newer_alone() -> None:
    """Have the compiler of setup.py skip sources that are older than their objects."""
    import_module("setuptools")  # brings the distutils that setup.py uses
    compiler: Any = import_module("distutils.unixccompiler").UnixCCompiler
    compile_one = compiler._compile

    def compile_if_newer(self: Any, obj: str, src: str, *rest: Any) -> None:
        if not (os.path.exists(obj) and os.path.getmtime(obj) > os.path.getmtime(src)):
            compile_one(self, obj, src, *rest)

    compiler._compile = compile_if_newer


def read_no_configuration() -> None:
    """Have setup.py alone say what is built."""
    distribution: Any = import_module("setuptools").Distribution
    distribution.parse_config_files = lambda *_, **__: None


if __name__ == "__main__":
    compile_newer_alone()
    read_no_configuration()
    for name in os.listdir("pccl"):
        if name.startswith("_native") and name.endswith(".so"):
            os.remove(os.path.join("pccl", name))  # it may be linked to that of another copy
    sys.argv = ["setup.py", "-q", "build_ext", "--inplace"]
    runpy.run_path("setup.py", run_name="__main__")
