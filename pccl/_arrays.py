"""What calls take for an array, for type checkers: lists and single numbers are none. `_operands` checks values."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias


class Array(Protocol):
    """An array with elements of one type, such as a NumPy array or a torch tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of elements in each dimension."""

    @property
    def dtype(self) -> Any:
        """The type of the elements."""

    def __len__(self) -> int: ...


Movable: TypeAlias = Array | bytes | bytearray | memoryview
"""An array, or bytes: for calls that move elements and reduce none."""
