"""Every kind of event of the engine is read and reported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast, get_args

import trio

from pccl.runtime.data_plane.events import (
    READERS,
    EngineEvent,
    EngineFailed,
    OpCompleted,
    OpDone,
    OpFastCompleted,
)
from pccl.runtime.extension import lib
from pccl.runtime.session.ops import OPS_AS_EXPECTED, Ops
from pccl.runtime.session.recorder import FlightRecorder
from pccl.runtime.session.reports import WorkCounters

KINDS = set(get_args(EngineEvent))


def test_every_kind_of_the_library_is_read() -> None:
    names = [name for name in dir(lib) if name.startswith("PCCL_EVENT_")]
    assert len(names) == len(KINDS)
    assert {getattr(lib, name) for name in names} == set(READERS)


def test_the_session_hears_of_every_kind() -> None:
    """Ops of the fast path are told before all else, and a failed engine ends the session."""
    nobody = cast(Any, None)
    session: Any = SimpleNamespace(whom=None, at_end=lambda _: None)

    async def kinds() -> set[type]:
        recorder = FlightRecorder(nobody, nobody, {}, nobody)
        return set(Ops(session, session, nobody, nobody, WorkCounters(), recorder, {})._reports)

    assert trio.run(kinds) | {OpDone, OpCompleted, OpFastCompleted, EngineFailed} == KINDS


def test_events_of_ops_have_a_number() -> None:
    assert OPS_AS_EXPECTED <= KINDS
    for kind in OPS_AS_EXPECTED:
        assert kind.__match_args__[0] == "op"
