"""Gives the functions of a module that is imported already the code of another text of it.

Functions keep their identity, so whoever has one in a table calls the new code. What is not in a function, such as a
constant or the fields of a class, has been made use of on import: a text that differs there is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dis import get_instructions
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any


class UnfitError(Exception):
    """The texts differ outside of functions."""


def transplant(path: str, text: str) -> ModuleType:
    """Have the module at this path run this text, and return it. UnfitError."""
    module = next((each for each in sys.modules.values() if getattr(each, "__file__", None) == path), None)
    if module is None:
        raise UnfitError(f"{path} is not imported")
    before = compile(Path(path).read_text(encoding="utf-8"), path, "exec")
    after = compile(text, path, "exec")
    if _outside(before) != _outside(after):
        raise UnfitError(f"the texts of {path} differ outside of functions")
    codes: dict[str, list[CodeType]] = {}
    for code in _functions(after):
        codes.setdefault(code.co_qualname, []).append(code)
    ours: dict[str, list[FunctionType]] = {}
    for function in {id(each): each for each in _owned(vars(module), module, set())}.values():
        ours.setdefault(function.__code__.co_qualname, []).append(function)
    for name, functions in ours.items():
        functions.sort(key=lambda each: each.__code__.co_firstlineno)
        for function, code in zip(functions, codes.get(name, []), strict=False):
            function.__code__ = code
    return module


def _is_function(code: CodeType) -> bool:
    return bool(code.co_flags & 2)  # CO_NEWLOCALS: a class body has none


def _functions(code: CodeType) -> Iterator[CodeType]:
    """Yield the functions of a module and of its classes, not those within functions."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if _is_function(each):
                yield each
            else:
                yield from _functions(each)


def _outside(code: CodeType) -> list[object]:
    """Return what a module and its classes do on import."""
    steps = [(step.opcode, step.arg) for step in get_instructions(code) if step.opname != "NOP"]  # these mark lines
    found: list[object] = [steps, code.co_names]
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found += [each.co_qualname] if _is_function(each) else _outside(each)
        else:
            found.append(repr(each))
    return found


def _owned(names: Any, module: ModuleType, seen: set[int]) -> Iterator[FunctionType]:
    """Yield the functions that a module has made, also those of its classes, properties and caches."""
    for value in list(names.values()):
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield from _owned(vars(value), module, seen)
        found = [value, *(getattr(value, name, None) for name in ("__wrapped__", "__func__", "fget", "fset", "func"))]
        yield from (
            each for each in found if isinstance(each, FunctionType) and each.__code__.co_filename == module.__file__
        )
