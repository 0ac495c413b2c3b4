"""A communicator's counters for Prometheus, using the official client library (the extra `metrics`).

import pccl.metrics
from prometheus_client import start_http_server

pccl.metrics.register(comm)
start_http_server(9100)
"""

from __future__ import annotations

from collections.abc import Iterator

from pccl.communicator import Communicator
from pccl.errors import PCCLError
from pccl.types import Attribute

try:
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError:
    raise ImportError(
        "pccl.metrics needs the Prometheus client library: pip install '.[metrics]' in a clone of pccl"
    ) from None

COUNTERS = {
    "tx_payload_bytes": "Payload sent to other peers.",
    "rx_payload_bytes": "Payload received from other peers.",
    "tx_wire_bytes": "Bytes sent to other peers, including frame headers.",
    "rx_wire_bytes": "Bytes received from other peers, including frame headers.",
}
"""The entries of `Communicator.stats` that never decrease, with their help texts. All others are gauges."""


class CommunicatorCollector(Collector):
    """Reports a communicator's `stats` and world sizes at each scrape while it is connected. Thread-safe."""

    def __init__(self, communicator: Communicator, **labels: str) -> None:
        self._communicator = communicator
        self._names = list(labels)
        self._values = list(labels.values())

    def collect(self) -> Iterator[Metric]:
        try:
            stats = self._communicator.stats
            world = {
                "world_size": self._communicator.get_attribute(Attribute.LOCAL_WORLD_SIZE),
                "global_world_size": self._communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE),
            }
        except PCCLError:
            return
        for name, value in {**stats, **world}.items():
            family = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
            text = COUNTERS.get(name, f"{name} of the communicator.")
            metric = family(f"pccl_peer_{name}", text, labels=self._names)
            metric.add_metric(self._values, value)
            yield metric

    def describe(self) -> list[Metric]:
        return []  # unknown before the communicator is connected


def register(
    communicator: Communicator, registry: CollectorRegistry = REGISTRY, **labels: str
) -> CommunicatorCollector:
    """Add a collector for `communicator` to a registry, and return it for `registry.unregister`. `labels` distinguish
    the communicators of one process. Raise ValueError if the registry already has these metrics.
    """
    collector = CommunicatorCollector(communicator, **labels)
    registry.register(collector)
    return collector
