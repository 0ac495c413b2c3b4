"""Recordings from a run's peers. `collect` fetches the flight recorders through a master; `load` reads files.

from pccl.flight_recorder import collect
for peer in collect("host:48148").peers:
    print(peer.name, peer.recording and len(peer.recording.ops))

`Communicator.flight_recorder()` returns one peer's recording, and `pccl trace` draws a trace for Perfetto.
"""

from __future__ import annotations

import os
import shutil
import ssl
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Real
from types import TracebackType
from typing import Any

from pccl.errors import integer_argument, invalid
from pccl.protocol.recording import SPAN_S_MAX, from_json, to_json, unpack
from pccl.protocol.recording import Gap as Gap
from pccl.protocol.recording import LinkSample as LinkSample
from pccl.protocol.recording import OpRecord as OpRecord
from pccl.protocol.recording import RecordedEvent as RecordedEvent
from pccl.protocol.recording import Recording as Recording
from pccl.protocol.recording import RecordingError as RecordingError
from pccl.protocol.recording import gaps as gaps
from pccl.protocol.recording import recent as recent
from pccl.runtime.network.clients import fetch_any
from pccl.status import ask_masters

LAST_MAX = 2**63 - 1


@dataclass(frozen=True)
class PeerTrace:
    """One peer in a trace."""

    peer: int
    name: str
    recording: Recording | None
    """None if the recording is missing; `lack` then gives the reason."""
    lack: str = ""
    offset_ns: int | None = None
    """The peer's monotonic clock minus the trace's clock; None if the offset was not measured."""
    uncertainty_ns: int = 0
    """The maximum error of the offset, in either direction."""


@dataclass(frozen=True)
class Trace:
    """The recordings from one run's peers."""

    run: str
    clock: str
    """The clock that the peers' offsets refer to; empty if no offset was measured."""
    peers: list[PeerTrace]
    lack: str = ""
    """Why peers may be missing from the list; empty if it is complete."""


def collect(
    address: str,
    *,
    seconds: float = 0.0,
    last: int = 0,
    token: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    timeout: float | None = 60.0,
) -> Trace:
    """Fetch all peers' flight recorders through a master, while the run continues. Thread-safe.

    For a peer that does not answer the master within five seconds, the trace has a reason instead of a recording.

    Args:
        address: The master's "host:port", or several separated by commas; the one that leads the run answers.
        seconds: How far back to look; 0 fetches everything that is recorded.
        last: The number of recent ops to fetch from each peer, besides unfinished ones; 0 fetches all.
        token: The run's shared secret, as for a peer. Default: PCCL_TOKEN in the environment.
        ssl_context: A TLS context, as for a peer, with the same defaults from the environment.
        timeout: Seconds; None means no limit. Recordings that have arrived by then, if any, are returned.

    Raises:
        PCCLError: INVALID_ARGUMENT; MASTER_CONNECTION_FAILED if no master answers, or the master refuses or leads no
            run; TIMEOUT; NOT_INITIALIZED if the interpreter exits.
    """
    last, seconds = integer_argument("last", last, "collect", 0, LAST_MAX), _checked_span(seconds, "collect")
    fetched = ask_masters("collect", address, token, ssl_context, timeout, fetch_any, seconds, last)
    peers = []
    for peer, packed in fetched.peers:
        recording, lack = None, peer.lack
        if not lack:
            try:
                recording = unpack(packed)
            except RecordingError as error:
                lack = str(error)
        peers.append(PeerTrace(peer.peer, peer.name, recording, lack, peer.offset_ns, peer.uncertainty_ns))
    peers.sort(key=lambda each: each.peer)
    if fetched.end is None:
        return Trace("", "", peers, f"not all recordings arrived within {timeout:g} s")
    return Trace(fetched.end.run, fetched.end.clock, peers)


def _checked_span(seconds: Any, func_name: str) -> float:
    given: Any = seconds
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 <= given < float("inf"):
        what = f"seconds must be a finite number of at least 0, not {seconds!r}; 0 fetches everything that is recorded"
        raise invalid(func_name, what)
    return float(min(given, SPAN_S_MAX))


