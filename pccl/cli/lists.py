"""Types of command-line arguments that are lists with commas between."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def listed(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return the type of a list whose parts `parse` understands. Its ValueErrors tell the user what is wrong."""

    def parse_all(text: str) -> list[T]:
        try:
            return [parse(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_all


def one_of(values: Mapping[str, T]) -> Callable[[str], T]:
    """Return a parser that turns a name into its value."""

    def parse(name: str) -> T:
        if name not in values:
            raise ValueError(f"{name!r} is not one of {', '.join(values)}")
        return values[name]

    return parse
