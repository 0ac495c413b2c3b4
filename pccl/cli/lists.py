"""Types of command-line arguments that are lists, separated by commas."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def listed(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """A list of what `parse` understands, which says by a ValueError what is wrong."""

    def parse_all(text: str) -> list[T]:
        try:
            return [parse(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_all


def one_of(values: Mapping[str, T]) -> Callable[[str], T]:
    """What a name stands for."""

    def parse(name: str) -> T:
        if name not in values:
            raise ValueError(f"{name!r} is not one of {', '.join(values)}")
        return values[name]

    return parse
