"""Use counts of tags, and words on uses that are still to be made."""

from __future__ import annotations

from pccl.protocol.messages import OpRef
from pccl.protocol.peer.ops import FORGOTTEN_AT_ONCE, Uses
from pccl.types import Result

TAG = 7
LATE = Result.TIMEOUT, "late"


def test_count_per_tag() -> None:
    uses = Uses()
    assert [uses.make(TAG), uses.make(8), uses.make(TAG)] == [OpRef(TAG, 0), OpRef(8, 0), OpRef(TAG, 1)]
    assert (uses.made(TAG), uses.made(8), uses.made(9), uses.tags) == (2, 1, 0, 2)
    assert uses.is_made(OpRef(TAG, 1))
    assert not uses.is_made(OpRef(TAG, 2))


def test_early_abort_is_taken_once() -> None:
    uses = Uses()
    uses.abort(OpRef(TAG, 0), LATE, counts_as_made=False)
    ref = uses.make(TAG)
    assert uses.aborts.pop(ref) == LATE
    assert uses.aborts == {}


def test_counts_as_made() -> None:
    uses = Uses()
    uses.abort(OpRef(TAG, 0), LATE, counts_as_made=True)
    uses.abort(OpRef(TAG, 2), LATE, counts_as_made=True)
    assert (uses.made(TAG), list(uses.aborts)) == (1, [OpRef(TAG, 2)]), "one that comes too early is kept"


def test_make_aborted() -> None:
    uses = Uses()
    for op in (OpRef(TAG, 1), OpRef(TAG, 0), OpRef(8, 1), OpRef(9, 0)):
        uses.abort(op, LATE, counts_as_made=False)
    uses.make_aborted()
    assert (uses.made(TAG), uses.made(8), uses.made(9)) == (2, 0, 1)
    assert list(uses.aborts) == [OpRef(8, 1)], "nothing is known of the use before it"


def test_unlaunched_range() -> None:
    uses = Uses()
    uses.make(TAG)
    assert uses.unmade_until(OpRef(TAG, 3)) == range(1, 4)
    assert uses.unmade_until(OpRef(TAG, 1000)) == range(1001 - FORGOTTEN_AT_ONCE, 1001)


def test_promise_is_taken_once() -> None:
    uses = Uses()
    uses.promises[OpRef(TAG, 0)] = LATE
    assert list(uses.promises.items()) == [(OpRef(TAG, 0), LATE)]
    assert uses.promises == {OpRef(TAG, 0): LATE}
