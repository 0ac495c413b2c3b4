"""Warnings of ops that do not end: when there is one, and whom it names."""

from __future__ import annotations

import logging

import pytest

from pccl.protocol.peer.ops import OpWait
from pccl.runtime.session.reports import LongWaits, WorkCounters, named


def name_of(peer: int) -> str:
    return f"vm:{peer}"


def test_the_name_of_a_send() -> None:
    assert named(OpWait(1, 7, 0.0, (3, True), False), name_of) == "send with tag 7 to peer 3 (vm:3)"


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
        "or has not sent all of it; look at `pccl status h:1`, and at what the program does there"
    ]
    assert look(140.5, 10.5, single)[0].startswith("the op with tag 4 has waited 10 s for ")
    assert look(140.7, 0.0, single) == ["the wait for the op with tag 4 is over, after 10.7 s"]
    assert look(141.0, 0.0) == ["recv with tag 5 from peer 2 (vm:2) has ended after 41.0 s"]
