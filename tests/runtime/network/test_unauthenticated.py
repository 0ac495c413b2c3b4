"""Who is dropped when too many strangers wait, and how much is said of them."""

from __future__ import annotations

import logging

import pytest

from pccl.runtime.network.log_limiter import LINES_MAX, WINDOW_S, LogLimiter
from pccl.runtime.network.unauthenticated import Unauthenticated, source_of


class Door:
    def __init__(self, total_max: int, per_source_max: int) -> None:
        self.connections = Unauthenticated(total_max, per_source_max)
        self.dropped: list[str] = []

    def enter(self, host: str, name: str) -> int:
        return self.connections.enter(host, lambda: self.dropped.append(name))


def test_the_oldest_of_a_source_with_too_many_goes() -> None:
    door = Door(10, 2)
    for name in "abc":
        door.enter("10.0.0.1", name)
    door.enter("10.0.0.2", "d")
    assert door.dropped == ["a"]
    assert len(door.connections) == 3
    assert door.connections.dropped == 1


def test_a_crowd_makes_room_for_a_single_one() -> None:
    door = Door(4, 4)
    first = door.enter("10.0.0.2", "single")
    for name in "abc":
        door.enter("10.0.0.1", name)
    door.enter("10.0.0.3", "another")
    door.enter("10.0.0.4", "a third")
    assert door.dropped == ["a", "b"]
    door.connections.leave(first)
    assert len(door.connections) == 3


def test_among_equals_the_oldest_goes() -> None:
    door = Door(2, 2)
    for host in ("10.0.0.3", "10.0.0.1", "10.0.0.2"):
        door.enter(host, host)
    assert door.dropped == ["10.0.0.3"]


def test_who_has_left_is_not_dropped() -> None:
    door = Door(2, 2)
    door.connections.leave(door.enter("10.0.0.1", "a"))
    for name in "bcd":
        door.enter("10.0.0.1", name)
    assert door.dropped == ["b"]
    assert door.connections.drop_one()
    assert door.connections.drop_one()
    assert not door.connections.drop_one()
    door.connections.leave(1)
    assert len(door.connections) == 0


def test_an_ipv6_network_is_one_source() -> None:
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff:2") != source_of("2001:db8:0:1::1")
    assert source_of("fe80::1%eth0") == source_of("fe80::2%eth0")
    assert source_of("10.0.0.1") != source_of("10.0.0.2")
    assert source_of("somewhere") == "somewhere"


def test_strangers_cannot_fill_a_log(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    refusals = LogLimiter(logging.getLogger("pccl.test"), lambda: now)
    with caplog.at_level(logging.INFO, "pccl.test"):
        for i in range(10 * LINES_MAX):
            refusals.log(logging.INFO, f"stranger {i}")
        assert len(caplog.messages) == LINES_MAX + 1
        assert "too many unauthenticated connections" in caplog.messages[-1]
        now = WINDOW_S
        refusals.log(logging.INFO, "after a while")
        assert caplog.messages[-2:] == [
            f"{9 * LINES_MAX} more lines about unauthenticated connections were left out",
            "after a while",
        ]
