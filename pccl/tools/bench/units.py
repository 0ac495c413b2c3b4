"""Byte sizes, times and rates as text."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_BINARY = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as `64MiB`, `1.5 GiB`, `4KB` or `4096`, or raise ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 4096, 4KiB or 64MiB")
    value = float(match[1]) * _UNITS[match[2].upper()]
    if value != int(value) or value < 1:
        raise ValueError(f"{text!r} is not a whole number of bytes above zero")
    return int(value)


def format_bytes(count: int) -> str:
    for unit, factor in _BINARY:
        if count >= factor and count % factor == 0:
            return f"{count // factor} {unit}"
    return f"{count} B"


def format_bytes_about(count: int) -> str:
    """Return a size with two or three digits."""
    for unit, factor in _BINARY:
        if count >= factor:
            return f"{count / factor:.{1 if count < 10 * factor else 0}f} {unit}"
    return f"{count} B"


def format_seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.1:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.3f} s"


def format_megabytes_per_second(bytes_per_second: float) -> str:
    """Return a rate as a number without its unit."""
    rate = bytes_per_second / 1e6
    return f"{rate:.0f}" if rate >= 99.95 else f"{rate:.1f}" if rate >= 9.95 else f"{rate:.2f}"
