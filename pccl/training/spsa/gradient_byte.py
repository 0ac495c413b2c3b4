"""A projected gradient in one byte.

A float of eight bits: a sign, four bits of exponent and three of mantissa, times a unit that all peers know.

    bit        7     6 5 4 3    2 1 0
               sign  exponent   mantissa

The value is `mantissa` units where the exponent is 0, else `(8 + mantissa) * 2**(exponent - 1)`, so 0, 1, 2 ... 16, 18,
20 ... up to 245760 units. At most a sixteenth of the value is rounded away, unless it is below 8 units; larger ones are
cut. In contrast to an integer it needs no scale that peers would have to agree upon while gradients shrink, and cutting
the largest is a safeguard that one wants anyway.
"""

from __future__ import annotations

import bisect

SIGN = 0x80
MAGNITUDES: tuple[int, ...] = tuple(
    code & 7 if code < 8 else (8 + (code & 7)) << ((code >> 3) - 1) for code in range(SIGN)
)
"""The magnitudes of the codes without a sign, in units; they grow."""


def encode(value: float, unit: float) -> int:
    """The code next to a finite value; that of the larger magnitude if two are."""
    magnitude = abs(value) / unit
    above = min(bisect.bisect_left(MAGNITUDES, magnitude), len(MAGNITUDES) - 1)
    below = max(above - 1, 0)
    code = below if magnitude - MAGNITUDES[below] < MAGNITUDES[above] - magnitude else above
    return code | SIGN if value < 0 and code else code


def decode(code: int, unit: float) -> float:
    """Exact, where the unit is a power of two."""
    magnitude = MAGNITUDES[code & ~SIGN] * unit
    return -magnitude if code & SIGN else magnitude
