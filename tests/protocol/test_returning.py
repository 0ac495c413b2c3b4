"""The time that peers that have followed a new master may take to connect for heartbeats."""

from __future__ import annotations

from pccl.protocol.master.liveness import RETURN_TIMEOUTS, Returning


def test_late_after_timeout() -> None:
    returning = Returning([1, 2, 3], now=10.0, timeout_s=4.0)
    assert returning.late(13.9) == []
    returning.came(2, 13.0)
    returning.came(2, 16.0)
    returning.came(9, 16.0)
    assert returning.until == 17.0
    returning.gone(1)
    returning.gone(9)
    assert returning.late(17.0) == [3]


def test_waiting_time_is_bounded() -> None:
    returning = Returning(range(100), now=0.0, timeout_s=4.0)
    for peer in range(99):
        returning.came(peer, float(peer))
    assert returning.until == RETURN_TIMEOUTS * 4.0
    assert returning.late(12.0) == [99]