def _checked_path(path: Any, func_name: str) -> str | os.PathLike[str]:
    if isinstance(path, str | os.PathLike):
        return path
    raise invalid(func_name, f"{path!r} is not the path of a file")


def load(paths: Iterable[str | os.PathLike[str]]) -> Trace:
    """Read recordings, one per peer, from files in PCCL_TRACE_DIR or written by `save`. The trace has no clock offsets.

    Raises:
        PCCLError: INVALID_ARGUMENT if `paths` are not paths.
        OSError: A file cannot be read.
        RecordingError: A file is not a recording, or the files are from different runs.
    """
    if isinstance(paths, str | os.PathLike) or not isinstance(paths, Iterable):
        raise invalid("load", f"paths must be a list of paths, not {paths!r}")
    paths = [_checked_path(path, "load") for path in paths]
    peers: dict[int, PeerTrace] = {}
    runs: dict[str, str] = {}
    for path in paths:
        with open(path, "rb") as file:
            text = file.read()
        try:
            recording = from_json(text)
        except RecordingError as error:
            raise RecordingError(f"{os.fspath(path)}: {error}") from None
        runs[recording.run] = os.fspath(path)
        known = peers.get(recording.peer)
        if known is None or known.recording is None or known.recording.taken_unix_ns < recording.taken_unix_ns:
            peers[recording.peer] = PeerTrace(recording.peer, recording.name, recording)
    if len(runs) > 1:
        raise RecordingError(f"these recordings are from different runs: {', '.join(map(' in '.join, runs.items()))}")
    return Trace(next(iter(runs), ""), "", [peers[peer] for peer in sorted(peers)])


def cut(trace: Trace, seconds: float = 0.0, last: int = 0) -> Trace:
    """Cut recordings to the last `seconds`, with at most `last` ops; 0 means no limit. Unfinished ops are kept."""
    if not isinstance(trace, Trace):
        raise invalid("cut", f"trace must be a Trace, not {trace!r}")
    seconds, last = _checked_span(seconds, "cut"), integer_argument("last", last, "cut", 0, LAST_MAX)
    peers = [
        peer if peer.recording is None else replace(peer, recording=recent(peer.recording, seconds, last))
        for peer in trace.peers
    ]
    return replace(trace, peers=peers)


def save(recording: Recording, path: str | os.PathLike[str]) -> None:
    """Write a recording to a file for `load` and `pccl trace --files`. If this fails, an existing file is unchanged."""
    if not isinstance(recording, Recording):
        raise invalid("save", f"recording must be a Recording, not {recording!r}")
    with Replacement(_checked_path(path, "save")) as file:
        file.write(to_json(recording))


class Replacement:
    """A context for a file that is replaced as a whole or not at all. OSErrors name the path.

    The new content goes to a temporary file in the same folder, created on construction. Pipes and devices are written
    to directly.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._target = os.path.realpath(path)
        self._temporary: str | None = None
        try:
            if os.path.exists(self._path) and not stat.S_ISREG(os.stat(self._path).st_mode):
                self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115 - closed by `__exit__`
                return
            if not os.path.basename(self._path):
                raise FileNotFoundError(2, os.strerror(2))
            temporary = os.path.join(os.path.dirname(self._target), f".pccl-{os.urandom(8).hex()}.part")
            self._file = open(temporary, "xb", buffering=0)  # noqa: SIM115
            self._temporary = temporary
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from None

    def __enter__(self) -> Replacement:
        return self

    def write(self, content: bytes) -> None:
        """Write the content and replace the file. Call it only once."""
        try:
            with self._file as file:
                rest = memoryview(content)
                while rest:
                    rest = rest[file.write(rest) :]
            if self._temporary is not None:
                with suppress(OSError):  # there was no file, or it belongs to another user
                    shutil.copymode(self._target, self._temporary)
                os.replace(self._temporary, self._target)
                self._temporary = None
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._file.close()
        if self._temporary is not None:
            with suppress(OSError):
                os.unlink(self._temporary)
