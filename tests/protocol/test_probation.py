"""Delays of those who were evicted for their links."""

from __future__ import annotations

from pccl.protocol.master.admission import DELAY_S_MAX, RECORDS_MAX, WELL_S, Probation

HOST = "10.0.0.1"


def test_delay_doubles_up_to_limit() -> None:
    probation = Probation(5.0)
    assert [probation.evicted(HOST, "a", now=0.0) for _ in range(9)] == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    for _ in range(2000):
        assert probation.evicted(HOST, "a", now=0.0) == DELAY_S_MAX


def test_record_expires() -> None:
    probation = Probation(5.0)
    probation.evicted(HOST, "a", now=0.0)
    found = probation.record(HOST, "a", now=4.9 + WELL_S)
    assert found is not None
    assert (found.evictions, found.until) == (1, 5.0)
    assert probation.record(HOST, "a", now=5.0 + WELL_S) is None
    assert probation.evicted(HOST, "a", now=5.0 + WELL_S) == 5


def test_restarted_process_is_recognized() -> None:
    probation = Probation(5.0)
    probation.evicted(HOST, "box:123", now=0.0)
    assert probation.record(HOST, "box:4567", now=1.0) is not None
    assert probation.record(HOST, "other:123", now=1.0) is None
    assert probation.record("10.0.0.2", "box:123", now=1.0) is None


def test_memory_is_bounded() -> None:
    probation = Probation(5.0)
    for number in range(RECORDS_MAX + 1):
        probation.evicted(HOST, f"n{number}", now=0.0)
    assert probation.record(HOST, "n0", now=0.0) is None
    assert probation.record(HOST, "n1", now=0.0) is not None
