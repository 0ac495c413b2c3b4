"""What the flight recorder of a session keeps, however long that lasts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from pccl.protocol import peer as ps
from pccl.runtime.session.flight_recorder import LINKS_KEPT, FlightRecorder

NOBODY = cast(Any, None)


def test_links_that_are_closed_are_forgotten_after_a_while() -> None:
    recorder = FlightRecorder(NOBODY, NOBODY, NOBODY, NOBODY)
    done: list[Any] = []
    handlers = recorder.noting(
        {ps.MakeLink: lambda _, effect: done.append(effect), ps.CloseLink: lambda _, effect: done.append(effect)}
    )

    def make(link: int) -> None:
        member = cast(Any, SimpleNamespace(peer=7))
        handlers[ps.MakeLink](NOBODY, ps.MakeLink(link, member, 1, 1, True, 1.0, 1.0))

    make(0)
    for link in range(1, 3 * LINKS_KEPT):
        make(link)
        handlers[ps.CloseLink](NOBODY, ps.CloseLink(link))
    assert len(recorder._peers) == LINKS_KEPT + 1
    assert {0, 3 * LINKS_KEPT - 1} <= recorder._peers.keys()
    assert len(done) == 6 * LINKS_KEPT - 1
