"""Private copies of the working tree, in which mutants live.

A `Base` is a copy of what git knows of, with the extension, and bytecode beside all modules. Each mutant gets a copy of
that in turn, of hard links but for the file that it changes and for what a build might overwrite. So one costs
milliseconds, and nothing that is run in it can be seen by another.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from tests.mutation.mutants import Mutant

BUILDS = ("native", "build")
"""Folders that builds write to: they are copied and not linked."""


class Base:
    """A copy of the working tree without a mutant."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root = scratch / "base"
        self._scratch = scratch
        self._numbers = count()
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            stdout=subprocess.PIPE,
            check=False,
        ).stdout.decode()
        names = listed.split("\0") if listed else [str(path.relative_to(root)) for path in _sources(root)]
        names += [str(path.relative_to(root)) for path in (root / "pccl").glob("_native*.so")]
        for name in filter(None, names):
            source, target = root / name, self.root / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        self._digests = {path: _digest(path) for path in self.root.rglob("*") if path.is_file()}
        compiled = ["pccl", "tests/simulation", "tests/support", "tests/mutation"]
        subprocess.run([sys.executable, "-m", "compileall", "-q", *compiled], cwd=self.root, check=False)

    def digest(self, *folders: str) -> str:
        """Return what tells the sources in these folders from any others."""
        total = hashlib.sha256()
        roots = [self.root / folder for folder in folders]
        for path, digest in sorted(self._digests.items()):
            if path.suffix != ".so" and any(path == root or root in path.parents for root in roots):
                total.update(f"{path.relative_to(self.root)} {digest}\n".encode())
        return total.hexdigest()

    @contextmanager
    def with_mutant(self, mutant: Mutant | None) -> Iterator[Path]:
        """Make a copy with a mutant in it, or with none. It is gone afterwards."""
        copy = self._scratch / f"copy{next(self._numbers)}"
        try:
            for name in sorted(os.listdir(self.root)):
                link = shutil.copy2 if name in BUILDS else os.link
                source = self.root / name
                if source.is_dir():
                    shutil.copytree(source, copy / name, copy_function=link)
                else:
                    copy.mkdir(exist_ok=True)
                    link(source, copy / name)
            if mutant is not None:
                path = copy / mutant.path
                text = mutant.apply(path.read_text(encoding="utf-8"))
                path.unlink()
                for cached in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
                    cached.unlink()
                path.write_text(text, encoding="utf-8")
            yield copy
        finally:
            shutil.rmtree(copy, ignore_errors=True)


def environment(copy: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment in which Python finds the modules of a copy, before those that are installed."""
    hidden = ("PCCL_", "PYTEST_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return {**kept, "PYTHONPATH": str(copy), "PYTHONHASHSEED": "0", **(more or {})}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    """Yield the sources of a tree that is not a repository."""
    for name in ("pccl", "tests", "native", "bindings", "examples", "docs", ".ci"):
        yield from (path for path in (root / name).rglob("*") if "__pycache__" not in path.parts)
    yield from (path for path in root.iterdir() if path.is_file())
