"""Recordings: the schema of flight recorder contents, dumps and traces.

A recording is sent as compressed MessagePack (`pack`) and stored in files as JSON. Times are nanoseconds of the
monotonic clock that `clock` identifies; `pccl.trace` aligns different clocks. A time of 0 means that the event has not
happened. New fields are added at the end with defaults. Recordings are untrusted input.
"""

# No `from __future__ import annotations` here, as in `messages`.

import zlib
from collections.abc import Iterator

import msgspec

from pccl.protocol.completion import callers_tag

PACKED_BYTES_MAX = 8 * 2**20
UNPACKED_BYTES_MAX = 64 * 2**20
SPAN_S_MAX = 1e9
"""About thirty years, effectively unlimited."""
COMPRESSION = 1


class RecordingError(ValueError):
    """The input is not a valid recording."""


class OpRecord(msgspec.Struct, frozen=True, array_like=True):
    epoch: int
    tag: int
    sequence: int
    """With epoch and tag, the op's name on all peers: see `messages.OpRef`. The tag of a send and its recv also
    contains both ranks; `callers_tag` returns the caller's own tag."""
    kind: str
    """The collective: "all_reduce", "broadcast" ...; "send" or "recv", whichever this peer called; "queued" if the op
    has not started and so has no epoch yet."""
    algorithm: str
    dtype: str
    size_bytes: int
    rank: int
    world_size: int
    caller: int
    launched_ns: int
    first_sent_ns: int = 0
    last_sent_ns: int = 0
    first_received_ns: int = 0
    """When the first segment arrived; `last_received_ns` is the latest arrival."""
    last_received_ns: int = 0
    last_received_from: int = 0
    joined_ns: int = 0
    """When this peer learned that all peers that send to it or receive from it had launched the op; 0 until then."""
    joined_last: int = 0
    done_ns: int = 0
    agreed_ns: int = 0
    """When this peer learned that all peers were done; always 0 if the master decides the op."""
    ended_ns: int = 0
    """When the verdict had been applied and the caller had received the result."""
    tx_bytes: int = 0
    """Payload bytes, known once the op has ended."""
    rx_bytes: int = 0
    result: str = ""
    """"" while the op is open, then "SUCCESS", "ABORTED", or the name of a failing `Result`."""
    reason: str = ""
    awaited: int = 0
    """A peer that is not known to have launched the op; 0 if there is none."""

    @property
    def name(self) -> tuple[int, int, int]:
        return self.epoch, self.tag, self.sequence

    @property
    def callers_tag(self) -> int:
        return callers_tag(self.tag)

    @property
    def over_ns(self) -> int:
        """When the op's caller could continue; 0 while it waits."""
        return self.ended_ns if self.result else 0


class LinkSample(msgspec.Struct, frozen=True, array_like=True):
    at_ns: int
    peer: int
    link: int
    thread: int
    counters: dict[str, int]
    """The link's counters: payload bytes in both directions (`tx_bytes`, `rx_bytes`), the time during which the link
    delayed its ops (`full_ms`), and further counters of the system."""


class RecordedEvent(msgspec.Struct, frozen=True, array_like=True):
    at_ns: int
    kind: str
    text: str
    duration_ns: int = 0
    about: dict[str, int] = {}


class Recording(msgspec.Struct, frozen=True):
    run: str
    peer: int
    group: int
    name: str
    host: str
    process: int
    clock: str
    """Identifies the clock of all times: equal for recordings with the same clock."""
    taken_ns: int
    """When this recording was taken, on that clock. `taken_unix_ns` is the same time on the host's system clock."""
    taken_unix_ns: int
    rings: list[tuple[int, list[int]]] = []
    callers: list[str] = []
    ops: list[OpRecord] = []
    links: list[LinkSample] = []
    events: list[RecordedEvent] = []
    reason: str = ""
    format: int = 1


class Gap(msgspec.Struct, frozen=True):
    caller: int
    start_ns: int
    end_ns: int
    before: OpRecord


def gaps(recording: Recording) -> Iterator[Gap]:
    free_ns: dict[int, int] = {}
    for op in recording.ops:
        since_ns = free_ns.get(op.caller, 0)
        if 0 < since_ns < op.launched_ns:
            yield Gap(op.caller, since_ns, op.launched_ns, op)
        over_ns = op.over_ns or recording.taken_ns
        free_ns[op.caller] = max(since_ns, over_ns)


def recent(recording: Recording, seconds: float = 0.0, last: int = 0) -> Recording:
    """Return a recording reduced to the last `seconds` and the `last` newest ops; 0 means no limit. Unfinished ops are
    always included."""
    since_ns = recording.taken_ns - int(min(seconds, SPAN_S_MAX) * 1e9) if seconds else 0
    ops = [op for op in recording.ops if not op.over_ns or op.over_ns >= since_ns]
    if last:
        former, ops = ops[:-last], ops[-last:]
        if not seconds:
            since_ns = min((op.launched_ns for op in ops), default=0)
        ops = [op for op in former if not op.over_ns] + ops
    return msgspec.structs.replace(
        recording,
        ops=ops,
        links=[sample for sample in recording.links if sample.at_ns >= since_ns],
        events=[event for event in recording.events if event.at_ns + event.duration_ns >= since_ns],
    )


def encodable(text: str) -> str:
    """Escape the characters that UTF-8 cannot encode, such as undecodable bytes of file names. All text in a recording
    must pass through here."""
    return text.encode(errors="backslashreplace").decode()


def pack(recording: Recording) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(recording), COMPRESSION)


def unpack(data: bytes) -> Recording:
    try:
        expander = zlib.decompressobj()
        plain = expander.decompress(data, UNPACKED_BYTES_MAX)
        if not expander.eof:
            raise RecordingError("it is truncated or too large")
        return _checked(msgspec.msgpack.decode(plain, type=Recording))
    except (zlib.error, msgspec.MsgspecError, RecursionError) as error:
        raise RecordingError(f"not a recording: {error}") from None


def to_json(recording: Recording) -> bytes:
    return msgspec.json.encode(recording)


def from_json(text: bytes) -> Recording:
    try:
        return _checked(msgspec.json.decode(text, type=Recording))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RecordingError(f"not a recording: {error}") from None


def _checked(recording: Recording) -> Recording:
    if not all(0 <= op.caller < len(recording.callers) for op in recording.ops):
        raise RecordingError("not a recording: an op names a thread that the recording does not have")
    return recording
