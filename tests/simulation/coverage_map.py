"""A coverage map: which branches of the protocol's machines a schedule takes, and how often.

`install` has the modules of `pccl.protocol` instrumented as they are imported, so it must be called before anything
imports them: `python -m tests.simulation --steer` does. Counters are put by a transformation of the syntax tree into

    function    the body of each function
    then, else  both sides of each `if`, whether there is an `else` or not, and of each conditional expression
    loop        the body of each loop, and of each comprehension that has a condition
    except      each handler
    operand     each operand of `and` and `or` but the first, which is reached only if those before it let it be

A branch that has a counter costs two to four times the price of an assignment, which is much less than `sys.settrace`
takes, and nothing where this is not installed.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

PACKAGE = "pccl.protocol"
NOT_INSTRUMENTED = {f"{PACKAGE}.{name}" for name in ("messages", "auth", "status", "codec")}
"""What has no decisions of the machines, or is not played in the simulation."""
ROOT = Path(__file__).resolve().parents[2]

COUNTS: list[int] = []
"""How often each branch was taken since `take`, by its number."""
REACHED = bytearray()
"""Whether each operand was reached since `take`, by the number of its branch."""


@dataclass(frozen=True)
class Branch:
    module: str
    line: int
    kind: str

    def __str__(self) -> str:
        path = ROOT / f"{self.module.replace('.', '/')}.py"
        if not path.exists():
            path = path.with_suffix("") / "__init__.py"
        text = path.read_text().splitlines()[self.line - 1].strip()
        return f"{path.relative_to(ROOT)}:{self.line} {self.kind}: {text}"


BRANCHES: list[Branch] = []
"""All branches of the modules that were imported, by their numbers, which are the same in all processes that import
them in the same order."""


def take() -> dict[int, int]:
    """Return the numbers of the branches that were taken since this was called last, each with a grade from 1 on that
    grows with the logarithm of how often."""
    taken = {number: count.bit_length() for number, count in enumerate(COUNTS) if count}
    for number, is_reached in enumerate(REACHED):
        if is_reached:
            taken[number] = 1
    COUNTS[:] = [0] * len(COUNTS)
    REACHED[:] = bytes(len(REACHED))
    return taken


def instrument(module: str, tree: ast.Module) -> ast.Module:
    """Return a module with counters in its functions."""
    return ast.fix_missing_locations(_Counters(module).instrument(tree))


def install() -> None:
    """Have the modules that are imported from now on instrumented."""
    assert PACKAGE not in sys.modules, "the machines have been imported already"
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not f"{fullname}.".startswith(f"{PACKAGE}.") or fullname in NOT_INSTRUMENTED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        return compile(instrument(fullname, tree), path, "exec", dont_inherit=True)


class _Counters(ast.NodeTransformer):
    """Puts counters into the functions of a module."""

    def __init__(self, module: str) -> None:
        self._module = module

    def instrument(self, tree: ast.Module) -> ast.Module:
        tree = self.visit(tree)
        at = 1 if ast.get_docstring(tree) is not None else 0
        while any(isinstance(each, ast.ImportFrom) and each.module == "__future__" for each in tree.body[at : at + 1]):
            at += 1
        tree.body[at:at] = ast.parse(
            f"from {__name__} import COUNTS as _counts, REACHED as _reached\n_reach = _reached.__setitem__\n"
        ).body
        return tree

    # Statements.

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        begins = ast.get_docstring(node) is not None
        body = [self.visit(each) for each in node.body]
        node.body = [*body[:begins], self._counter(node, "function"), *body[begins:]]
        return node

    def visit_If(self, node: ast.If) -> ast.If:
        then, otherwise = self._counter(node, "then"), self._counter(node, "else")
        self.generic_visit(node)
        node.body.insert(0, then)
        node.orelse.insert(0, otherwise)
        return node

    def visit_For(self, node: ast.For) -> ast.For:
        counter = self._counter(node, "loop")
        self.generic_visit(node)
        node.body.insert(0, counter)
        return node

    def visit_While(self, node: ast.While) -> ast.While:
        counter = self._counter(node, "loop")
        self.generic_visit(node)
        node.body.insert(0, counter)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        counter = self._counter(node, "except")
        self.generic_visit(node)
        node.body.insert(0, counter)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.body = [self.visit(each) if isinstance(each, ast.FunctionDef) else each for each in node.body]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.JoinedStr:
        return node

    # Expressions.

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.BoolOp:
        self.generic_visit(node)
        node.values[1:] = [self._reaching(each, "operand") for each in node.values[1:]]
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.IfExp:
        self.generic_visit(node)
        node.body, node.orelse = self._reaching(node.body, "then"), self._reaching(node.orelse, "else")
        return node

    def _visit_comprehension(self, node: Any) -> Any:
        self.generic_visit(node)
        if any(generator.ifs for generator in node.generators):
            node.elt = self._reaching(node.elt, "loop")
        return node

    visit_ListComp = visit_SetComp = visit_GeneratorExp = _visit_comprehension  # noqa: N815

    # Counters.

    def _number(self, node: ast.AST, kind: str) -> int:
        BRANCHES.append(Branch(self._module, node.lineno, kind))  # type: ignore[attr-defined]
        COUNTS.append(0)
        REACHED.append(0)
        return len(BRANCHES) - 1

    def _counter(self, node: ast.AST, kind: str) -> ast.stmt:
        number = self._number(node, kind)
        return ast.copy_location(ast.parse(f"_counts[{number}] += 1").body[0], node)

    def _reaching(self, node: ast.expr, kind: str) -> ast.expr:
        number = self._number(node, kind)
        reach = ast.parse(f"_reach({number}, 1)", mode="eval").body
        return ast.copy_location(ast.BoolOp(ast.Or(), [reach, node]), node)
