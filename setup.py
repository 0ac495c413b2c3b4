"""Only what pyproject.toml cannot say: how the C engine is built, an extension that cffi generates.

One wheel serves CPython 3.11 and later: the extension keeps to the limited API, and the wheel is tagged so.
PCCL_LIMITED_API=0 in the environment builds for the present Python alone; so does a Python without a global lock, which
has no limited API of that age.

What the build needs and does not find is named in a sentence, ahead of the compiler's own errors.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import PlatformError

IS_LIMITED = os.environ.get("PCCL_LIMITED_API", "1") != "0" and not sysconfig.get_config_var("Py_GIL_DISABLED")


class BuildEngine(build_ext):
    """`build_ext` that looks for a compiler and headers first, and leaves no older extension in the source tree."""

    def build_extensions(self) -> None:
        command = [*self.compiler.compiler_so]
        if shutil.which(command[0]) is None:
            raise PlatformError(
                f"pccl's engine is written in C, and the compiler {command[0]!r} is not here. Install one (Debian and "
                f"Ubuntu: apt install gcc libc6-dev python3-dev; Fedora: dnf install gcc python3-devel; macOS: "
                f"xcode-select --install), or name yours in CC."
            )
        if said := self._errors_with(command, "stdlib.h"):
            raise PlatformError(
                f"the C compiler {command[0]!r} does not work here: it cannot include <stdlib.h>. Install the headers "
                f"of the C library (Debian and Ubuntu: apt install libc6-dev). It said: {said}"
            )
        if said := self._errors_with(command, "Python.h"):
            version = sysconfig.get_python_version()
            raise PlatformError(
                f"the headers of Python {version} are not here: there is no Python.h in "
                f"{sysconfig.get_path('include')}. Install them (Debian and Ubuntu: apt install python{version}-dev; "
                f"Fedora: dnf install python3-devel). The compiler said: {said}"
            )
        super().build_extensions()

    def _errors_with(self, command: list[str], header: str) -> str:
        """Return what the compiler says against a source that includes the header, or "" if it takes it."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text(f"#include <{header}>\n", encoding="utf-8")
            include = [f"-I{each}" for each in self.compiler.include_dirs]
            done = subprocess.run([*command, *include, "-E", str(source)], capture_output=True, text=True, check=False)
        return done.stderr.strip() or f"exit status {done.returncode}" if done.returncode else ""

    def copy_extensions_to_source(self) -> None:
        for extension in self.extensions:
            package, _, name = self.get_ext_fullname(extension.name).rpartition(".")
            folder = Path(self.get_finalized_command("build_py").get_package_dir(package))
            for older in folder.glob(f"{name}.*.so"):
                older.unlink()  # an import would prefer one that is for this Python alone
        super().copy_extensions_to_source()


setup(
    cffi_modules=["bindings/build_native.py:ffibuilder"],
    cmdclass={"build_ext": BuildEngine},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if IS_LIMITED else {},
)
