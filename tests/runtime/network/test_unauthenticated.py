"""Unauthenticated connections: which one is dropped when there are too many, and how much of them is logged."""

from __future__ import annotations

import logging

import pytest

from pccl.runtime.network.accepting import LINES_MAX, WINDOW_S, LogLimiter, Unauthenticated, source_of


class Port:
    def __init__(self, total_max: int, per_source_max: int) -> None:
        self.connections = Unauthenticated(total_max, per_source_max)
        self.dropped: list[str] = []

    def enter(self, host: str, name: str) -> int:
        return self.connections.enter(host, lambda: self.dropped.append(name))


def test_oldest_of_full_source_is_dropped() -> None:
    port = Port(10, 2)
    for name in "abc":
        port.enter("10.0.0.1", name)
    port.enter("10.0.0.2", "d")
    assert port.dropped == ["a"]
    assert len(port.connections) == 3
    assert port.connections.dropped == 1


def test_largest_source_is_dropped() -> None:
    port = Port(4, 4)
    first = port.enter("10.0.0.2", "single")
    for name in "abc":
        port.enter("10.0.0.1", name)
    port.enter("10.0.0.3", "another")
    port.enter("10.0.0.4", "a third")
    assert port.dropped == ["a", "b"]
    port.connections.leave(first)
    assert len(port.connections) == 3


def test_among_equals_the_oldest_goes() -> None:
    port = Port(2, 2)
    for host in ("10.0.0.3", "10.0.0.1", "10.0.0.2"):
        port.enter(host, host)
    assert port.dropped == ["10.0.0.3"]


def test_authenticated_is_not_dropped() -> None:
    port = Port(2, 2)
    port.connections.leave(port.enter("10.0.0.1", "a"))
    for name in "bcd":
        port.enter("10.0.0.1", name)
    assert port.dropped == ["b"]
    assert port.connections.drop_one()
    assert port.connections.drop_one()
    assert not port.connections.drop_one()
    port.connections.leave(1)
    assert len(port.connections) == 0


def test_an_ipv6_network_is_one_source() -> None:
    assert source_of("2001:db8::1") == source_of("2001:db8::ffff:2") != source_of("2001:db8:0:1::1")
    assert source_of("fe80::1%eth0") == source_of("fe80::2%eth0")
    assert source_of("10.0.0.1") != source_of("10.0.0.2")
    assert source_of("somewhere") == "somewhere"


def test_log_lines_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    limiter = LogLimiter(logging.getLogger("pccl.test"), lambda: now)
    with caplog.at_level(logging.INFO, "pccl.test"):
        for i in range(10 * LINES_MAX):
            limiter.log(logging.INFO, f"connection {i}")
        assert len(caplog.messages) == LINES_MAX + 1
        assert "too many unauthenticated connections" in caplog.messages[-1]
        now = WINDOW_S
        limiter.log(logging.INFO, "after a while")
        assert caplog.messages[-2:] == [
            f"{9 * LINES_MAX} more lines about unauthenticated connections were omitted",
            "after a while",
        ]
