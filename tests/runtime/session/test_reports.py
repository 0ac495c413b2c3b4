"""A session's reports to the master: what is counted, and when there is something to tell."""

from __future__ import annotations

import numpy as np
import pytest

from pccl import MasterNode, ReduceOp
from pccl.protocol.master.statistics import History, Traffic
from pccl.protocol.messages import LinkReport, Report
from pccl.runtime.data_plane.events import LinkCounters
from pccl.runtime.session.reports import (
    EPOCHS_REPORTED,
    REPEATS,
    REPORT_S,
    REPORTS_PER_S_MAX,
    WorkCounters,
    interval_s,
)
from pccl.status import RunStatus, run_status
from tests.support.cluster import Cluster, until

STATS = {"tx_payload_bytes": 10, "rx_payload_bytes": 20, "in_ops_us": 0, "op_wait_us": 0}


def test_what_is_counted() -> None:
    counters = WorkCounters()
    counters.op_ended(3, is_committed=True)
    counters.op_ended(3, is_committed=False)
    counters.op_ended(4, is_committed=True)
    counters.state_fetched(7)
    counters.reconnected()
    for link, peer in ((1, 2), (2, 5), (3, 6)):
        counters.link_made(link, peer)
    counters.link_counted(LinkCounters(1, 4, 0, 700, 500, 0))
    counters.link_counted(LinkCounters(1, 6, 0, 700, 500, 1))
    counters.link_counted(LinkCounters(3, 8, 0, 700, 500, 0))
    counters.link_closed(3)
    counters.link_counted(LinkCounters(3, 9, 0, 700, 500, 0))  # asked for before
    assert counters.links == [1, 2]
    assert counters.report(STATS) == Report([(3, 1, 1), (4, 1, 0)], 10, 20, 7, 1, [LinkReport(2, 10)])


def test_a_link_over_which_payload_only_comes_is_reported_and_not_shown() -> None:
    """Who broadcasts hears nothing, or is not heard: what has come tells."""
    counters, traffic = WorkCounters(), Traffic(History())
    for link, peer in ((1, 2), (2, 5)):
        counters.link_made(link, peer)
        counters.link_counted(LinkCounters(link, 0, 4 if peer == 2 else 0, 0, 0))
    report = counters.report(STATS)
    assert report is not None
    assert [(link.peer, link.tx_bytes) for link in report.links] == [(2, 0)]
    for now in (100.0, 100.5, 103.0):
        traffic.reported(1, 0, report, now)
        assert traffic.of(1).links == []


def test_figures_of_a_direction() -> None:
    """Of several engine threads: sums, and the largest shares."""
    counters, traffic = WorkCounters(), Traffic(History())
    counters.link_made(1, 2)
    for at in range(1, 3):
        for thread in range(2):
            counts = LinkCounters(
                *(1, 1000 * at, 0, 0, 0, thread),
                busy_ms=900 * at,
                sender_ms=200 * at * thread,
                receiver_ms=400 * at * (1 - thread),
                delivered=95 * at,
                resent=5 * at,
                unacked_bytes=3000,
                round_trip_us=50_000 + thread,
                round_trip_us_min=20_000 + thread,
            )
            counters.link_counted(counts)
        report = counters.report(STATS)
        assert report is not None
        traffic.reported(1, 0, report, 2.0 * at)
    (link,) = traffic.of(1).links
    assert (link.peer, link.tx_bytes, link.tx_bytes_per_s) == (2, 4000, 1000.0)
    assert (link.round_trip_s, link.round_trip_s_min) == (0.050001, 0.02)
    assert (link.resent_share, link.unacked_bytes) == (0.05, 6000)
    assert (link.sender_limited, link.receiver_limited) == (0.1, 0.2)


