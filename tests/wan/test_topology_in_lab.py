"""optimize_topology over real TCP, between hosts whose links differ, next to all rings that there are."""

from __future__ import annotations

import pytest

from tests.wan.topology import Net, measure


@pytest.mark.slow
def test_best_ring_is_found() -> None:
    net = Net.of_seed(hosts=4, seed=1, slow=20, fast=200, delay_ms=5)
    fast = [ring for ring in net.rings() if net.slowest_mbit(ring) == 200]
    assert len(fast) == 1, "of the six rings one is fast"
    report = measure(net, megabytes=1)
    assert report.slowest_mbit["optimized"] == 200
    assert report.slowest_mbit["worst"] == 20
    assert report.slowest_mbit["again"] == 200
    assert len(report.measured_mbit) == 12
    assert min(report.measured_mbit.values()) > 0  # a busy machine may measure more or less than the lines have
