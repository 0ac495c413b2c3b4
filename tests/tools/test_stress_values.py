"""The values of a stressed reduce: a right result names its participants, any other is found."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pccl import ReduceOp
from pccl.tools.stress.plan import SLOTS
from pccl.tools.stress.values import (
    COUNT_MAX,
    TAGS,
    Op,
    WrongResultError,
    ops_of_step,
)

BYTES_MAX = 1 << 12


def _reduced(op: Op, slots: Collection[int]) -> NDArray[Any]:
    parts = np.stack([op.contribution(slot) for slot in slots])
    match op.op:
        case ReduceOp.SUM:
            return np.asarray(parts.sum(0, dtype=parts.dtype))
        case ReduceOp.AVG:
            return np.asarray((parts.sum(0, dtype=np.float64) / len(slots)).astype(parts.dtype))
        case ReduceOp.PROD:
            return np.asarray(parts.prod(0, dtype=parts.dtype))
        case ReduceOp.MAX:
            return np.asarray(parts.max(0))
        case ReduceOp.MIN:
            return np.asarray(parts.min(0))


def _ops() -> Iterator[Op]:
    for revision in range(60):
        yield from ops_of_step(7, 0, revision, BYTES_MAX)


@pytest.mark.parametrize("slots", [{0}, {15}, {3, 7}, {0, 1, 5, 9, 14}, set(range(SLOTS))])
def test_participants(slots: set[int]) -> None:
    for op in _ops():
        assert op.participants(_reduced(op, slots)) == slots, op


def test_all_kinds_occur() -> None:
    ops = list(_ops())
    assert {op.op for op in ops} == set(ReduceOp)
    assert {op.dtype for op in ops} >= {"uint8", "int8", "uint16", "int64", "float16", "float32", "float64"}
    assert {op.quantization.bits for op in ops if op.quantization is not None} == {4, 8, 16}
    assert {op.positions for op in ops} == {1, 8, SLOTS}


def test_ops_of_step() -> None:
    step = ops_of_step(1, 2, 3, 1 << 20)
    assert [op.tag for op in step] == list(range(TAGS))
    assert step == ops_of_step(1, 2, 3, 1 << 20)
    assert step != ops_of_step(1, 2, 4, 1 << 20)
    assert step != ops_of_step(1, 1, 3, 1 << 20)
    assert all(op.count <= COUNT_MAX for revision in range(50) for op in ops_of_step(1, 0, revision, 1 << 26))


def test_wrong_results() -> None:
    for op in _ops():
        right = _reduced(op, {2, 3, 11})
        wrong = {}
        if op.op is not ReduceOp.MIN:
            wrong["zeros"] = np.zeros_like(right)
        if op.count >= SLOTS:  # a few elements alone could also be others'; then the peers' reports differ
            wrong["one element of more peers"] = one = right.copy()
            one[-1] = op.contribution(8)[-1] + one[-1] + one[-1].dtype.type(1)
            wrong["in the wrong place"] = np.roll(right, 1)
        if op.op is ReduceOp.SUM and op.count >= SLOTS:
            wrong["one peer's twice"] = right + op.contribution(3)
        for what, result in wrong.items():
            with pytest.raises(WrongResultError, match=f"tag {op.tag} "):
                raise AssertionError(f"{what}: {op} passes as {op.participants(result)}")


def test_nan() -> None:
    op = next(op for op in _ops() if op.quantization is not None and op.dtype == "float32")
    result = _reduced(op, {1, 2})
    result[-1] = np.nan
    with pytest.raises(WrongResultError):
        op.participants(result)