def test_history_of_the_mean_loss() -> None:
    history = History()
    traffic = Traffic(history)
    assert history.course(0.0).loss == []
    for now, peer, loss in [(100.5, 1, 4.0), (100.6, 2, 2.0), (100.7, 3, float("nan")), (104.1, 1, 1.0)]:
        traffic.reported(peer, 0, Report([], 0, 0, 0, 0, [], figures=[("step", 7.0), ("loss", loss)]), now)
    assert history.course(104.2).loss == [3.0, None, 1.0]
    assert len(history.course(104.2).steps) == 3
    assert history.hour(104.2).loss == [2.0 + 1 / 3]
    for number in range(1000):
        history.reported(2.0 * number, 1.0)
    assert len(history.course(2000.0).loss) == len(history.course(2000.0).steps) == 300


def test_an_idle_peer_falls_silent_after_saying_so_for_a_while() -> None:
    counters = WorkCounters()
    for _ in range(1 + REPEATS):
        assert counters.report(STATS) is not None
    assert counters.report(STATS) is None
    counters.op_ended(1, is_committed=True)
    assert counters.report(STATS) is not None


@pytest.mark.parametrize("busy_reports", range(1, 12))
@pytest.mark.parametrize("late_s", [0.0, 0.02, 0.3])
def test_rates_of_who_carries_nothing_any_more_fall_back_to_0(busy_reports: int, late_s: float) -> None:
    """Whatever stretch of time the last of them was taken over."""
    counters, traffic = WorkCounters(), Traffic(History())
    counters.link_made(1, 2)
    now, sent = 100.0, 0
    while True:
        sent += 1_000_000 if busy_reports > 0 else 0
        busy_reports -= 1
        counters.link_counted(LinkCounters(1, sent, 0, 0, 0, 0))
        report = counters.report({**STATS, "tx_payload_bytes": sent}, 1, now)
        if report is None:
            break
        traffic.reported(1, 0, report, now)
        now += REPORT_S + late_s
    found = traffic.of(1)
    assert (found.tx_bytes_per_s, [link.tx_bytes_per_s for link in found.links]) == (0.0, [0.0])


def test_another_master_is_told_anew() -> None:
    counters = WorkCounters()
    before = counters.report(STATS, 1)
    for _ in range(REPEATS):
        counters.report(STATS, 1)
    assert counters.report(STATS, 1) is None
    assert counters.report(STATS, 2) == before


def test_only_the_last_epochs_are_last_report() -> None:
    counters = WorkCounters()
    for epoch in range(1, 3 * EPOCHS_REPORTED):
        counters.op_ended(epoch, is_committed=True)
    report = counters.report(STATS)
    assert report is not None
    assert [epoch for epoch, _, _ in report.ops] == list(range(2 * EPOCHS_REPORTED, 3 * EPOCHS_REPORTED))


def test_many_peers_report_less_often() -> None:
    assert interval_s(2) == REPORT_S
    assert 10_000 / interval_s(10_000) == REPORTS_PER_S_MAX


def links_of(status: RunStatus) -> list[list[tuple[int, int]]]:
    return [[(link.peer, link.tx_bytes) for link in member.traffic.links] for member in status.members]


@pytest.mark.usefixtures("reported_at_once")
def test_ops_and_bytes_of_a_run_are_told_exactly() -> None:
    with MasterNode("127.0.0.1:0") as node:
        cluster = Cluster(node.address)
        cluster.join(2)
        cluster.each(lambda peer, i: peer.all_reduce(np.ones(1000, np.float32), op=ReduceOp.SUM))
        cluster.each(lambda peer, i: peer.all_reduce(np.ones(1000, np.float32), op=ReduceOp.SUM))
        until(lambda: run_status(node.address).totals.tx_bytes == 16_000, "all bytes are reported")
        status = run_status(node.address)
        assert status.totals.ops_committed == 2
        assert [member.traffic.tx_bytes for member in status.members] == [8000, 8000]
        # Links are asked after each report, and reported with the next.
        sent = [[(2, 8000)], [(1, 8000)]]
        until(lambda: links_of(run_status(node.address)) == sent, "what went over the links is reported")
        # Who leaves says first what it has not reported yet.
        cluster.each(lambda peer, i: peer.all_reduce(np.ones(1000, np.float32), op=ReduceOp.SUM))
        cluster.close(cluster[1])
        until(lambda: run_status(node.address).totals.leaves, "it has left")
        assert run_status(node.address).totals.ops_committed == 3
        cluster.close_all()
