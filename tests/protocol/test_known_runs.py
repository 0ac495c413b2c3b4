"""What a master knows of runs that it does not lead: by peers that are gone again, and by a record that may be old."""

from __future__ import annotations

import pytest

from pccl.protocol import messages as m
from pccl.protocol.failover.durable_state import RecordedView, RunRecord
from tests.protocol.test_failover import Rig
from tests.protocol.test_recovery_report import report_of, view


def _record() -> RunRecord:
    return RunRecord("old", b"", 1, RecordedView.of(6, (1, 2, 3)))


def test_newest_reported_view_counts() -> None:
    rig = Rig()
    rig.resume(1, masters=1)
    rig.deliver(report_of(1, view(6, 1, 2, 3)))
    rig.resume(3, masters=1)
    rig.deliver(report_of(3, view(7, 3, 4)))
    rig.machine.disconnected(3, "reset", rig.now)
    rig.resume(2, masters=1)
    rig.deliver(report_of(2, view(6, 1, 2, 3)))
    rig.wait(4.0)
    assert not rig.machine.is_leading


def test_higher_term_voids_record() -> None:
    rig = Rig(record=_record())
    rig.resume(1, term=2)
    rig.deliver(report_of(1, view(6, 1, 2, 3)))
    rig.wait(8.0)
    rig.answer()
    rig.wait(1.0)
    assert not rig.machine.is_leading


@pytest.mark.parametrize(("term", "answer"), [(1, m.Goodbye), (2, m.PreVoteRequest)])
def test_later_term_admits_unrecorded_peer(term: int, answer: type) -> None:
    rig = Rig(record=_record())
    rig.resume(9, term=term)
    assert rig.kinds(9) == [answer]
