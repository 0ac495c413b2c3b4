"""Random signs through the public module, against Philox4x32-10 written down once more with Python's integers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from pccl.signs import SUM_MAX, add_signs, sign_words
from tests.native.sign_cases import SignCase, sign_cases

MASK = 0xFFFFFFFF


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Figure 2 of the paper."""
    left0, right0, left1, right1 = counter
    key0, key1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * left0, 0xCD9E8D57 * left1
        left0, right0 = (product1 >> 32) ^ right0 ^ key0, product1 & MASK
        left1, right1 = (product0 >> 32) ^ right1 ^ key1, product0 & MASK
        key0, key1 = (key0 + 0x9E3779B9) & MASK, (key1 + 0xBB67AE85) & MASK
    return left0, right0, left1, right1


def signs(count: int, seed: int, tensor: int, step: int, direction: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    def bits() -> Iterator[int]:
        for i in range(count):
            words = philox((i // 128, tensor, step, direction), (seed & MASK, seed >> 32))
            yield words[i % 128 // 32] >> i % 32 & 1

    return 1 - 2 * np.fromiter(bits(), np.int64, count)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_published_vectors(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """kat_vectors of Random123, the authors' own implementation."""
    block, tensor, step, direction = counter
    seed = key[1] << 32 | key[0]
    assert sign_words(seed=seed, tensor=tensor, step=step, direction=direction, block=block) == expected
    assert philox(counter, key) == expected


@settings(max_examples=30, deadline=None)
@given(sign_cases(600, 2**20))
def test_what_is_added_is_what_is_written(case: SignCase) -> None:
    values, units = case.values(), case.units
    before = values.tobytes()
    add_signs(values, case.quantum, **case.numbers())
    for direction, amount in case.moves:
        units += amount * signs(case.count, case.seed, case.tensor, case.step, direction)
    assert np.array_equal(values, (units * case.quantum).astype(np.float32))
    add_signs(values, case.quantum, **case.numbers(-1))
    assert values.tobytes() == before


def add(values: Any = None, quantum: float = 1.0, **others: Any) -> None:
    values = np.zeros(3, np.float32) if values is None else values
    add_signs(values, quantum, **{"seed": 0, "tensor": 0, "step": 0, "directions": [0], "amounts": [1]} | others)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"values": np.zeros(3)}, "float32"),
        ({"values": np.zeros((3, 3), np.float32)}, "flat"),
        ({"values": np.zeros(6, np.float32)[::2]}, "contiguous"),
        ({"quantum": 3.0}, "power of two"),
        ({"quantum": 2.0**-127}, "power of two"),
        ({"quantum": 0.0}, "power of two"),
        ({"quantum": float("nan")}, "power of two"),
        ({"amounts": [1, 2]}, "1 directions, but 2 amounts"),
        ({"amounts": [SUM_MAX + 1]}, "more than"),
        ({"directions": [2**32]}, "direction 4294967296 must fit 32 bits"),
        ({"step": -1}, "step -1 must fit 32 bits"),
        ({"seed": 2**64}, "64 bits"),
    ],
)
def test_wrong_arguments_are_told(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        add(**wrong)
