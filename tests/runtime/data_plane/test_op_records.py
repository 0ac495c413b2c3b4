"""An op of its records: what they say of an op that is over stays so."""

from __future__ import annotations

import pytest

from pccl.runtime.data_plane import op_records
from pccl.runtime.extension import lib


def row(**known: int) -> op_records.Row:
    return op_records.Row(**{**dict.fromkeys(op_records.NAMES, 0), **known})


@pytest.mark.parametrize("is_ended_by_the_engine", [False, True])
def test_an_op_of_the_fast_path_is_over_once_all_are_done(is_ended_by_the_engine: bool) -> None:
    """Its caller goes on then, maybe long before the engine ends it."""
    end = {"ended_ns": 9, "outcome": lib.PCCL_RECORD_COMMITTED} if is_ended_by_the_engine else {}
    op = op_records.joined([row(launched_ns=2, done_ns=4, completed_ns=5, **end)], None, [1], lambda caller: caller)
    assert (op.agreed_ns, op.ended_ns, op.result) == (5, 5, "SUCCESS")


def test_an_op_that_was_aborted_is_over_when_the_engine_says_so() -> None:
    end = {"ended_ns": 9, "outcome": lib.PCCL_RECORD_ABORTED}
    op = op_records.joined([row(launched_ns=2, completed_ns=5, **end)], None, [1], lambda caller: caller)
    assert (op.ended_ns, op.result) == (9, "ABORTED")
