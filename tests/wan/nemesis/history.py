"""The events that a peer reports, each one line of JSON in a file of its own.

Theory of operation. A line is one write to a file opened for appending, so a peer that is killed leaves whole lines and
at most one half at the end, which is left out. Times are those of CLOCK_MONOTONIC, which all processes of a machine
share, and which no fault here touches.

The events of a peer that reduces (`peer`), with what each carries next to `at_s` and `event`:

    start                                     the process runs its first lines
    lineage    label, base, revision          its state is called `label` from now on; `base`: what it was called
    connecting
    joined     number                         the run's number for this peer
    syncing
    synced     label, revision, chain, bulk   digests of the state that all are to have now
    launch     op, label, step, number, input digest of the input
    end        op, label, step, verdict       "committed", or the name of the error, with `text` and `input` after it
               committed: peers (numbers by rank), rank, output (digest), sample (some elements), input
    state      label, revision, chain, bulk   after a step; `applied`: digests by op; bulk only now and then
    touched    text                           an array that an error had given back was written later
    alone                                     no other peer is there
    left       verdict, text                  the session is over
    trained    label, revision, digest, world one step of a training class
    usage      rss, descriptors, threads
    saved, unsaved  text                      a checkpoint was written, or the error that was raised
    leaving, done                             it was asked to leave, and has
    crash      text                           an error that no call should raise here
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Event:
    at_s: float
    peer: str
    """The process, as host and number of the start there: 3.2 is the second one on host 3."""
    kind: str
    what: dict[str, Any]


class Reporter:
    """The peer's end: appends its events to its file. Safe in threads."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def say(self, event: str, /, **what: Any) -> None:
        line = json.dumps({"at_s": time.monotonic(), "event": event, **what}) + "\n"
        os.write(self._file, line.encode())


class Reader:
    """The events of one peer's file as they come."""

    def __init__(self, path: Path, peer: str) -> None:
        self.path = path
        self.peer = peer
        self.events: list[Event] = []
        self._read_bytes = 0

    def poll(self) -> list[Event]:
        """Return what is new."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        new = list(_events(whole, self.peer))
        self.events += new
        return new


def _events(lines: bytes, peer: str) -> Iterator[Event]:
    for line in lines.splitlines():
        what = json.loads(line)
        yield Event(what.pop("at_s"), peer, what.pop("event"), what)
