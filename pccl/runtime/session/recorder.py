"""Records a session's most recent ops, links and calls (the flight recorder), and supplies dumps and traces.

The engine records ops (native/src/recorder.h), because ops on the fast path never reach the session. The session
records everything else, including the launch and the end of ops that went through the machine. The recorder observes
effects and events alongside their handlers (`noting`). Each kind is kept in a ring buffer of a fixed size. `recording`
joins the two by op name; it runs in a separate thread and copies each buffer in one step.

With PCCL_TRACE_DIR in the environment, a session also writes its recording to one file there when an op fails, when one
has been in flight for PCCL_TRACE_HANG seconds, and when the session ends with a failure. The newest FILES_KEPT files of
each host are kept.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import trio

from pccl.protocol import messages as m
from pccl.protocol.names import peer_named
from pccl.protocol.peer import effects as ps
from pccl.protocol.peer.machine import Peer
from pccl.protocol.recording import LinkSample, OpRecord, RecordedEvent, Recording, encodable, pack, recent, to_json
from pccl.runtime.data_plane import events
from pccl.runtime.data_plane.engine import RECORDS
from pccl.runtime.data_plane.op_records import Launch, Name, Row, joined, name_of
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.session.driver import Handler, Handlers, Part, SessionOptions, Shared
from pccl.runtime.threads.process import clock_name, number_of
from pccl.runtime.threads.tasks import HelperThread
from pccl.types import Result

EVENTS_KEPT = min(1024, RECORDS)
"""Number of events kept. The same number of group calls is kept separately, because a loop may make many."""
SAMPLES_KEPT = min(4096, RECORDS)
"""Number of link samples kept."""
RINGS_KEPT = 256
"""Number of epochs whose rings are kept."""
LINKS_KEPT = 256
"""Number of closed links whose peers are remembered, because their final counters may arrive later."""
TEXT_CHARACTERS_MAX = 500


class FlightRecorder:
    """Records this peer's actions. `recording` and `note` are for any thread, all else is for the trio thread."""

    def __init__(
        self,
        options: SessionOptions,
        facts: Peer,
        table: dict[int, PendingOp],
        read_records: Callable[[int], list[Row]],
    ) -> None:
        """`read_records` returns the engine's records of ops in flight or ended after a time."""
        self.on_failure: Callable[[str], None] = lambda _: None
        """Called after the failure of an op, with a text that names the op."""
        self._options = options
        self._facts = facts
        self.table = table
        self._read_records = read_records
        self._names: dict[int, Name] = {}
        """The names of the session's ops that are in flight."""
        self._ended: deque[tuple[Name, Launch]] = deque(maxlen=max(1, RECORDS))
        self._events: deque[RecordedEvent] = deque(maxlen=EVENTS_KEPT)
        self._calls: deque[RecordedEvent] = deque(maxlen=EVENTS_KEPT)
        self._samples: deque[tuple[int, int, events.LinkCounters]] = deque(maxlen=SAMPLES_KEPT)
        self._peers: dict[int, int] = {}
        """The peer at the other end of each link."""
        self._closed: deque[int] = deque()
        """The most recently closed links."""
        self._rings: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._listeners: Handlers = {
            ps.SubmitOp: self._submitted,
            ps.OpResult: self._op_over,
            ps.Installed: self._installed,
            ps.KeepHeartbeats: lambda _, effect: self.note(
                "master", f"a master leads in term {facts.term}", term=facts.term
            ),
            ps.SeekMaster: lambda _, effect: self.note("master", f"lost the master: {effect.reason}"),
            ps.MakeLink: self._making_link,
            ps.CloseLink: self._closing_link,
            ps.PeerLog: lambda _, effect: self.note("log", effect.text, **effect.about),
            ps.Ended: lambda _, effect: self.note("master", f"the session is over: {effect.reason}"),
            events.OpHandedOver: self._handed_over,
            events.LinkDown: lambda _, event: self._note_link(event.link, f"the link was lost: {event.reason}"),
            events.LinkDegraded: lambda _, event: self._note_link(event.link, f"a connection was lost: {event.reason}"),
            events.LinkCounters: self._counted,
        }

    def noting(self, handlers: Handlers) -> dict[type, tuple[Handler, ...]]:
        """Return the handlers of effects or events, each with the recorder's function for the same kind."""
        found: dict[type, tuple[Handler, ...]] = {}
        for kind, handler in handlers.items():
            listener = self._listeners.get(kind)
            found[kind] = (handler,) if listener is None else (listener, handler)
        if events.OpHandedOver in found:
            found[events.OpHandedOver] = found[events.OpHandedOver][::-1]  # its handler puts the op into the table
        return found

    def note(self, kind: str, text: str, duration_ns: int = 0, **about: int) -> None:
        """Record an event that ends now."""
        at_ns = time.monotonic_ns() - duration_ns
        events = self._calls if kind == "call" else self._events
        events.append(RecordedEvent(at_ns, kind, encodable(text[:TEXT_CHARACTERS_MAX]), duration_ns, about))

    @contextmanager
    def call(self, kind: str) -> Iterator[None]:
        """Record a group call made within this context."""
        began_ns = time.monotonic_ns()
        failure = ""
        try:
            yield
        except BaseException as error:
            failure = f": {str(error) or type(error).__name__}"
            raise
        finally:
            self.note("call", f"{kind}{failure}", time.monotonic_ns() - began_ns)

    # Observed effects and events.

    def _submitted(self, _: Any, effect: ps.SubmitOp) -> None:
        self._names[effect.op] = effect.epoch, effect.tag, effect.sequence

    def _handed_over(self, _: Any, event: events.OpHandedOver) -> None:
        op = self.table.get(event.op)
        if op is not None and op.epoch is not None:
            self._names[event.op] = op.epoch, op.shared_tag, event.sequence

    def _op_over(self, _: Any, effect: ps.OpResult) -> None:
        op = self.table[effect.op]
        name = self._names.pop(effect.op, None)
        if name is not None:
            reason = encodable(effect.reason[:TEXT_CHARACTERS_MAX]) if effect.reason else ""
            launch = Launch(op.launched_ns, op.caller, time.monotonic_ns(), effect.code.name, reason)
            self._ended.append((name, launch))
        if effect.code is not Result.SUCCESS:
            text = f"op with tag {op.tag} failed: {effect.code.name}: {effect.reason}"
            self.note("op", text)
            self.on_failure(text)

    def _installed(self, _: Any, effect: ps.Installed) -> None:
        view = effect.view
        self._rings[view.epoch] = view.ring
        while len(self._rings) > RINGS_KEPT:
            self._rings.popitem(last=False)
        for peer, reason in effect.lost:
            self.note("view", f"{self._named(peer)} was lost: {reason}", other=peer)
        self.note("view", f"view {view.view}: ring {list(view.ring)}", view=view.view, epoch=view.epoch)

    def _making_link(self, _: Any, effect: ps.MakeLink) -> None:
        self._peers[effect.link] = effect.member.peer
        self._note_link(effect.link, "a link is being made")

    def _closing_link(self, _: Any, effect: ps.CloseLink) -> None:
        self._note_link(effect.link, "the link is closed")
        self._closed.append(effect.link)
        if len(self._closed) > LINKS_KEPT:
            self._peers.pop(self._closed.popleft(), None)

    def _note_link(self, link: int, text: str) -> None:
        peer = self._peers.get(link, 0)
        self.note("link", f"{self._named(peer)}: {text}", other=peer, link=link)

    def _named(self, peer: int) -> str:
        return peer_named(peer, self._facts.name_of(peer))

    def _counted(self, _: Any, event: events.LinkCounters) -> None:
        self._samples.append((time.monotonic_ns(), self._peers.get(event.link, 0), event))

    # Reading.

    def recording(self, reason: str = "", since_ns: int = 0) -> Recording:
        """Return the recording, with the ops that are in flight or ended after `since_ns`. Takes milliseconds."""
        rows = self._read_records(since_ns)
        ended = [(name, launch) for name, launch in list(self._ended) if launch.over_ns > since_ns]
        callers: dict[int, int] = {}
        ops = self._ops(rows, ended, lambda caller: callers.setdefault(caller, len(callers)))
        names = {thread.native_id: encodable(thread.name) for thread in threading.enumerate()}
        facts, options = self._facts, self._options
        return Recording(
            run=facts.run,
            peer=facts.peer,
            group=options.group,
            name=encodable(options.name),
            host=encodable(socket.gethostname()),
            process=os.getpid(),
            clock=clock_name(),
            taken_ns=time.monotonic_ns(),
            taken_unix_ns=time.time_ns(),
            rings=[(epoch, list(ring)) for epoch, ring in list(self._rings.items())],
            callers=[names.get(caller, f"thread {caller}, which has ended") for caller in callers],
            ops=sorted((op for op in ops if op.over_ns == 0 or op.over_ns > since_ns), key=lambda op: op.launched_ns),
            links=[_sample(*taken) for taken in list(self._samples)],
            events=sorted([*list(self._events), *list(self._calls)], key=lambda event: event.at_ns),
            reason=encodable(reason),
        )

    def _ops(
        self, rows: Iterable[Row], ended: Iterable[tuple[Name, Launch]], number: Callable[[int], int]
    ) -> list[OpRecord]:
        by_name: dict[Name, list[Row]] = {}
        for row in rows:
            by_name.setdefault(name_of(row), []).append(row)
        launches: dict[Name, Launch] = dict(ended)
        table = list(self.table.values())
        for op in table:
            name = self._names.get(op.op)
            if name is not None and name not in launches:
                launches[name] = Launch(op.launched_ns, op.caller)
        rings = dict(list(self._rings.items()))
        queued = [
            OpRecord(0, op.tag, 0, "queued", "", "", 0, 0, 0, number(op.caller), op.launched_ns)
            for op in table
            if op.op not in self._names and op.launched_ns
        ]
        return queued + [
            joined(of_op, launches.get(name), rings.get(name[0], ()), number) for name, of_op in by_name.items()
        ]


