"""`pccl.otel`: spans and metrics of ops and group calls, against OpenTelemetry's SDK."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from pccl import Communicator, PCCLError, ReduceOp, Result
from pccl.otel import Exporter, export
from tests.support.cluster import Cluster, ones, reduce_once, until


class Collector:
    """What one peer exports."""

    def __init__(self, communicator: Communicator) -> None:
        self._spans = InMemorySpanExporter()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        self._reader = InMemoryMetricReader()
        meters = MeterProvider([self._reader])
        self.exporter: Exporter = export(communicator, tracer_provider=tracers, meter_provider=meters, interval=3600.0)

    def spans(self, name: str) -> list[Any]:
        return [span for span in self._spans.get_finished_spans() if span.name == name]

    def points(self, name: str) -> list[Any]:
        data = self._reader.get_metrics_data()
        assert data is not None
        return [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


def test_span_for_each_op(cluster: Cluster) -> None:
    began_ns = time.time_ns()
    cluster.join(2)
    collector = Collector(cluster[0])
    cluster.each(reduce_once)
    collector.exporter.flush()
    assert len(collector.spans("pccl all_reduce")) == 1
    cluster.each(reduce_once)
    collector.exporter.flush()
    collector.exporter.flush()
    spans = collector.spans("pccl all_reduce")
    assert [span.attributes["pccl.op.sequence"] for span in spans] == [0, 1]
    for span in spans:
        assert began_ns <= span.start_time < span.end_time <= time.time_ns()
        assert span.attributes["pccl.op.size"] == 32
        assert span.attributes["pccl.op.last_to_join"] == cluster[1].flight_recorder().peer
        assert span.status.status_code is StatusCode.UNSET
        times = [event.timestamp for event in span.events]
        assert {event.name for event in span.events} >= {"first byte sent", "all have joined", "done", "agreed"}
        assert all(span.start_time <= at <= span.end_time for at in times)
    (calls,) = collector.spans("pccl update_topology")[-1:]
    assert calls.start_time < calls.end_time
    collector.exporter.close()


def test_metrics_count_ops_and_bytes(cluster: Cluster) -> None:
    cluster.join(2)
    collector = Collector(cluster[0])
    for _ in range(3):
        cluster.each(reduce_once)
    collector.exporter.close()
    (ops,) = collector.points("pccl.ops")
    assert (ops.value, dict(ops.attributes)) == (3, {"pccl.op.kind": "all_reduce", "pccl.op.result": "SUCCESS"})
    moved = {point.attributes["network.io.direction"]: point.value for point in collector.points("pccl.op.bytes")}
    assert moved == {"transmit": 3 * 32, "receive": 3 * 32}
    (durations,) = collector.points("pccl.op.duration")
    assert durations.count == 3
    assert 0 < durations.sum < 60


def test_failed_op_is_an_error(cluster: Cluster) -> None:
    cluster.join(2)
    collector = Collector(cluster[0])
    with pytest.raises(PCCLError):
        cluster[0].all_reduce(ones(), op=ReduceOp.SUM, tag=9, timeout=0.2)
    collector.exporter.close()
    (span,) = collector.spans("pccl all_reduce")
    assert span.status.status_code is StatusCode.ERROR
    assert "gave up" in span.status.description


@pytest.mark.parametrize("interval", [0, -1, math.nan, math.inf, 10**400, "x", None, True])
def test_wrong_interval_is_refused(interval: Any) -> None:
    with pytest.raises(PCCLError, match="interval") as refused:
        export(Communicator("127.0.0.1:1"), interval=interval)
    assert refused.value.result is Result.INVALID_ARGUMENT


@pytest.mark.parametrize("communicator", [None, "x", Communicator])
def test_not_a_communicator_is_refused(communicator: Any) -> None:
    with pytest.raises(PCCLError, match="communicator") as refused:
        export(communicator)
    assert refused.value.result is Result.INVALID_ARGUMENT


def test_export_without_a_connection(cluster: Cluster) -> None:
    collector = Collector(cluster.new())
    collector.exporter.flush()
    collector.exporter.close()
    collector.exporter.close()
    assert collector.spans("pccl all_reduce") == []


class Moody(SpanProcessor):
    """A processor that does not take the first spans."""

    def __init__(self, refused: int) -> None:
        self.refused = refused
        self.taken: list[Any] = []

    def on_end(self, span: Any) -> None:
        if self.refused:
            self.refused -= 1
            raise RuntimeError("the collector is away")
        self.taken.append(span.attributes.get("pccl.op.sequence"))


def test_export_continues_after_a_provider_error(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.join(2)
    for _ in range(4):
        cluster.each(reduce_once)
    moody, reader, tracers = Moody(2), InMemoryMetricReader(), TracerProvider()
    tracers.add_span_processor(moody)
    exporter = export(cluster[0], tracer_provider=tracers, meter_provider=MeterProvider([reader]), interval=0.001)
    until(lambda: {2, 3} <= set(moody.taken), "the later ops are exported")
    exporter.close()
    assert [each for each in moody.taken if each is not None] == [2, 3]
    assert [record.message for record in caplog.records if "OpenTelemetry" in record.message] == [
        "an export to OpenTelemetry failed; pccl will retry: RuntimeError('the collector is away')"
    ]
