"""Exports a communicator's ops and group calls to OpenTelemetry as spans and metrics (needs the extra `otel`).

import pccl.otel

exporter = pccl.otel.export(comm)
...
exporter.close()

A thread reads the flight recorder every few seconds, so the export never delays ops. An op is not exported if the
recorder, which holds 4096 ops, has dropped it by then, or if a provider raises.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from numbers import Real
from typing import Any

from pccl.communicator import Communicator, CommunicatorBase
from pccl.errors import PCCLError, invalid
from pccl.protocol.recording import OpRecord, RecordedEvent, Recording

try:
    from opentelemetry import metrics, trace
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider
except ImportError:
    raise ImportError("pccl.otel needs OpenTelemetry: pip install '.[otel]' in a clone of pccl") from None

logger = logging.getLogger("pccl")

OVERLAP_NS = 2 * 10**9
"""The overlap of two readings, since engine threads record the end of an op slightly late."""
INTERVAL_S_MAX = 1e9
MILESTONES = {
    "first byte sent": "first_sent_ns",
    "first byte received": "first_received_ns",
    "all have joined": "joined_ns",
    "done": "done_ns",
    "agreed": "agreed_ns",
}


class Exporter:
    """Exports a communicator's ops and group calls every `interval` seconds, until `close`.

    The default providers are those that the program has set. Close the exporter before the communicator."""

    def __init__(
        self,
        communicator: Communicator,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        interval: float = 5.0,
    ) -> None:
        """Start exporting. Raise INVALID_ARGUMENT if an argument is invalid."""
        given: Any = communicator
        seconds: Any = interval
        if not isinstance(given, CommunicatorBase):
            raise invalid("export", f"communicator must be a Communicator, not {communicator!r}")
        if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 < interval <= INTERVAL_S_MAX:
            raise invalid("export", f"interval must be in (0, {INTERVAL_S_MAX:g}] seconds, not {interval!r}")
        self._communicator = communicator
        self._interval_s = float(interval)
        self._tracer = trace.get_tracer("pccl", tracer_provider=tracer_provider)
        meter = metrics.get_meter("pccl", meter_provider=meter_provider)
        self._ops = meter.create_counter("pccl.ops", "{op}", "Ops that have ended.")
        self._bytes = meter.create_counter("pccl.op.bytes", "By", "Payload of ops that have ended.")
        self._seconds = meter.create_histogram("pccl.op.duration", "s", "Time from an op's launch to its end.")
        self._calls = meter.create_histogram("pccl.call.duration", "s", "Duration of group calls.")
        self._seen: set[Any] = set()
        """Ops and calls that were exported but that the next reading may contain again."""
        self._since_ns = 0
        self._reading = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pccl-otel", daemon=True)
        self._thread.start()

    def flush(self) -> None:
        """Export finished ops and calls if the communicator is connected. Exceptions from the providers propagate."""
        with self._reading:
            try:
                recording = self._communicator.flight_recorder(self._since_ns)
            except PCCLError:
                return
            self._export(recording)

    def close(self) -> None:
        """Export the rest and stop. Call it before the communicator is closed; further calls have no effect."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self.flush()

    def _run(self) -> None:
        is_refused = False
        while not self._closed.wait(self._interval_s):
            try:
                self.flush()
                is_refused = False
            except Exception as error:  # raised by a provider
                if not is_refused:
                    logger.warning("an export to OpenTelemetry failed; pccl will retry: %r", error)
                is_refused = True

    def _export(self, recording: Recording) -> None:
        common = {
            "pccl.run": recording.run,
            "pccl.peer": recording.peer,
            "pccl.peer.name": recording.name,
            "pccl.group": recording.group,
        }
        unix_ns = recording.taken_unix_ns - recording.taken_ns
        ops = {op.name: op for op in recording.ops if op.over_ns > self._since_ns}
        calls = {
            (event.at_ns, event.text): event
            for event in recording.events
            if event.kind == "call" and event.at_ns + event.duration_ns > self._since_ns
        }
        self._seen &= ops.keys() | calls.keys()
        self._export_ops([op for name, op in ops.items() if name not in self._seen], common, unix_ns)
        self._export_calls([call for name, call in calls.items() if name not in self._seen], common, unix_ns)
        self._since_ns = max(self._since_ns, recording.taken_ns - OVERLAP_NS)

    def _export_ops(self, ops: Iterable[OpRecord], common: dict[str, Any], unix_ns: int) -> None:
        for op in ops:
            self._seen.add(op.name)
            kind = {"pccl.op.kind": op.kind}
            self._ops.add(1, {**kind, "pccl.op.result": op.result})
            self._bytes.add(op.tx_bytes, {**kind, "network.io.direction": "transmit"})
            self._bytes.add(op.rx_bytes, {**kind, "network.io.direction": "receive"})
            self._seconds.record((op.over_ns - op.launched_ns) / 1e9, kind)
            about = {
                **common,
                **kind,
                "pccl.op.epoch": op.epoch,
                "pccl.op.tag": op.callers_tag,
                "pccl.op.sequence": op.sequence,
                "pccl.op.size": op.size_bytes,
                "pccl.op.algorithm": op.algorithm,
                "pccl.op.world_size": op.world_size,
                "pccl.op.last_to_join": op.joined_last,
                "pccl.op.tx_bytes": op.tx_bytes,
                "pccl.op.rx_bytes": op.rx_bytes,
            }
            span = self._tracer.start_span(
                f"pccl {op.kind}", kind=SpanKind.CLIENT, attributes=about, start_time=op.launched_ns + unix_ns
            )
            for name, field in MILESTONES.items():
                at_ns: int = getattr(op, field)
                if at_ns:
                    span.add_event(name, timestamp=at_ns + unix_ns)
            if op.result != "SUCCESS":
                span.set_status(Status(StatusCode.ERROR, op.reason or op.result))
            span.end(end_time=op.over_ns + unix_ns)

    def _export_calls(self, calls: Iterable[RecordedEvent], common: dict[str, Any], unix_ns: int) -> None:
        for call in calls:
            self._seen.add((call.at_ns, call.text))
            name, _, failure = call.text.partition(": ")
            self._calls.record(call.duration_ns / 1e9, {"pccl.call": name})
            start_ns = call.at_ns + unix_ns
            span = self._tracer.start_span(
                f"pccl {name}", kind=SpanKind.CLIENT, attributes={**common, "pccl.call": name}, start_time=start_ns
            )
            if failure:
                span.set_status(Status(StatusCode.ERROR, failure))
            span.end(end_time=start_ns + call.duration_ns)


export = Exporter