def _sample(at_ns: int, peer: int, event: events.LinkCounters) -> LinkSample:
    return LinkSample(at_ns, peer, event.link, event.thread, {name: getattr(event, name) for name in events.COUNTERS})


# Dumps of the flight recorder to a file.

GATHER_S = 0.2
"""Delay between a failure and its dump, so that the dump includes failures caused by it."""
PAUSE_S = 5.0
"""Time between dumps."""
LAST_S = 2.0
"""Time limit for the last dump."""
FILES_KEPT = 64
"""Number of one host's files in the directory, which other hosts may also write to."""
HANG_S = 30.0
LOOK_S = 1.0
"""Interval of the search for ops that hang."""
_warned_of: set[Path] = set()
"""Unwritable directories that this process has already warned about."""


class Dumps:
    """One session's dumps. Only for the trio thread, except `ask`."""

    def __init__(self, recorder: FlightRecorder, logger: logging.LoggerAdapter[logging.Logger]) -> None:
        """Start the thread if PCCL_TRACE_DIR is set."""
        directory = os.environ.get("PCCL_TRACE_DIR", "")
        self._directory = Path(directory).absolute()  # the program may change its working directory
        self._recorder = recorder
        self._table = recorder.table
        self._logger = logger
        self._hang_s = number_of("PCCL_TRACE_HANG", HANG_S, 1e9)
        self._asked: list[str] = []
        self._writing = trio.Lock()
        """Held while a dump is being written."""
        self._since: dict[int, float] = {}
        """The time when each op in flight was first seen."""
        self._told: set[int] = set()
        """Ops that a dump has reported as hanging."""
        self._thread: HelperThread | None = None
        if directory:
            try:
                self._thread = HelperThread("pccl-dumps")
                recorder.on_failure = self.ask
            except OSError as error:
                logger.warning("the flight recorder will not be written to %s: %s", directory, error)

    def ask(self, reason: str) -> None:
        """Request a dump. It names the first reason given."""
        if len(self._asked) < 2:
            self._asked.append(reason)

    async def watch(self) -> None:
        """Write the dumps that were requested, and dumps for ops that hang."""
        if self._thread is None:
            return
        while True:
            await trio.sleep(LOOK_S)
            self._look_for_hangs()
            if self._asked:
                await trio.sleep(GATHER_S)
                await self._dump()
                await trio.sleep(PAUSE_S)

    def _look_for_hangs(self) -> None:
        now = trio.current_time()
        self._since = {number: self._since.get(number, now) for number in self._table}
        hanging = {number for number, since in self._since.items() if now - since >= self._hang_s}
        for number in sorted(hanging - self._told):
            tag = self._table[number].tag
            self.ask(f"op with tag {tag} has not ended within {self._hang_s:g} s")
        self._told = hanging

    async def last(self, failure: str) -> None:
        """Write the last dump if `failure` is not empty or a dump was requested, after any dump that is being
        written."""
        if self._thread is not None:
            if failure:
                self.ask(failure)
            with trio.move_on_after(LAST_S):
                await self._dump()

    async def _dump(self) -> None:
        """Write a dump if one is requested and has not been written yet."""
        async with self._writing:
            if self._asked:
                reason, self._asked = self._asked[0], []
                await self._write_for(reason)

    async def _write_for(self, reason: str) -> None:
        assert self._thread is not None
        try:
            path = await self._thread.run(lambda: self._write(reason), is_left=True)
            self._logger.info("the flight recorder was written to %s: %s", path, reason)
        except Exception as error:  # the run does not depend on dumps
            level = logging.INFO if self._directory in _warned_of else logging.WARNING
            _warned_of.add(self._directory)
            why = (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
            self._logger.log(level, "the flight recorder cannot be written to %s: %s", self._directory, why)

    def _write(self, reason: str) -> Path:
        recording = self._recorder.recording(reason)
        run = re.sub(r"\W", "", recording.run)
        host = re.sub(r"[^\w.-]", "", recording.host)
        path = self._directory / f"pccl-{run}-peer-{recording.peer}-{host}-{recording.process}.json"
        part = path.with_suffix(".part")
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(to_json(recording))
            part.replace(path)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
        with suppress(OSError):
            self._remove_oldest(host)
        return path

    def _remove_oldest(self, host: str) -> None:
        """Remove a host's oldest files, including partial files left by killed processes. Raises OSError."""
        own = re.compile(rf"pccl-\w*-peer-\d+-{re.escape(host)}-\d+\.(json|part)")
        found = [
            (each.stat().st_mtime_ns, each.path) for each in os.scandir(self._directory) if own.fullmatch(each.name)
        ]
        for _, path in sorted(found, reverse=True)[FILES_KEPT:]:
            os.unlink(path)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.close()


# The recording, sent to the master in parts.

TRACES_KEPT = 2
LACK_CHARACTERS_MAX = 500


class RecordingParts(Part):
    """Sends the recording to the master in parts."""

    def __init__(self, shared: Shared, take: Callable[[], Recording]) -> None:
        """`take` returns the recording; it may be called in any thread."""
        super().__init__(shared)
        self._take = take
        self._packed: dict[int, bytes] = {}
        """The recordings for the most recent traces that have not been fetched completely."""

    def asked(self, request: m.RecordingRequest) -> None:
        """Answer a request from the master, immediately or from a task."""
        received_ns = time.monotonic_ns()
        if request.part == 0:
            self._lifetime.spawn(self._take_for, request, received_ns)
        else:
            self._answer(request, received_ns)

    async def _take_for(self, request: m.RecordingRequest, received_ns: int) -> None:
        def packed() -> bytes:
            return pack(recent(self._take(), request.seconds, request.last))

        lack = ""
        self._packed.pop(request.trace, None)
        try:
            thread = HelperThread("pccl-recorder")
            try:
                self._packed[request.trace] = await thread.run(packed, is_left=True)
            finally:
                thread.close()
        except Exception as error:  # the run does not depend on recordings
            reason = encodable(str(error) or type(error).__name__)
            lack = f"its recording cannot be read: {reason}"[:LACK_CHARACTERS_MAX]
            self._logger.warning("the flight recorder cannot be read: %s", reason)
        while len(self._packed) > TRACES_KEPT:
            del self._packed[next(iter(self._packed))]
        self._answer(request, received_ns, lack)

    def _answer(self, request: m.RecordingRequest, received_ns: int, lack: str = "") -> None:
        parts, content = 0, b""
        packed = self._packed.get(request.trace, b"")
        if request.part >= 0:
            parts = -(-len(packed) // m.PART_BYTES_MAX)
            content = packed[request.part * m.PART_BYTES_MAX :][: m.PART_BYTES_MAX]
            if request.part >= parts - 1:
                self._packed.pop(request.trace, None)
        answer = m.RecordingPart(request.trace, request.part, parts, received_ns, time.monotonic_ns(), content, lack)
        self._master.send([answer])
