"""Draws a trace as Chrome trace events (JSON), for Perfetto and chrome://tracing.

Each peer is drawn as a process. Its rows show each tag's ops and their phases, the times when a thread had no op in
flight (compute), group calls, events and link counters. An arrow leads from the peer that launched an op last
to the op's end on the other peers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from pccl.flight_recorder import OpRecord, PeerTrace, Recording, Trace, gaps
from pccl.status import label, tag_named
from pccl.trace.clocks import Shift, shifts

TAGS_DRAWN = 64
"""The number of tags per peer that have their own row; other ops share rows."""
PAIR_BIT = 1 << 63
CALLS, EVENTS = 1, 2
"""Row numbers; the rows of ops and threads follow."""
FIRST_OP_ROW = 100
FIRST_COMPUTE_ROW = 10
RATES = {"tx_bytes": "sent", "rx_bytes": "received"}
GAUGES = {"round_trip_us": ("round trip, ms", 1e-3), "stuck_ms": ("stuck, ms", 1.0)}
"""Link counters that are drawn as values, with their names in the drawing and their factors."""
Event = dict[str, Any]
OpName = tuple[int, int, int, int]
"""The group, and the op's name in it."""


def draw(trace: Trace) -> Event:
    known = shifts(trace)
    absent = _absent_peers(trace)
    names = {peer.peer: label(peer.peer, peer.name) for peer in trace.peers}
    start_ns = min(_times(trace, known), default=0)
    events: list[Event] = []
    for peer in trace.peers:
        if peer.recording is None:
            events += _without_recording(peer)
        else:
            events += _Drawing(peer, peer.recording, known[peer.peer], names, start_ns, absent).events()
    events += _arrows(trace, known, start_ns)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": _about(trace, known)}


def encode(trace: Trace) -> bytes:
    return msgspec.json.encode(draw(trace))


def _about(trace: Trace, known: dict[int, Shift]) -> Event:
    peers = []
    for peer in trace.peers:
        about: Event = {"peer": peer.peer, "name": peer.name}
        if peer.recording is None:
            about["lack"] = peer.lack
        else:
            shift = known[peer.peer]
            about |= {
                "host": peer.recording.host,
                "ops": len(peer.recording.ops),
                "clock": shift.source,
                "clock_shift_ns": shift.shift_ns,
                "clock_uncertainty_ns": shift.uncertainty_ns,
                "taken": peer.recording.reason or "asked for",
            }
        peers.append(about)
    return {"run": trace.run, "lack": trace.lack, "peers": peers}


def _times(trace: Trace, known: dict[int, Shift]) -> Iterator[int]:
    for peer in trace.peers:
        recording = peer.recording
        if recording is None:
            continue
        shift_ns = known[peer.peer].shift_ns
        yield from (op.launched_ns + shift_ns for op in recording.ops[:1])
        yield from (event.at_ns + shift_ns for event in recording.events)
        yield from (sample.at_ns + shift_ns for sample in recording.links[:1])
        yield recording.taken_ns + shift_ns


def _absent_peers(trace: Trace) -> dict[OpName, list[int]]:
    """Return, for each unfinished collective, the peers whose recordings show that they have not launched it."""
    recordings = [peer.recording for peer in trace.peers if peer.recording is not None]
    rings: dict[OpName, list[int]] = {}
    launched: dict[OpName, set[int]] = defaultdict(set)
    for recording in recordings:
        known = dict(recording.rings)
        for op in recording.ops:
            name = recording.group, *op.name
            launched[name].add(recording.peer)
            if not op.done_ns and not op.tag & PAIR_BIT and op.epoch in known:
                rings[name] = known[op.epoch]
    recorded = {recording.peer for recording in recordings}
    return {name: [peer for peer in ring if peer in recorded - launched[name]] for name, ring in rings.items()}


