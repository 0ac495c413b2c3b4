"""Shapes of arrays, and dtypes of those that travel as bytes, as numbers of 64 bits, which ops carry and compare.

Two shapes have the same number only if they are the same. Nearly all shapes can be read from their numbers, so that a
peer can say what another one's array is like; those of many or huge dimensions, and those with a dtype, have a digest
instead.

    0              neither shape nor dtype
    bit 63 clear   from the lowest bits on, for each dimension from the last to the first: how many bits it has, in six,
                   and these; then a 1
    bit 63 set     63 bits of a BLAKE2b of the dimensions, if there are any, and the dtype
"""

from __future__ import annotations

import hashlib

WIDTH_BITS = 6
DIGEST_FLAG = 1 << 63
REMEMBERED_MAX = 4096

_number_of: dict[tuple[tuple[int, ...] | None, str], int] = {}
"""The numbers of shapes that were asked for, so that a small op does not compute its own again."""
_digested: dict[int, tuple[tuple[int, ...] | None, str]] = {}
"""The shapes and dtypes whose numbers are digests, by these numbers."""


def number_of(shape: tuple[int, ...] | None, dtype: str = "") -> int:
    """Return the number of a shape, of a dtype or of both; 0 for neither. Thread-safe."""
    if shape is None and not dtype:
        return 0
    known = _number_of.get((shape, dtype))
    return _remembered(shape, dtype) if known is None else known


def shape_of(number: int) -> tuple[int, ...] | None:
    """Return the shape that has this number, which may come from another peer and be anything. None for 0, for a number
    that is no shape's, and for a digest of a shape that this process has not had. Thread-safe."""
    if number & DIGEST_FLAG:
        return _digested.get(number, (None, ""))[0]
    dimensions = []
    while number > 1:
        width = number & ((1 << WIDTH_BITS) - 1)
        number >>= WIDTH_BITS
        dimensions.append(number & ((1 << width) - 1))
        number >>= width
    return tuple(reversed(dimensions)) if number else None


def described(number: int) -> str:
    """Return the part of an error that tells a number's shape, "" for 0. The number may come from another peer and be
    anything."""
    if not number:
        return ""
    dtype = _digested.get(number, ((), ""))[1]
    shape = shape_of(number)
    if shape is None and not dtype:
        return " of another shape or dtype"
    return (f" of shape {shape}" if shape is not None else "") + (dtype and f" of {dtype}")


def _remembered(shape: tuple[int, ...] | None, dtype: str) -> int:
    if len(_number_of) >= REMEMBERED_MAX:
        _number_of.clear()
        _digested.clear()
    number = 1
    for dimension in shape or ():
        width = dimension.bit_length()
        number = (number << width | dimension) << WIDTH_BITS | width
    if number >= DIGEST_FLAG or dtype:
        digest = hashlib.blake2b(f"{shape!r}{dtype}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little") | DIGEST_FLAG
        _digested[number] = shape, dtype
    _number_of[shape, dtype] = number
    return number
