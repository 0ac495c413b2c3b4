"""What the build of the engine needs and does not find, it names in a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = """
import runpy, setuptools
from pathlib import Path

Path("probe.c").write_text("int probe;")
setuptools.setup = lambda **_: None
command = runpy.run_path(SETUP)["BuildEngine"]
distribution = setuptools.Distribution({"name": "probe", "ext_modules": [setuptools.Extension("probe", ["probe.c"])]})
build = command(distribution)
build.ensure_finalized()
try:
    build.run()
except setuptools.errors.PlatformError as error:
    print(error)
else:
    print("built")
"""

pytestmark = pytest.mark.skipif(find_spec("setuptools") is None, reason="setuptools is not installed here")


def _build(folder: Path, cc: Path | str | None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    if cc is not None:
        environment["CC"] = str(cc)
    code = f"SETUP = {str(ROOT / 'setup.py')!r}\n{BUILD}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def _compiler_without(folder: Path, header: str) -> Path:
    """Make a C compiler that does not find a header."""
    compiler = folder / "cc"
    compiler.write_text(
        f"""#!/bin/sh
for each; do case $each in *.c) grep -q '{header}' "$each" && {{ echo '{header}: not found' >&2; exit 1; }}; esac; done
exit 0
"""
    )
    compiler.chmod(0o755)
    return compiler


def test_a_missing_compiler_is_named(tmp_path: Path) -> None:
    said = _build(tmp_path, "no-such-cc")
    assert said.startswith("pccl's engine is written in C, and the compiler 'no-such-cc' is not here.")
    assert "apt install gcc libc6-dev python3-dev" in said


def test_missing_headers_of_c_are_named(tmp_path: Path) -> None:
    said = _build(tmp_path, _compiler_without(tmp_path, "stdlib.h"))
    assert "cannot include <stdlib.h>" in said
    assert "apt install libc6-dev" in said


def test_missing_headers_of_python_are_named(tmp_path: Path) -> None:
    said = _build(tmp_path, _compiler_without(tmp_path, "Python.h"))
    assert "there is no Python.h in" in said
    assert f"apt install python{sys.version_info.major}.{sys.version_info.minor}-dev" in said


def test_what_is_complete_is_built(tmp_path: Path) -> None:
    assert _build(tmp_path, None) == "built"
