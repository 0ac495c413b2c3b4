"""A communicator's counters for Prometheus."""

from __future__ import annotations

import numpy as np
import pytest

from pccl import Communicator, ReduceOp
from tests.support.cluster import Cluster

prometheus_client = pytest.importorskip("prometheus_client")


def test_a_peers_counters(cluster: Cluster) -> None:
    from pccl import metrics

    registry = prometheus_client.CollectorRegistry()
    cluster.join(2)
    for i, peer in enumerate(cluster.peers):
        metrics.register(peer, registry, peer=str(i))
    cluster.each(lambda peer, i: peer.all_reduce(np.ones(10_000, np.float32), op=ReduceOp.SUM))
    for i in "01":
        sent = registry.get_sample_value("pccl_peer_tx_payload_bytes_total", {"peer": i})
        assert sent is not None
        assert sent >= 40_000
        assert registry.get_sample_value("pccl_peer_world_size", {"peer": i}) == 2
    text = prometheus_client.generate_latest(registry).decode()
    assert "# TYPE pccl_peer_rx_wire_bytes_total counter" in text
    assert "# TYPE pccl_peer_connections gauge" in text


def test_one_that_is_not_connected_says_nothing(cluster: Cluster) -> None:
    from pccl import metrics

    registry = prometheus_client.CollectorRegistry()
    peer = Communicator(cluster.address)
    collector = metrics.register(peer, registry)
    assert prometheus_client.generate_latest(registry) == b""
    registry.unregister(collector)
