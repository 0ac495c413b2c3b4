"""Verdicts that others might not have heard."""

from __future__ import annotations

import pytest

from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError
from pccl.protocol.messages import OpRef
from pccl.protocol.peer import op as verdicts
from pccl.protocol.peer.op import ABORTS_KEPT_MAX, KnownVerdicts, failure_of
from pccl.types import Result

TAG = 7
LATE = Result.TIMEOUT, "late"


def test_the_last_commit_stands_for_all_before_it() -> None:
    heard = KnownVerdicts()
    heard.abort(OpRef(TAG, 0), LATE)
    heard.commit(OpRef(TAG, 1))
    heard.abort(OpRef(TAG, 3), LATE)
    heard.commit(OpRef(TAG, 2))
    heard.commit(OpRef(TAG, 2))
    assert heard.newest() == ([OpRef(TAG, 2)], [m.Aborted(TAG, 3, *LATE)]), "an abort may come before its turn"
    assert heard.was_aborted(OpRef(TAG, 3))
    assert not heard.was_aborted(OpRef(TAG, 2))
    assert not heard.was_aborted(OpRef(TAG, 0)), "that was forgotten"


def test_aborts_of_one_tag_are_bounded_and_share_their_text() -> None:
    heard = KnownVerdicts()
    for use in range(ABORTS_KEPT_MAX + 5):
        heard.abort(OpRef(TAG, use), (Result.TIMEOUT, "".join(["la", "te"])))
    _, aborts = heard.newest()
    assert [abort.sequence for abort in aborts] == list(range(5, ABORTS_KEPT_MAX + 5))
    assert len({id(abort.reason) for abort in aborts}) == 1


def test_aborts_of_all_tags_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "ABORTS_KEPT_IN_ALL_MAX", 20)
    heard = KnownVerdicts()
    for tag in range(100):
        heard.abort(OpRef(tag, 0), LATE)
    assert [abort.tag for abort in heard.newest()[1]] == list(range(80, 100))


def test_success_is_no_failure() -> None:
    assert failure_of(Result.TIMEOUT, "late") == LATE
    for code in (Result.SUCCESS, 4711):
        with pytest.raises(ProtocolError, match="a failure with code"):
            failure_of(code, "?")
