"""Use counts of tags, and words on uses that are still to be made."""

from __future__ import annotations

from pccl.protocol.messages import OpRef
from pccl.protocol.peer.ops import EARLY_KEPT_MAX, FORGOTTEN_AT_ONCE, Uses
from pccl.types import Result

TAG = 7
LATE = Result.TIMEOUT, "late"


def test_each_tag_has_a_count_of_its_own() -> None:
    uses = Uses()
    assert [uses.make(TAG), uses.make(8), uses.make(TAG)] == [OpRef(TAG, 0), OpRef(8, 0), OpRef(TAG, 1)]
    assert (uses.made(TAG), uses.made(8), uses.made(9), uses.tags) == (2, 1, 0, 2)
    assert uses.is_made(OpRef(TAG, 1))
    assert not uses.is_made(OpRef(TAG, 2))


def test_an_abort_waits_for_its_use_and_is_taken_once() -> None:
    uses = Uses()
    assert uses.abort(OpRef(TAG, 0), LATE, counts_as_made=False) == 0
    ref = uses.make(TAG)
    assert uses.take_abort(ref) == LATE
    assert uses.take_abort(ref) is None


def test_one_that_counts_as_made_is_counted() -> None:
    uses = Uses()
    assert uses.abort(OpRef(TAG, 0), LATE, counts_as_made=True) == 0
    assert uses.abort(OpRef(TAG, 2), LATE, counts_as_made=True) == 0
    assert (uses.made(TAG), list(uses.aborts)) == (1, [OpRef(TAG, 2)]), "one that comes too early is kept"


def test_those_that_are_aborted_are_made_at_once() -> None:
    uses = Uses()
    for op in (OpRef(TAG, 1), OpRef(TAG, 0), OpRef(8, 1), OpRef(9, 0)):
        uses.abort(op, LATE, counts_as_made=False)
    uses.make_aborted()
    assert (uses.made(TAG), uses.made(8), uses.made(9)) == (2, 0, 1)
    assert list(uses.aborts) == [OpRef(8, 1)], "nothing is known of the use before it"


def test_too_many_count_as_made_and_are_told_once() -> None:
    uses = Uses()
    given_up = [uses.abort(OpRef(TAG, use), LATE, counts_as_made=False) for use in range(EARLY_KEPT_MAX + 3)]
    assert given_up == [0] * EARLY_KEPT_MAX + [EARLY_KEPT_MAX + 1, 0, 0]
    assert uses.is_overtaken(TAG)
    assert not uses.aborts
    assert uses.make(TAG) == OpRef(TAG, EARLY_KEPT_MAX + 3)
    assert not uses.is_overtaken(TAG), "it has made a call since"


def test_what_was_not_made_is_forgotten_as_far_back_as_it_may_lag() -> None:
    uses = Uses()
    uses.make(TAG)
    assert uses.unmade_until(OpRef(TAG, 3)) == range(1, 4)
    assert uses.unmade_until(OpRef(TAG, 1000)) == range(1001 - FORGOTTEN_AT_ONCE, 1001)


def test_a_promise_is_taken_once() -> None:
    uses = Uses()
    uses.promise(OpRef(TAG, 0), LATE)
    assert list(uses.promises.items()) == [(OpRef(TAG, 0), LATE)]
    assert uses.take_promise(OpRef(TAG, 0)) == LATE
    assert uses.take_promise(OpRef(TAG, 0)) is None
