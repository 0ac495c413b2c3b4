"""What a session answers when its master asks for the flight recorder."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from pccl.protocol import messages as m
from pccl.protocol.codec import LENGTH_BYTES, decode_body, encode
from pccl.protocol.recording import Recording, unpack
from pccl.runtime.session.driver import Shared
from pccl.runtime.session.recorder import RecordingParts

RECORDING = Recording("run", 1, 0, "name " * 1000, "host", 1, "clock", 1, 1)


class Session:
    """As much of one as is needed here."""

    def __init__(self, take: Callable[[], Recording]) -> None:
        self.said: list[m.RecordingPart] = []
        self._tasks: list[Callable[[], Awaitable[None]]] = []
        lifetime = cast(Any, self)
        logger = logging.LoggerAdapter(logging.getLogger("pccl.peer"))
        master: Any = SimpleNamespace(send=self.said.extend)
        nobody = cast(Any, None)
        shared = Shared(nobody, logger, master, nobody, nobody, lifetime, nobody, nobody)
        self.parts = RecordingParts(shared, take)

    def spawn(self, function: Callable[..., Awaitable[None]], *args: object) -> None:
        self._tasks.append(lambda: function(*args))

    def ask(self, trace: int, part: int) -> m.RecordingPart:
        self.parts.asked(m.RecordingRequest(trace, part))
        for task in self._tasks:
            trio.run(task)
        self._tasks.clear()
        return self.said.pop()


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "PART_BYTES_MAX", 16)


def whole(session: Session, trace: int, first: m.RecordingPart) -> Recording:
    rest = [session.ask(trace, part).content for part in range(1, first.parts)]
    return unpack(b"".join([first.content, *rest]))


def test_parts_make_the_whole() -> None:
    session = Session(lambda: RECORDING)
    first = session.ask(1, 0)
    assert first.parts > 2
    assert first.received_ns <= first.sent_ns
    assert whole(session, 1, first) == RECORDING
    assert session.ask(1, 1).parts == 0, "it is forgotten with its last part"


def test_two_traces_at_a_time_and_no_third() -> None:
    session = Session(lambda: RECORDING)
    firsts = {trace: session.ask(trace, 0) for trace in (1, 2, 3)}
    assert session.ask(1, 1).parts == 0
    for trace in (2, 3):
        assert whole(session, trace, firsts[trace]) == RECORDING


def test_the_time_alone() -> None:
    session = Session(lambda: RECORDING)
    answer = session.ask(1, -1)
    assert (answer.parts, answer.content) == (0, b"")
    assert 0 < answer.received_ns <= answer.sent_ns


def test_a_recorder_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Recording:
        raise MemoryError

    session = Session(fail)
    answer = session.ask(1, 0)
    assert (answer.parts, answer.lack) == (0, "its recording cannot be read: MemoryError")
    assert "cannot be read: MemoryError" in caplog.text


def test_the_reason_for_which_there_is_none_can_be_sent() -> None:
    def fail() -> Recording:
        raise ValueError(f"no \udce9 {'long ' * 1000}")

    answer = Session(fail).ask(1, 0)
    assert answer.lack.startswith("its recording cannot be read: no \\udce9 long ")
    assert decode_body(encode(answer)[LENGTH_BYTES:], m.RecordingPart) == answer
