"""The simulation's checkers are independent: they do not read the state of the machines that they check."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKS = Path(__file__).resolve().parents[1] / "simulation" / "checks"
FILES = sorted(CHECKS.glob("*.py"))

MACHINES = {"machine", "master", "seen"}
"""The attributes in which the simulation's nodes and hosts hold machines."""
IMPORTS = {
    "pccl.protocol": {"messages"},
    "pccl.protocol.peer": {"effects"},
    "pccl.protocol.topology": {"RingProblem"},
    "pccl.runtime.master.ring_search": {"matrices", "price"},
    "pccl.types": {"Result"},
}
"""What checkers may import from pccl: messages, effects that callers see, results, and the cost of a ring."""
EFFECTS = {"OpResult", "Installed", "Ended"}
"""What checkers may use from `pccl.protocol.peer.effects`."""


def _reads(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_checkers_read_no_machine(path: Path) -> None:
    for node in _reads(path):
        if isinstance(node, ast.Attribute):
            where = f"{path.name}:{node.lineno}: {ast.unparse(node)}"
            assert node.attr not in MACHINES, f"{where} is a machine"
            is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
            is_private = node.attr.startswith("_") and not node.attr.endswith("__")
            assert is_own or not is_private, f"{where} is private"
            if isinstance(node.value, ast.Name) and node.value.id == "ps":
                assert node.attr in EFFECTS, f"{where} is not what a caller sees"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_checkers_import_no_machine(path: Path) -> None:
    for node in _reads(path):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("pccl") for alias in node.names), path.name
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pccl"):
            assert {alias.name for alias in node.names} <= IMPORTS.get(node.module or "", set()), path.name


def test_there_are_checkers() -> None:
    assert len(FILES) > 5