def _without_recording(peer: PeerTrace) -> list[Event]:
    name = f"peer {label(peer.peer, peer.name)}: no recording: {peer.lack}"
    return [
        {"ph": "M", "pid": peer.peer, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": peer.peer, "name": "process_sort_index", "args": {"sort_index": peer.peer}},
    ]


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def _tag(tag: int) -> str:
    if not tag & PAIR_BIT:
        return tag_named(tag)
    sender, receiver, plain = tag >> 49 & 0x3FFF, tag >> 35 & 0x3FFF, tag & (1 << 35) - 1
    return f"rank {sender} to {receiver}, tag {plain}"


def _op_rows(recording: Recording) -> tuple[list[int], dict[int, str]]:
    """Return each op's row, and the rows' names. The most used tags have their own rows; other ops share rows."""
    uses = Counter(op.tag for op in recording.ops)
    drawn = sorted(tag for tag, _ in uses.most_common(TAGS_DRAWN))
    own = {tag: FIRST_OP_ROW + place for place, tag in enumerate(drawn)}
    names = {row: _tag(tag) for tag, row in own.items()}
    free_ns: list[int] = []  # the time from which each shared row is free
    rows = []
    for op in recording.ops:
        row = own.get(op.tag)
        if row is None:
            place = next((at for at, since_ns in enumerate(free_ns) if since_ns <= op.launched_ns), len(free_ns))
            free_ns[place:] = [op.over_ns or recording.taken_ns, *free_ns[place + 1 :]]
            row = FIRST_OP_ROW + TAGS_DRAWN + place
            names[row] = "other tags"
        rows.append(row)
    return rows, names


class _Drawing:
    def __init__(
        self,
        peer: PeerTrace,
        recording: Recording,
        shift: Shift,
        names: Mapping[int, str],
        start_ns: int,
        absent: Mapping[OpName, Sequence[int]],
    ) -> None:
        self._peer = peer
        self._recording = recording
        self._shift = shift
        self._names = names
        self._start_ns = start_ns
        self._absent = absent

    def _named(self, peer: int) -> str:
        """Return a peer's name, or its number if it is not in the trace; empty if the number is unknown, too."""
        return self._names.get(peer, str(peer)) if peer else ""

    def _at(self, at_ns: int) -> float:
        return (at_ns + self._shift.shift_ns - self._start_ns) / 1000

    def _event(self, phase: str, name: str, row: int, **more: Any) -> Event:
        return {"ph": phase, "name": name, "pid": self._peer.peer, "tid": row, **more}

    def _slice(self, name: str, kind: str, row: int, start_ns: int, end_ns: int, args: Event | None = None) -> Event:
        duration = max(0, end_ns - start_ns) / 1000
        return self._event("X", name, row, cat=kind, ts=self._at(start_ns), dur=duration, args=args or {})

    def _name(self, row: int, name: str) -> list[Event]:
        return [
            self._event("M", "thread_name", row, args={"name": name}),
            self._event("M", "thread_sort_index", row, args={"sort_index": row}),
        ]

    def events(self) -> Iterator[Event]:
        yield from self._process()
        yield from self._ops()
        yield from self._compute()
        yield from self._events()
        yield from self._links()

    def _process(self) -> Iterator[Event]:
        recording = self._recording
        name = f"peer {label(recording.peer, recording.name)}"
        clock = f"clock within {self._shift.uncertainty_ns / 1000:.4g} us" if self._shift.uncertainty_ns else ""
        labels = ", ".join(filter(None, [recording.host, f"group {recording.group}", clock]))
        yield self._event("M", "process_name", 0, args={"name": name})
        yield self._event("M", "process_labels", 0, args={"labels": labels})
        yield self._event("M", "process_sort_index", 0, args={"sort_index": recording.peer})

    def _ops(self) -> Iterator[Event]:
        rows, names = _op_rows(self._recording)
        for row, name in names.items():
            yield from self._name(row, name)
        for op, row in zip(self._recording.ops, rows, strict=True):
            yield from self._op(op, row)

    def _op(self, op: OpRecord, row: int) -> Iterator[Event]:
        end_ns = op.over_ns or self._recording.taken_ns
        name = f"{op.kind} {_size(op.size_bytes)}"
        if not op.result:
            name += " (in flight)"
        elif op.result != "SUCCESS":
            name += f": {op.result}"
        yield self._slice(name, "op", row, op.launched_ns, end_ns, self._details(op))
        at_ns = op.launched_ns
        for phase, until_ns in self._phases(op, end_ns):
            until_ns = min(max(at_ns, until_ns), end_ns)
            if until_ns > at_ns:
                yield self._slice(phase, "phase", row, at_ns, until_ns)
            at_ns = until_ns

    def _phases(self, op: OpRecord, end_ns: int) -> Iterator[tuple[str, int]]:
        absent = self._absent.get((self._recording.group, *op.name)) or ([op.awaited] if op.awaited else [])
        if absent and not op.done_ns:
            yield f"waits for peer {self._named(absent[0])}", end_ns
            return
        waits_for = f"waits for peer {self._named(op.joined_last)}" if op.joined_last else "waits for other peers"
        begun_ns = op.joined_ns or op.first_received_ns
        yield waits_for, begun_ns or (end_ns if not op.done_ns else op.launched_ns)
        yield "moves data", op.done_ns or end_ns
        yield "agrees", op.agreed_ns or end_ns

    def _details(self, op: OpRecord) -> Event:
        since = {
            "first_sent": op.first_sent_ns,
            "last_sent": op.last_sent_ns,
            "first_received": op.first_received_ns,
            "last_received": op.last_received_ns,
            "all_joined": op.joined_ns,
            "done": op.done_ns,
            "agreed": op.agreed_ns,
        }
        return {
            "epoch": op.epoch,
            "tag": op.callers_tag,
            "sequence": op.sequence,
            "algorithm": op.algorithm,
            "dtype": op.dtype,
            "rank": op.rank,
            "world_size": op.world_size,
            "result": op.result or "in flight",
            "reason": op.reason,
            "tx_bytes": op.tx_bytes,
            "rx_bytes": op.rx_bytes,
            "last_received_from": self._named(op.last_received_from),
            "last_to_join": self._named(op.joined_last),
            "awaited": self._named(op.awaited),
            **{f"{what}_us": (at_ns - op.launched_ns) / 1000 for what, at_ns in since.items() if at_ns},
        }

    def _compute(self) -> Iterator[Event]:
        rows: dict[int, int] = {}
        for gap in gaps(self._recording):
            row = rows.setdefault(gap.caller, FIRST_COMPUTE_ROW + len(rows))
            if row < FIRST_OP_ROW:
                args = {"before": f"{gap.before.kind}, {_tag(gap.before.tag)}, use {gap.before.sequence}"}
                yield self._slice("compute", "compute", row, gap.start_ns, gap.end_ns, args)
        for caller, row in rows.items():
            if row < FIRST_OP_ROW:
                yield from self._name(row, f"compute: {self._recording.callers[caller]}")

    def _events(self) -> Iterator[Event]:
        yield from self._name(CALLS, "calls")
        yield from self._name(EVENTS, "events")
        for event in self._recording.events:
            args = {"text": event.text, **event.about}
            if event.kind == "call":
                end_ns = event.at_ns + event.duration_ns
                yield self._slice(event.text, "call", CALLS, event.at_ns, end_ns, args)
            else:
                name = f"{event.kind}: {event.text}"
                yield self._event("i", name, EVENTS, cat=event.kind, ts=self._at(event.at_ns), s="t", args=args)

    def _links(self) -> Iterator[Event]:
        last: dict[tuple[int, int], Any] = {}
        for sample in self._recording.links:
            before = last.get((sample.link, sample.thread))
            last[sample.link, sample.thread] = sample
            if before is None or sample.at_ns <= before.at_ns:
                continue
            seconds = (sample.at_ns - before.at_ns) / 1e9
            grown = {name: value - before.counters.get(name, 0) for name, value in sample.counters.items()}
            row = f"link to peer {self._named(sample.peer) or '?'}" + (
                f", thread {sample.thread}" if sample.thread else ""
            )
            rates = {f"{word}, MB/s": grown.get(name, 0) / seconds / 1e6 for name, word in RATES.items()}
            yield self._event("C", row, 0, ts=self._at(sample.at_ns), args=rates)
            for name, (word, factor) in GAUGES.items():
                if sample.counters.get(name, 0) or before.counters.get(name, 0):
                    args = {word: sample.counters.get(name, 0) * factor}
                    yield self._event("C", f"{row}: {word}", 0, ts=self._at(sample.at_ns), args=args)
            if "resent" in grown and (grown["resent"] or before.counters.get("resent", 0)):
                yield self._event(
                    "C", f"{row}: resent", 0, ts=self._at(sample.at_ns), args={"segments": grown["resent"]}
                )


def _arrows(trace: Trace, known: dict[int, Shift], start_ns: int) -> Iterator[Event]:
    found: dict[tuple[int, int, int, int], list[tuple[int, OpRecord, int]]] = defaultdict(list)
    for each in trace.peers:
        recording = each.recording
        if recording is None:
            continue
        for op, row in zip(recording.ops, _op_rows(recording)[0], strict=True):
            if op.epoch:
                found[recording.group, *op.name].append((each.peer, op, row))
    number = 0
    for ops in found.values():
        last, last_op, last_row = max(ops, key=lambda one: one[1].launched_ns + known[one[0]].shift_ns)
        for peer, op, row in ops:
            end_ns = op.agreed_ns or op.done_ns or op.over_ns
            if peer == last or not end_ns:
                continue
            number += 1
            common = {"cat": "op", "name": "last to launch", "id": number}
            start = (last_op.launched_ns + known[last].shift_ns - start_ns) / 1000
            end = (end_ns + known[peer].shift_ns - start_ns) / 1000
            yield {"ph": "s", "pid": last, "tid": last_row, "ts": start, **common}
            yield {"ph": "f", "bp": "e", "pid": peer, "tid": row, "ts": end, **common}
