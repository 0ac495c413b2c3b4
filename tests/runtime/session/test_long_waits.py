"""Warnings of ops that do not end: when there is one, and whom it names."""

from __future__ import annotations

import logging

import pytest

from pccl.protocol.peer.op import OpWait
from pccl.runtime.session.long_waits import LongWaits, named, whom, whom_of_two
from pccl.runtime.session.reports import LinkWait, WorkCounters

NOTHING = LinkWait(0, 0, 0, 0)


def name_of(peer: int) -> str:
    return f"vm:{peer}"


def test_whoever_has_not_called_comes_first() -> None:
    waits = {1: NOTHING, 2: LinkWait(1, 1, 0, 0), 3: LinkWait(0, 1, 0, 0)}
    assert whom(waits, name_of) == "peer 2 (vm:2), which has not called it"


def test_data_and_word_that_is_missing() -> None:
    waits = {1: LinkWait(0, 1, 0, 0), 2: LinkWait(0, 1, 0, 2400)}
    assert whom(waits, name_of) == (
        "peers 1 (vm:1), 2 (vm:2), which have yet to send data, or to pass it on; "
        "peer 2 (vm:2) has not acknowledged any data for 2.4 s"
    )
    assert "peer 5 (vm:5), which has not said that it is done" in whom({5: LinkWait(0, 0, 1, 0)}, name_of)


def test_ops_of_two_and_ops_that_have_not_begun() -> None:
    sends = OpWait(1, 7, 0.0, (3, True), False)
    assert named(sends, name_of) == "send with tag 7 to peer 3 (vm:3)"
    assert "peer 3 (vm:3) has not acknowledged any data for 1.0 s" in whom_of_two(
        sends, {3: LinkWait(0, 0, 0, 1000)}, name_of
    )
    assert "it has not begun" in whom_of_two(OpWait(1, 7, 0.0, None, True), {}, name_of)


def test_one_wait_after_the_other(caplog: pytest.LogCaptureFixture) -> None:
    """The engine counts anew with each op that ends; a wait that another follows has ended."""
    logger = logging.LoggerAdapter(logging.getLogger("pccl.peer"))
    waits = LongWaits(WorkCounters(), logger, name_of, "h:1")

    def look(now: float, wait_s: float, *single: OpWait) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "pccl.peer"):
            waits.look(now, wait_s, lambda: [4], single)
        return caplog.messages

    assert look(105.0, 5.0) == []
    (first,) = look(110.5, 10.5)
    assert first.startswith("the op with tag 4 has waited 10 s for ")
    assert "`pccl status h:1`" in first
    assert look(120.0, 20.0) == []
    assert len(look(131.0, 31.0)) == 1
    assert look(132.0, 0.5) == ["the op with tag 4 has ended after 32.0 s"]
    single = OpWait(9, 5, 100.0, (2, False), False)
    assert look(140.0, 0.0, single) == [
        "recv with tag 5 from peer 2 (vm:2) has waited 40 s for peer 2 (vm:2), which has not called send, "
        "or not sent all of it; look at `pccl status h:1`, and at what the program does there"
    ]
    assert look(140.5, 10.5, single)[0].startswith("the op with tag 4 has waited 10 s for ")
    assert look(140.7, 0.0, single) == ["the wait for the op with tag 4 is over, after 10.7 s"]
    assert look(141.0, 0.0) == ["recv with tag 5 from peer 2 (vm:2) has ended after 41.0 s"]
