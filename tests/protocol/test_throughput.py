"""Throughput that ops show of their links."""

from __future__ import annotations

from pccl.protocol.master.statistics import FULL_MS_MIN, Throughput
from pccl.protocol.messages import LinkReport, Report


def report(*links: LinkReport) -> Report:
    return Report([], 0, 0, links=list(links))


def test_only_time_in_which_the_link_was_the_limit_counts() -> None:
    throughput = Throughput()
    assert throughput.reported(1, report(LinkReport(2, 10**9, 0, 0))) == []
    assert throughput.reported(1, report(LinkReport(2, 2 * 10**9, 1000, 2_500_000))) == [(2, 2.5e6)]


def test_each_metric_is_of_what_came_since_the_last_one() -> None:
    throughput = Throughput()
    throughput.reported(1, report(LinkReport(2, 1, 1000, 2_500_000)))
    little = LinkReport(2, 1, 1000 + FULL_MS_MIN - 1, 3_000_000)
    assert throughput.reported(1, report(little)) == []
    assert throughput.reported(1, report(LinkReport(2, 1, 2000, 7_500_000))) == [(2, 5e6)]


def test_a_link_made_anew_counts_from_the_start() -> None:
    throughput = Throughput()
    throughput.reported(1, report(LinkReport(2, 1, 9000, 9_000_000)))
    assert throughput.reported(1, report(LinkReport(2, 1, 1000, 2_000_000))) == [(2, 2e6)]
    assert throughput.reported(1, report()) == []
    assert throughput.reported(1, report(LinkReport(2, 1, 1500, 1_500_000))) == [(2, 1e6)]


def test_what_was_before_a_failover_is_in_no_metric_after_it() -> None:
    throughput = Throughput()
    throughput.inherit([1])
    assert throughput.reported(1, report(LinkReport(2, 1, 9000, 9_000_000))) == []
    assert throughput.reported(1, report(LinkReport(2, 1, 10000, 14_000_000))) == [(2, 5e6)]


def test_who_is_gone_is_forgotten() -> None:
    throughput = Throughput()
    throughput.inherit([1])
    throughput.forget(1)
    throughput.reported(1, report(LinkReport(2, 1, 1000, 2_500_000)))
    throughput.forget(1)
    assert not throughput._used
