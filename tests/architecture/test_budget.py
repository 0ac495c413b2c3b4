"""A budget for the package: its size may only shrink, unless an issue adds a new ability."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pccl
from pccl import Communicator
from tests.architecture import dialect

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pccl"

PACKAGE_LINES_MAX = 50_150
PACKAGE_MODULES_MAX = 225
TEST_LINES_MAX = 75_800
COMMUNICATOR_NAMES_MAX = 30
SMALL_MODULES_MAX = 15
SMALL_LINES = 80
DIALECT_MAX = dict.fromkeys(dialect.CONSTRUCTIONS, 0.5)


def _lines(folder: Path) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in folder.rglob("*.py"))


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_lines_of_the_package() -> None:
    assert _lines(PACKAGE) <= PACKAGE_LINES_MAX


def test_lines_of_the_tests() -> None:
    assert _lines(ROOT / "tests") <= TEST_LINES_MAX


def test_number_of_modules() -> None:
    assert len(list(PACKAGE.rglob("*.py"))) <= PACKAGE_MODULES_MAX


def test_public_names_of_a_communicator() -> None:
    assert len([name for name in dir(Communicator) if not name.startswith("_")]) <= COMMUNICATOR_NAMES_MAX
    assert len(pccl.__all__) <= 25


def test_small_modules_have_several_importers() -> None:
    """A module of fewer than 80 lines that only one neighbour imports belongs in that neighbour."""
    paths = {_name(path): path for path in PACKAGE.rglob("*.py")}
    importers = defaultdict(set)
    for importer, path in paths.items():
        for name in _imported(path) & paths.keys():
            importers[name].add(importer)
    small = [
        name
        for name, path in sorted(paths.items())
        if path.name != "__init__.py"
        and len(path.read_bytes().splitlines()) < SMALL_LINES
        and len(importers[name]) == 1
        and paths[next(iter(importers[name]))].parent == path.parent
    ]
    assert len(small) <= SMALL_MODULES_MAX, small


def test_prose_is_plain_english() -> None:
    shares = dialect.per_thousand(dialect.prose_files())
    assert not {name: share for name, share in shares.items() if share > DIALECT_MAX[name]}
