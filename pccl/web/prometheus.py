"""A run's status as Prometheus metrics, formatted by the official client library (the extra `metrics`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pccl.protocol.messages import Kind
from pccl.protocol.status import LinkTraffic, RunStatus

if TYPE_CHECKING:
    from prometheus_client.core import Metric

STATES = ("accepted", "joining", "pending", "connecting")
LINK_GAUGES: list[tuple[str, str, Callable[[LinkTraffic], float]]] = [
    ("bytes_per_second", "Payload sent.", lambda link: link.tx_bytes_per_s),
    ("round_trip_seconds", "Current round trip.", lambda link: link.round_trip_s),
    ("round_trip_min_seconds", "Shortest round trip seen.", lambda link: link.round_trip_s_min),
    ("retransmitted_ratio", "Retransmitted share of the TCP segments.", lambda link: link.resent_share),
    ("unacked_bytes", "Bytes sent but not acknowledged.", lambda link: link.unacked_bytes),
    ("sender_limited_ratio", "Share of time limited by the send buffer.", lambda link: link.sender_limited),
    ("receiver_limited_ratio", "Share of time limited by the receive window.", lambda link: link.receiver_limited),
]


class NotInstalledError(Exception):
    """The Prometheus client library is missing. The text contains the remedy."""


def exposition(status: RunStatus) -> tuple[str, bytes]:
    """Return the content type and the text of a run's metrics. Raise NotInstalledError if the library is missing."""
    try:
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
        from prometheus_client.registry import Collector
    except ImportError:
        raise NotInstalledError(
            "metrics need the Prometheus client library where the master runs: pip install '.[metrics]' in a clone of "
            "pccl"
        ) from None

    class Snapshot(Collector):
        def collect(self) -> Iterator[Metric]:
            return _metrics(status)

    registry = CollectorRegistry()
    registry.register(Snapshot())
    return CONTENT_TYPE_LATEST, generate_latest(registry)


def _metrics(status: RunStatus) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    run = InfoMetricFamily("pccl_run", "The run that this master manages.")
    run.add_metric([], {"run": status.run, "version": status.version})
    yield run
    totals = status.totals
    for name, text, count in (
        ("pccl_ops_committed", "Ops whose result all peers have.", totals.ops_committed),
        ("pccl_ops_aborted", "Ops that ended without a result.", totals.ops_aborted),
        ("pccl_joins", "Peers accepted.", totals.joins),
        ("pccl_losses", "Accepted peers that were lost without leaving.", totals.losses),
        ("pccl_leaves", "Accepted peers that have left.", totals.leaves),
        ("pccl_payload_bytes", "Payload of ops, summed over all senders.", totals.tx_bytes),
        ("pccl_state_bytes", "Shared state that peers have fetched.", totals.state_bytes),
        ("pccl_reconnects", "Connections between peers that broke and were re-established.", totals.reconnects),
    ):
        yield CounterMetricFamily(name, text, value=count)
    for name, text, value in (
        ("pccl_uptime_seconds", "Time since the master started.", status.uptime_s),
        ("pccl_view", "The number of the current view; it grows with every change.", status.view),
        ("pccl_term", "The master's term.", status.term),
        ("pccl_changing", "1 while the membership is changing.", int(status.is_changing)),
    ):
        yield GaugeMetricFamily(name, text, value=value)

    peers = GaugeMetricFamily("pccl_peers", "Peers by group and state.", labels=["group", "state"])
    states = Counter((member.group, member.state) for member in status.members)
    for group in sorted({member.group for member in status.members}):
        for state in STATES:
            peers.add_metric([str(group), state], states[group, state])
    yield peers
    waiting = GaugeMetricFamily("pccl_peers_waiting", "Peers waiting in a group call.", labels=["call"])
    calls = Counter(member.waiting.call for member in status.members if member.waiting is not None)
    for call in Kind.ALL:
        waiting.add_metric([call], calls[call])
    yield waiting
    figures = GaugeMetricFamily("pccl_figure", "What the peers' programs report.", labels=["peer", "name"])
    for member in status.members:
        for name, value in member.figures.items():
            figures.add_metric([str(member.peer), name], value)
    yield figures
    longest = max((member.waiting.for_s for member in status.members if member.waiting is not None), default=0.0)
    yield GaugeMetricFamily("pccl_longest_wait_seconds", "The longest current wait in a group call.", value=longest)
    stalled = sum(bool(member.stalled_ops) for member in status.members)
    yield GaugeMetricFamily("pccl_peers_stalled", "Peers that have waited in an op for a long time.", value=stalled)
    culprits = GaugeMetricFamily(
        "pccl_culprit", "1 for each peer that is silent, absent or a straggler.", labels=["kind", "peer"]
    )
    for found in status.findings:
        culprits.add_metric([found.kind, str(found.peer)], 1)
    yield culprits
    yield from _links(status)
    revision = GaugeMetricFamily("pccl_shared_state_revision", "Revision of the last sync.", labels=["group"])
    undecided = GaugeMetricFamily("pccl_ops_undecided", "Undecided ops that some peers completed.", labels=["group"])
    for group_status in status.groups:
        if group_status.revision is not None:
            revision.add_metric([str(group_status.group)], group_status.revision)
        undecided.add_metric([str(group_status.group)], group_status.undecided_ops)
    yield revision
    yield undecided


def _links(status: RunStatus) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    for name, text, value in LINK_GAUGES:
        family = GaugeMetricFamily(f"pccl_link_{name}", text, labels=["peer", "to"])
        for member in status.members:
            for link in member.traffic.links:
                family.add_metric([str(member.peer), str(link.peer)], value(link))
        yield family
