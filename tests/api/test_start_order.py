"""Peers that start before their master, and newcomers that a master holds: who waits for how long, and what is said."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from pccl import AsyncCommunicator, Communicator, MasterNode, PCCLError, Result
from pccl.status import run_status
from tests.support.cluster import WAIT_S, Background, refusal, until

Warned = Callable[[str], bool]


class _Timed(logging.Handler):
    """Warnings, each with the time of the trio run that logs it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((trio.current_time(), record.getMessage()))


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[Warned]:
    """A function that returns whether a warning matches."""
    with caplog.at_level(logging.WARNING, "pccl"):
        yield lambda pattern: any(re.search(pattern, each.getMessage()) for each in list(caplog.records))


@pytest.fixture
def attempts_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl._session_holder.ATTEMPT_INTERVAL_S", 0.01)
    monkeypatch.setattr("pccl._session_holder.ATTEMPT_INTERVAL_S", 0.01)
    monkeypatch.setattr("pccl.runtime.threads.waking.LOOK_S", 0.02)


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


# Nobody listens yet.


def test_connect_looks_for_a_master_for_five_minutes_and_says_so(nobody: str) -> None:
    shown = _Timed()
    logging.getLogger("pccl").addHandler(shown)
    clock = MockClock(autojump_threshold=0.0)

    async def search() -> tuple[float, PCCLError]:
        began_at = trio.current_time()
        peer = AsyncCommunicator(nobody)
        with pytest.raises(PCCLError) as caught:
            await peer.connect()
        shown.lines = [(at - began_at, text) for at, text in shown.lines]
        return trio.current_time() - began_at, caught.value

    try:
        took_s, error = trio.run(search, clock=clock)
    finally:
        logging.getLogger("pccl").removeHandler(shown)
    assert error.result is Result.MASTER_CONNECTION_FAILED
    assert f"cannot reach a master at {nobody}: Connection refused" in str(error)
    assert took_s == pytest.approx(300, abs=1)
    said = [(at, text) for at, text in shown.lines if "has waited" in text]
    assert [at for at, _ in said] == pytest.approx(range(2, 300, 30), abs=1)
    assert f"connect has waited 2 s for the master at {nobody}, attempt " in said[0][1]
    assert "Connection refused" in said[0][1]


@pytest.mark.usefixtures("attempts_in_a_row")
def test_a_master_that_starts_after_its_peer_is_found(monkeypatch: pytest.MonkeyPatch, warned: Warned) -> None:
    monkeypatch.setattr("pccl._session_holder.FIRST_S", 0.1)
    monkeypatch.setattr("pccl._session_holder.EVERY_S", 0.1)
    address = _free_address()
    peer = Communicator(address)
    connecting = Background(peer.connect)
    where = re.escape(address)
    until(lambda: warned(rf"connect has waited \d+ s for the master at {where}, attempt \d\d:.*refused"), "it is told")
    with MasterNode(address, start="new"):
        connecting.result()
        assert peer.world_size == 1
        peer.close()
    assert warned("connect has ended its search for a master after")


@pytest.mark.usefixtures("attempts_in_a_row")
@pytest.mark.parametrize("is_of_the_call", [True, False])
def test_a_timeout_bounds_the_search_for_a_master(nobody: str, is_of_the_call: bool) -> None:
    """Five attempts take less than a tenth of it."""
    own, call = (None, {"timeout": 0.8}) if is_of_the_call else (0.8, {})
    error = refusal(partial(Communicator(nobody, timeout=own).connect, **call))
    assert error.result is Result.TIMEOUT
    attempts = re.search(r"attempt (\d+): cannot reach a master", str(error))
    assert attempts is not None, str(error)
    assert int(attempts[1]) > 5


@pytest.mark.usefixtures("attempts_in_a_row")
def test_a_number_of_attempts_that_is_given_holds(nobody: str) -> None:
    assert "(5 attempts)" in str(refusal(partial(Communicator(nobody, timeout=WAIT_S).connect, n_attempts=5)))


@pytest.mark.usefixtures("attempts_in_a_row")
def test_a_standby_that_starts_before_its_master_keeps_its_newcomers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They ask all masters again and again, for longer than peers that have lost theirs look for another."""
    address = _free_address()
    with MasterNode("127.0.0.1:0", standby_of=address) as standby:
        peer = Communicator(f"{address},{standby.address}", master_timeout=0.05)
        connecting = Background(peer.connect)
        until(lambda: "standby" in _obstacle(peer), "the standby has sent it away")
        end_s = time.monotonic() + 0.5
        until(lambda: time.monotonic() > end_s or connecting.is_over, "ten times master_timeout")
        assert not connecting.is_over
        with MasterNode(address, start="new"):
            connecting.result()
            assert peer.world_size == 1
            peer.close()


def _obstacle(peer: Communicator) -> str:
    session = peer._inner._session
    return session.obstacle if session is not None else ""


@pytest.mark.parametrize("is_refused_by", ["token", "service"])
def test_what_waiting_cannot_mend_fails_at_once(is_refused_by: str) -> None:
    if is_refused_by == "token":
        with MasterNode("127.0.0.1:0", token="one") as master:
            assert "token" in str(refusal(Communicator(master.address, token="two").connect))
        return
    with MasterNode("127.0.0.1:0", http="127.0.0.1:0") as master:
        assert master.http_address is not None
        assert "the page of a pccl master" in str(refusal(Communicator(master.http_address).connect))


def test_ctrl_c_ends_the_search_for_a_master(nobody: str) -> None:
    code = f"import pccl; print('begins', flush=True); pccl.Communicator({nobody!r}).connect()"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PCCL_LOG_LEVEL"},
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=WAIT_S)
    assert f"connect has waited 2 s for the master at {nobody}" in first
    assert "KeyboardInterrupt" in rest
    assert process.returncode == -signal.SIGINT


# A master answers, and holds newcomers.


def test_who_is_held_by_a_master_and_who_holds_say_so(warned: Warned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.runtime.master.requests.REFRESH_S", 0.0)
    with MasterNode(_free_address()) as master:
        peer = Communicator(master.address)
        connecting = Background(peer.connect)
        where = re.escape(master.address)
        why = r"peers of an earlier run, if any, for \d+ s more; `pccl master --start new` skips this"
        until(lambda: warned(rf"connect is held at {where}: the master waits for {why}"), "the peer says so")
        assert warned(rf"a newcomer from 127.0.0.1 is held: this master waits for {why}")
        status = run_status(master.address)
        assert (status.role, status.held) == ("vacant", 1)
        assert re.fullmatch(why, status.held_for)
        peer.close()
        assert connecting.outcome().result is Result.NOT_INITIALIZED


def test_a_timeout_of_a_peer_that_is_held_says_why() -> None:
    with MasterNode(_free_address()) as master:
        error = refusal(partial(Communicator(master.address).connect, timeout=0.8))
    assert error.result is Result.TIMEOUT
    assert "it waited for the master at" in str(error)
    assert "holds newcomers: it waits for peers of an earlier run" in str(error)


def test_nothing_is_said_where_nobody_waits(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "pccl"),
        MasterNode("127.0.0.1:0") as master,
        Communicator(master.address) as peer,
    ):
        assert peer.world_size == 1
        status = run_status(master.address)
        assert (status.held, status.held_for) == (0, "")
    assert not caplog.records
