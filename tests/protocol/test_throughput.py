"""Throughput that ops show of their links."""

from __future__ import annotations

from pccl.protocol.master.statistics import FULL_MS_MIN, Throughput
from pccl.protocol.messages import LinkReport, Report


def report(*links: LinkReport) -> Report:
    return Report([], 0, 0, links=list(links))


def test_only_limited_time_counts() -> None:
    throughput = Throughput()
    assert throughput.reported(1, report(LinkReport(2, 10**9, 0, 0))) == []
    assert throughput.reported(1, report(LinkReport(2, 2 * 10**9, 1000, 2_500_000))) == [(2, 2.5e6)]


def test_metric_covers_time_since_last() -> None:
    throughput = Throughput()
    throughput.reported(1, report(LinkReport(2, 1, 1000, 2_500_000)))
    little = LinkReport(2, 1, 1000 + FULL_MS_MIN - 1, 3_000_000)
    assert throughput.reported(1, report(little)) == []
    assert throughput.reported(1, report(LinkReport(2, 1, 2000, 7_500_000))) == [(2, 5e6)]


def test_remade_link_starts_over() -> None:
    throughput = Throughput()
    throughput.reported(1, report(LinkReport(2, 1, 9000, 9_000_000)))
    assert throughput.reported(1, report(LinkReport(2, 1, 1000, 2_000_000))) == [(2, 2e6)]
    assert throughput.reported(1, report()) == []
    assert throughput.reported(1, report(LinkReport(2, 1, 1500, 1_500_000))) == [(2, 1e6)]


def test_failover_starts_over() -> None:
    throughput = Throughput()
    throughput.inherit([1])
    assert throughput.reported(1, report(LinkReport(2, 1, 9000, 9_000_000))) == []
    assert throughput.reported(1, report(LinkReport(2, 1, 10000, 14_000_000))) == [(2, 5e6)]
