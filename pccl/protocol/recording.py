"""A recording: the content of one peer's flight recorder. The schema of dumps and traces.

A recording travels as compressed MessagePack (`pack`), and is JSON in files. Times are nanoseconds of the monotonic
clock that `clock` names; `pccl.trace` aligns different clocks. 0 means not happened. New fields are added at the end
with defaults. Recordings are untrusted input.
"""

# Annotations are not put off here, as in `messages`.

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
    """Not a recording."""


class OpRecord(msgspec.Struct, frozen=True, array_like=True):
    epoch: int
    tag: int
    sequence: int
    """The op's name among all peers: see `messages.OpRef`. The tag of a send and its recv names the two as well:
    `callers_tag` is the one that was given."""
    kind: str
    """The collective: "all_reduce", "broadcast" ...; "send" or "recv", as this peer has called it; "queued": the op
    waits for its start, and has no epoch yet."""
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
    """A segment of it has come; so `last_received_ns`."""
    last_received_ns: int = 0
    last_received_from: int = 0
    joined_ns: int = 0
    """The last of the peers that send to this one, or get from it, was known to have launched it; 0: not all of them
    are."""
    joined_last: int = 0
    done_ns: int = 0
    agreed_ns: int = 0
    """All peers were known to be done. 0 also where the master decides."""
    ended_ns: int = 0
    """The verdict was carried out, and the caller has the result."""
    tx_bytes: int = 0
    """Payload; known once the op has ended."""
    rx_bytes: int = 0
    result: str = ""
    """"" while it is open, "SUCCESS", "ABORTED", or the name of a failing `Result`."""
    reason: str = ""
    awaited: int = 0
    """A peer that may not have launched it, as far as is known here; 0: there is none, or it is not known."""

    @property
    def name(self) -> tuple[int, int, int]:
        return self.epoch, self.tag, self.sequence

    @property
    def callers_tag(self) -> int:
        return callers_tag(self.tag)

    @property
    def over_ns(self) -> int:
        """When its caller could go on; 0: it waits still."""
        return self.ended_ns if self.result else 0


class LinkSample(msgspec.Struct, frozen=True, array_like=True):
    at_ns: int
    peer: int
    link: int
    thread: int
    counters: dict[str, int]
    """What there is to count: payload bytes in both directions (`tx_bytes`, `rx_bytes`), how long the link held up its
    ops (`full_ms`), and more where the system tells."""


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
    """The clock of all times: equal where it is the same one."""
    taken_ns: int
    """When this was taken, by that clock and by the host's calendar."""
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
    """Return the part of the last `seconds`, and of the last ops; 0: all of it. Ops that have not ended are in it,
    however old."""
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
    """Return the text with escapes for what UTF-8 cannot encode: the odd bytes of file names, in text from the system.
    All text of a recording has to pass through here."""
    return text.encode(errors="backslashreplace").decode()


def pack(recording: Recording) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(recording), COMPRESSION)


def unpack(data: bytes) -> Recording:
    try:
        expander = zlib.decompressobj()
        plain = expander.decompress(data, UNPACKED_BYTES_MAX)
        if not expander.eof:
            raise RecordingError("it is cut off, or too large")
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
        raise RecordingError("not a recording: an op names a thread that it does not have")
    return recording
