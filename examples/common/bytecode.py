"""A second kind of real data that every machine has: the compiled standard library.

Every tenth file is held out for validation. All peers must run the same Python version to have the same bytes.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import numpy as np

from common.text import Bytes

FILES = 60
HELD_OUT_ONE_IN = 10
VALIDATION_SEQUENCES = 256


def _instructions(code: CodeType) -> Iterator[bytes]:
    """Yield the instructions of a module or function, and of everything defined in it."""
    yield code.co_code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _instructions(constant)


class Bytecode:
    """The concatenated instructions of some modules."""

    def __init__(self) -> None:
        training, held_out = bytearray(), bytearray()
        for number, path in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:FILES]):
            code = compile(path.read_bytes(), path.name, "exec")
            (training if number % HELD_OUT_ONE_IN else held_out).extend(b"".join(_instructions(code)))
        self._training, self._held_out = np.frombuffer(training, np.uint8), np.frombuffer(held_out, np.uint8)

    def batch(self, step: int, direction: int, sequences: int, length: int) -> Bytes:
        """Return stretches from random places, which depend only on step and direction: (sequences, length)."""
        random = np.random.default_rng([step, direction])
        starts = random.integers(0, self._training.size - length + 1, sequences)
        stretches: Bytes = self._training[starts[:, None] + np.arange(length)]
        return stretches

    def validation(self, length: int) -> Bytes:
        """Return evenly spaced stretches of the held-out data, the same in each call."""
        starts = np.linspace(0, self._held_out.size - length, VALIDATION_SEQUENCES).astype(np.int64)
        stretches: Bytes = self._held_out[starts[:, None] + np.arange(length)]
        return stretches
