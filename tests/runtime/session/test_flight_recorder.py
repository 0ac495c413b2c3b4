"""What the flight recorder of a session keeps, however long that lasts."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

from pccl.protocol.peer import effects as ps
from pccl.protocol.recording import from_json, pack, to_json, unpack
from pccl.runtime.session.recorder import LINKS_KEPT, FlightRecorder

NOBODY = cast(Any, None)


def test_links_that_are_closed_are_forgotten_after_a_while() -> None:
    facts = cast(Any, SimpleNamespace(name_of=lambda _: "vm:8141"))
    recorder = FlightRecorder(NOBODY, facts, NOBODY, NOBODY)
    done: list[Any] = []
    handlers = recorder.noting(
        {ps.MakeLink: lambda _, effect: done.append(effect), ps.CloseLink: lambda _, effect: done.append(effect)}
    )

    def carry_out(effect: object) -> None:
        for handler in handlers[type(effect)]:
            handler(NOBODY, effect)

    def make(link: int) -> None:
        member = cast(Any, SimpleNamespace(peer=7))
        carry_out(ps.MakeLink(link, member, 1, 1, True, 1.0, 1.0))

    make(0)
    for link in range(1, 3 * LINKS_KEPT):
        make(link)
        carry_out(ps.CloseLink(link))
    assert len(recorder._peers) == LINKS_KEPT + 1
    assert {0, 3 * LINKS_KEPT - 1} <= recorder._peers.keys()
    assert len(done) == 6 * LINKS_KEPT - 1
    assert recorder._events[-1].text == "peer 7 (vm:8141): the link is closed"


def test_text_that_cannot_be_encoded_is_replaced() -> None:
    odd = os.fsdecode(b"load \xe9t\xe9")
    options = cast(Any, SimpleNamespace(group=0, name=odd))
    facts = cast(Any, SimpleNamespace(run="run", peer=1))
    recorder = FlightRecorder(options, facts, {}, lambda _: [])
    recorder.note("log", odd)
    recorder.note("log", "\udce9" * 1000)
    recording = recorder.recording(odd)
    assert recording.reason == recording.name == recording.events[0].text == "load \\udce9t\\udce9"
    assert from_json(to_json(recording)) == unpack(pack(recording)) == recording
