"""The drawing of a trace: what Perfetto gets to see."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import msgspec

from pccl.flight_recorder import LinkSample, OpRecord, PeerTrace, RecordedEvent, Recording, Trace
from pccl.trace.timeline import TAGS_DRAWN, encode

US = 1_000
S = 10**9


def op(
    peer: int, tag: int, launched_us: int, over_us: int = 0, joined_us: int = 0, last: int = 0, sequence: int = 0
) -> OpRecord:
    return OpRecord(
        *(3, tag, sequence, "all_reduce", "direct", "float", 4096, peer - 1, 2, 0),
        launched_ns=launched_us * US,
        joined_ns=joined_us * US,
        joined_last=last,
        done_ns=max(0, over_us - 10) * US,
        agreed_ns=over_us * US,
        ended_ns=over_us * US,
        result="SUCCESS" if over_us else "",
    )


def recording(peer: int, ops: list[OpRecord], **more: Any) -> Recording:
    about = ("run", peer, 0, f"name {peer}", "host", peer, "clock")
    return Recording(*about, taken_ns=5_000 * US, taken_unix_ns=S, callers=["MainThread"], ops=ops, **more)


def drawn(*peers: PeerTrace) -> Any:
    return json.loads(encode(Trace("run", "clock", list(peers))))


def of(peer: Recording) -> PeerTrace:
    return PeerTrace(peer.peer, peer.name, peer, "", 0, 1)


def well_nested(events: list[Any]) -> bool:
    """Whether the slices of each lane are within each other or apart, as a trace viewer needs them."""
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for slices in lanes.values():
        open_until: list[float] = []
        for start, negative in sorted(slices):
            end = start - negative
            while open_until and open_until[-1] <= start:
                open_until.pop()
            if open_until and end > open_until[-1] + 1e-6:
                return False
            open_until.append(end)
    return True


def test_two_peers_and_an_arrow_from_the_late_one() -> None:
    first = recording(1, [op(1, 7, 100, 900, joined_us=700, last=2), op(1, 7, 1_000, sequence=1)])
    second = recording(2, [op(2, 7, 650, 910, joined_us=650, last=1)])
    trace = drawn(of(first), of(second))
    events = trace["traceEvents"]
    assert well_nested(events)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "peer 1 (name 1)", 2: "peer 2 (name 2)"}
    slices = [(event["pid"], event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert (1, "all_reduce 4 KiB", 0, 800) in slices
    assert (1, "waits for peer 2 (name 2)", 0, 600) in slices
    assert {event["args"]["last_to_join"] for event in events if event.get("cat") == "op" and event["ph"] == "X"} == {
        "2 (name 2)",
        "1 (name 1)",
        "",
    }
    assert (1, "moves data", 600, 190) in slices
    assert (1, "agrees", 790, 10) in slices
    assert (1, "all_reduce 4 KiB (in flight)", 900, 4_000) in slices
    assert (1, "compute", 800, 100) in slices
    start, end = (next(event for event in events if event["ph"] == phase) for phase in "sf")
    assert (start["pid"], start["ts"], end["pid"], end["ts"]) == (2, 550, 1, 800)
    assert start["id"] == end["id"]
    lanes = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in (start, end)} <= lanes


def phases(events: Any, peer: int) -> list[str]:
    return [each["name"] for each in events["traceEvents"] if each["pid"] == peer and each.get("cat") == "phase"]


def test_wait_phase_names_missing_peer() -> None:
    """It has heard of another one meanwhile, and has got data of that one."""
    waiting = msgspec.structs.replace(op(1, 7, 100, joined_us=0), first_received_ns=200 * US, awaited=2)
    assert phases(drawn(of(recording(1, [waiting]))), 1) == ["waits for peer 2"]


def test_absent_peer_from_recordings() -> None:
    """In a ring a peer hears of its neighbours only."""
    rings = [(3, [1, 2, 3, 4])]
    ops = {peer: [msgspec.structs.replace(op(peer, 7, 100, joined_us=150), world_size=4)] for peer in (1, 2, 4)}
    events = drawn(*(of(recording(peer, ops.get(peer, []), rings=rings)) for peer in (1, 2, 3, 4)))
    assert [phases(events, peer) for peer in (1, 2, 4)] == [["waits for peer 3 (name 3)"]] * 3


def test_data_phase() -> None:
    rings = [(3, [1, 2])]
    events = drawn(*(of(recording(peer, [op(peer, 7, 100, joined_us=150, last=1)], rings=rings)) for peer in (1, 2)))
    assert phases(events, 2) == ["waits for peer 1 (name 1)", "moves data"]


def test_a_peer_without_a_recording_is_named() -> None:
    trace = drawn(of(recording(1, [op(1, 7, 100, 900)])), PeerTrace(2, "name 2", None, "it did not answer within 5 s"))
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == ["peer 1 (name 1)", "peer 2 (name 2): no recording: it did not answer within 5 s"]
    assert trace["otherData"]["peers"][1] == {"peer": 2, "name": "name 2", "lack": "it did not answer within 5 s"}


def test_links_events_and_calls() -> None:
    links = [
        LinkSample(1 * S, 2, 5, 0, {"tx_bytes": 0, "rx_bytes": 0, "resent": 0}),
        LinkSample(3 * S, 2, 5, 0, {"tx_bytes": 4_000_000, "rx_bytes": 2_000_000, "resent": 7, "round_trip_us": 1_500}),
    ]
    happened = [
        RecordedEvent(1 * S, "call", "update_topology", 2 * S),
        RecordedEvent(1 * S, "view", "view 2: ring [1, 2]", about={"view": 2}),
    ]
    events = drawn(of(recording(1, [], links=links, events=happened)), of(recording(2, [])))["traceEvents"]
    counters = {event["name"]: event["args"] for event in events if event["ph"] == "C"}
    lane = "link to peer 2 (name 2)"
    assert counters[lane] == {"sent, MB/s": 2.0, "received, MB/s": 1.0}
    assert counters[f"{lane}: resent"] == {"segments": 7}
    assert counters[f"{lane}: round trip, ms"] == {"round trip, ms": 1.5}
    assert [(event["name"], event["dur"]) for event in events if event["ph"] == "X"] == [("update_topology", 2e6)]
    assert [event["name"] for event in events if event["ph"] == "i"] == ["view: view 2: ring [1, 2]"]


def test_many_tags_share_rows() -> None:
    ops = [op(1, tag, 10 * tag, 10 * tag + 35) for tag in range(TAGS_DRAWN + 50)]
    events = drawn(of(recording(1, ops)))["traceEvents"]
    assert well_nested(events)
    assert len({event["tid"] for event in events if event.get("cat") == "op"}) <= TAGS_DRAWN + 4


def test_tags_of_sends_show_ranks() -> None:
    tag = 1 << 63 | 2 << 49 | 1 << 35 | 17
    events = drawn(of(recording(1, [op(1, tag, 100, 200)])))["traceEvents"]
    assert "rank 2 to 1, tag 17" in [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert [event["args"]["tag"] for event in events if event.get("cat") == "op"] == [17]


def test_an_arrow_leads_from_a_send_to_its_recv() -> None:
    tag = 1 << 63 | 0 << 49 | 1 << 35 | 17
    sends = msgspec.structs.replace(op(1, tag, 150, 200), kind="send")
    receives = msgspec.structs.replace(op(2, tag, 100, 200), kind="recv")
    events = drawn(of(recording(1, [sends])), of(recording(2, [receives])))["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "op" and event["ph"] == "X"] == [
        "send 4 KiB",
        "recv 4 KiB",
    ]
    assert [(event["ph"], event["pid"]) for event in events if event["ph"] in "sf"] == [("s", 1), ("f", 2)]


def test_an_empty_trace_can_be_drawn() -> None:
    assert drawn()["traceEvents"] == []
