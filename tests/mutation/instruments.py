"""Instruments that tell where a mutant could make a difference: see `instrument`.

The text of a module is instrumented for all its mutants at once, and does what it did before. Where a mutant changes an
expression that has no side effects, the mutated one is evaluated beside it, and it is noted when the two differ;
elsewhere it is noted when the statement is run.

What has side effects is judged by its name: a function or method counts as free of them if it is in `PURE`, or its name
asks a question (`is_`, `has_`, `may_`). Values are the same if they are equal and cannot be changed, or are containers
made on the spot; others could be changed through one name and be seen through another.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum

from tests.mutation.mutants import Mutant

NOTE = "_mutation_note"
PURE = frozenset(
    (
        *("len", "any", "all", "set", "frozenset", "sorted", "min", "max", "sum", "list", "tuple", "dict", "abs"),
        *("bool", "int", "float", "str", "isinstance", "zip", "range", "enumerate", "reversed", "majority", "block"),
        *("get", "keys", "values", "items", "union", "intersection", "issubset", "issuperset", "isdisjoint"),
        *("startswith", "endswith", "count", "common", "have_answered"),
    )
)
QUESTIONS = ("is_", "has_", "may_")
FRESH = (ast.Set, ast.List, ast.Dict, ast.SetComp, ast.ListComp, ast.DictComp, ast.BinOp)
FRESH_CALLS = frozenset(("set", "sorted", "list", "dict"))
IMPURE = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
NOT_ALONE = (ast.Starred, ast.Slice, ast.GeneratorExp, ast.Lambda, ast.FormattedValue, ast.JoinedStr, ast.Tuple)
"""Expressions that cannot stand elsewhere, or whose parts are better compared than they."""

Pair = tuple[ast.AST, ast.AST]


def instrument(text: str, mutants: Iterable[Mutant]) -> tuple[str, list[str]]:
    """Return the text that notes where mutants make a difference, and the names of those for which it cannot, since
    they are in no function."""
    tree = ast.parse(text)
    expressions: dict[ast.AST, list[tuple[str, ast.expr, bool]]] = {}
    statements: dict[ast.AST, list[str]] = {}
    everywhere = []
    for mutant in mutants:
        chain = _difference(tree, ast.parse(mutant.apply(text)))
        expression = _expression(chain)
        statement = _statement(tree, chain, mutant.find(text)[0])
        if statement is None:
            everywhere.append(mutant.name)
        elif expression is not None:
            ours, theirs, is_test = expression
            expressions.setdefault(ours, []).append((mutant.name, theirs, is_test))
        else:
            statements.setdefault(statement, []).append(mutant.name)
    return ast.unparse(ast.fix_missing_locations(_Notes(expressions, statements).visit(tree))), everywhere


def reached(name: str) -> str:
    return f"{name}?"


def noter(noted: set[str]) -> Callable[..., object]:
    """Return what an instrumented text calls. It notes the name of a mutant that makes a difference, `reached(name)` of
    one whose line is run."""

    def note(
        name: str, value: object = None, mutated: Callable[[], object] | None = None, kind: str = "statement"
    ) -> object:
        if name not in noted:
            noted.add(reached(name))
            try:
                is_same = mutated is not None and _is_same(value, mutated(), kind)
            except Exception:
                is_same = False
            if not is_same:
                noted.add(name)
        return value

    return note


def _is_same(ours: object, theirs: object, kind: str) -> bool:
    if kind == "test":
        return bool(ours) == bool(theirs)
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(_is_same(a, b, "") for a, b in zip(ours, theirs, strict=True))
    is_constant = ours is None or isinstance(ours, bool | int | float | str | bytes | Enum | frozenset)
    return (is_constant or kind == "fresh") and ours == theirs


def _difference(ours: ast.AST, theirs: ast.AST) -> list[Pair]:
    """Return the pairs of nodes, each within the one before, in which all that differs is. Empty: nothing does."""
    if type(ours) is not type(theirs):
        return [(ours, theirs)]
    found = []
    for name in ours._fields:
        a, b = getattr(ours, name, None), getattr(theirs, name, None)
        if isinstance(a, list) and isinstance(b, list):
            if len(a) != len(b):
                return [(ours, theirs)]
            pairs = list(zip(a, b, strict=True))
        else:
            pairs = [(a, b)]
        for one, other in pairs:
            if isinstance(one, ast.AST) and isinstance(other, ast.AST):
                found += [inner] if (inner := _difference(one, other)) else []
            elif one != other:
                return [(ours, theirs)]
    if not found:
        return []
    return [(ours, theirs), *(found[0] if len(found) == 1 else ())]


def _expression(chain: Sequence[Pair]) -> tuple[ast.AST, ast.expr, bool] | None:
    """Return the largest expression that differs and can be evaluated twice, as it is and mutated, and whether only its
    truth matters."""
    is_test = False
    above: ast.AST | None = None
    for ours, theirs in chain:
        if isinstance(above, ast.comprehension):
            is_test = ours in above.ifs
        elif isinstance(above, ast.If | ast.While | ast.IfExp | ast.Assert):
            is_test = ours is above.test
        elif isinstance(above, ast.UnaryOp):
            is_test = isinstance(above.op, ast.Not)
        elif not isinstance(above, ast.BoolOp):
            is_test = False
        if isinstance(ours, ast.expr) and isinstance(theirs, ast.expr) and _is_pure(ours) and _is_pure(theirs):
            return ours, theirs, is_test
        above = ours
    return None


def _is_pure(expression: ast.expr) -> bool:
    if isinstance(expression, NOT_ALONE) or not isinstance(getattr(expression, "ctx", ast.Load()), ast.Load):
        return False
    return all(_is_pure_alone(each) for each in ast.walk(expression))


def _is_pure_alone(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return not isinstance(node, IMPURE)
    name = _called(node)
    return name in PURE or name.lstrip("_").startswith(QUESTIONS)


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_fresh(expression: ast.AST) -> bool:
    return isinstance(expression, FRESH) or (isinstance(expression, ast.Call) and _called(expression) in FRESH_CALLS)


def _statement(tree: ast.Module, chain: Sequence[Pair], line: int) -> ast.stmt | None:
    """Return the smallest statement of a function that a line is in. None: the difference is in no function's body."""
    functions = [at for at, (ours, _) in enumerate(chain) if isinstance(ours, ast.FunctionDef | ast.AsyncFunctionDef)]
    if not functions or (len(chain) > functions[0] + 1 and not isinstance(chain[functions[0] + 1][0], ast.stmt)):
        return None
    function = chain[functions[0]][0]
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    if line < function.body[0].lineno:
        return None
    around = [each for each in _statements(function) if each.lineno <= line <= (each.end_lineno or 0)]
    return max(around, key=lambda each: each.lineno, default=function.body[0])


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements within a node, outer ones first."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        yield from _statements(child)


class _Notes(ast.NodeTransformer):
    """Puts notes into a tree."""

    def __init__(
        self, expressions: Mapping[ast.AST, list[tuple[str, ast.expr, bool]]], statements: Mapping[ast.AST, list[str]]
    ) -> None:
        self._expressions = expressions
        self._statements = statements

    def visit(self, node: ast.AST) -> ast.AST | list[ast.AST]:
        visited: ast.AST = self.generic_visit(node)
        for name, theirs, is_test in self._expressions.get(node, ()):
            kind = "test" if is_test else "fresh" if _is_fresh(node) and _is_fresh(theirs) else ""
            nothing = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
            given = [ast.Constant(name), visited, ast.Lambda(nothing, theirs), ast.Constant(kind)]
            visited = ast.Call(ast.Name(NOTE, ast.Load()), given, [])
        names = self._statements.get(node, ())
        notes = [ast.Expr(ast.Call(ast.Name(NOTE, ast.Load()), [ast.Constant(name)], [])) for name in names]
        return [*notes, visited] if notes else visited
