"""connect: unreachable masters, foreign servers, ports in use, and peers that start before their master."""

from __future__ import annotations

import logging
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import numpy as np
import pytest
import trio
from trio.testing import MockClock

from pccl import AsyncCommunicator, Communicator, MasterNode, PCCLError, ReduceOp, Result
from pccl.runtime.session import control
from pccl.status import run_status
from tests.support.cluster import WAIT_S, Background, Cluster, refusal, results, together, until, waits_at_master


@contextmanager
def server_that(answers: Callable[[socket.socket], None]) -> Iterator[str]:
    """Start a server that does this to each connection; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        answers(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


# The wrong master.


def test_unreachable_master_is_named(nobody: str) -> None:
    error = refusal(partial(Communicator(nobody).connect, n_attempts=1))
    assert error.result is Result.MASTER_CONNECTION_FAILED
    assert nobody in str(error)
    assert "Connection refused" in str(error)


@contextmanager
def black_hole() -> Iterator[str]:
    """The address of a port that drops the packets of a further connection, as a firewall does: its queue is full."""
    with ExitStack() as held:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):
            sock = held.enter_context(socket.socket())
            sock.setblocking(False)
            with suppress(BlockingIOError):
                sock.connect(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("attempts", [1, 3])
def test_connect_gives_up_at_a_black_hole(monkeypatch: pytest.MonkeyPatch, attempts: int) -> None:
    monkeypatch.setattr("pccl._session_holder.ATTEMPT_INTERVAL_S", 0.1)
    monkeypatch.setattr("pccl._session_holder.ATTEMPT_INTERVAL_S", 0.1)
    monkeypatch.setattr("pccl._session_holder.ATTEMPTS_REACH_S", 0.5)
    monkeypatch.setattr("pccl._session_holder.DIAL_S", 0.1)
    with black_hole() as address:
        begun_s = time.monotonic()
        error = refusal(partial(Communicator(address).connect, attempts))
        assert time.monotonic() < begun_s + 10, "the system itself would go on for two minutes"
    assert error.result is Result.MASTER_CONNECTION_FAILED
    assert f"cannot reach a master at {address}: no answer to a connection within" in str(error)
    assert f"({attempts} attempt" in str(error)
    assert f"pccl doctor {address}" in str(error)


@pytest.mark.parametrize("attempts", [1, 5])
def test_timeout_at_a_black_hole(attempts: int) -> None:
    with black_hole() as address:
        error = refusal(partial(Communicator(address).connect, attempts, timeout=0.3))
    text = str(error)
    if error.result is Result.TIMEOUT:
        assert f"not finished within 0.3 s; it waited for the master at {address}, attempt 1 of {attempts}: " in text
    else:  # the only attempt ends at the same time, and may be first
        assert error.result is Result.MASTER_CONNECTION_FAILED
        assert attempts == 1
        assert f"cannot reach a master at {address}" in text
    assert "no answer to a connection" in text
    assert "a firewall drops it, the host is down, or the address is wrong" in text
    assert f"`pccl doctor {address}` looks for the reason" in text


def says_http(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def says_much(connection: socket.socket) -> None:
    connection.sendall(random.Random(1).randbytes(100_000))


def says_nothing_and_closes(connection: socket.socket) -> None:
    connection.recv(1)


@pytest.mark.parametrize("answers", [says_http, says_much, says_nothing_and_closes])
def test_foreign_server_is_named(answers: Callable[[socket.socket], None]) -> None:
    with server_that(answers) as address:
        error = refusal(partial(Communicator(address).connect, n_attempts=2))
    assert error.result is Result.MASTER_CONNECTION_FAILED
    assert address in str(error)


def test_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "WELCOME_TIMEOUT_S", 0.05)
    given_up = threading.Event()

    def says_nothing(_: socket.socket) -> None:
        given_up.wait(WAIT_S)

    with server_that(says_nothing) as address:
        error = refusal(Communicator(address).connect)
        given_up.set()
    assert error.result is Result.MASTER_CONNECTION_FAILED
    assert address in str(error)
    assert "is there a pccl master at this address?" in str(error)


# Ports in use.


def test_port_in_use_is_named(master: MasterNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        error = refusal(Communicator(master.address, listen=where).connect)
        assert error.result is Result.INVALID_ARGUMENT
        assert f"cannot listen on {where}: the port is in use" in str(error)


# Strangers.


GARBAGE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a huge length": b"\xff" * 64,
    "an empty message": bytes(64),
    "noise": random.Random(2).randbytes(5000),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_at_every_port_has_no_effect(cluster: Cluster, kind: str, new_port: Callable[[], int]) -> None:
    ports = [new_port() for _ in range(2)]
    for port in ports:
        cluster.join(1, listen=f"127.0.0.1:{port}")
    ports.append(int(cluster.address.rpartition(":")[2]))
    is_over = threading.Event()

    def knock(port: int) -> int:
        knocks = 0
        while not is_over.is_set() or knocks < 3:
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                knocks += 1
                with suppress(OSError):  # it may be cut off at any time
                    stranger.sendall(GARBAGE[kind])
                    if knocks % 2:
                        stranger.shutdown(socket.SHUT_WR)
                        while stranger.recv(1000):
                            pass
        return knocks

    strangers = [Background(partial(knock, port)) for port in ports]

    def reduce(peer: Communicator, _: int) -> None:
        for _ in range(30):
            x = np.ones(10_000, np.float32)
            assert peer.all_reduce(x, op=ReduceOp.SUM).world_size == 2
            assert np.all(x == 2)

    try:
        cluster.each(reduce)
    finally:
        is_over.set()
    assert all(stranger.result() >= 3 for stranger in strangers)
    assert cluster.each(lambda peer, _: peer.are_peers_pending()) == [False, False]


def test_newcomer_that_cannot_reach_a_peer_is_rejected(cluster: Cluster, nobody: str) -> None:
    cluster.join(1, advertise=nobody)
    connecting = Background(cluster.new().connect)
    until(cluster[0].are_peers_pending, "it waits")
    cluster[0].update_topology()
    error = connecting.outcome()
    assert error.result is Result.RANK_CONNECTION_FAILED
    assert "peers 1 and 2 cannot connect to each other" in str(error)
    assert nobody in str(error)
    assert cluster[0].world_size == 1


def test_stopped_master_fails_calls() -> None:
    with MasterNode("127.0.0.1:0") as master:
        cluster = Cluster(master.address)
        cluster.join(3)
        x = np.ones(1000, np.float32)
        calls = [
            Background(partial(cluster[0].all_reduce, x, op=ReduceOp.SUM)),
            Background(cluster[0].are_peers_pending),
            Background(cluster[1].update_topology),
            Background((newcomer := cluster.new()).connect),
        ]
        until(lambda: cluster[0].stats["ops_open"] == 1 and waits_at_master(newcomer), "they wait")
    assert results([call.outcome() for call in calls]) == [Result.MASTER_CONNECTION_FAILED] * 4
    assert np.all(x == 1)
    together([peer.close for peer in cluster.peers])


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


# Peers that start before their master.


def test_connect_searches_for_five_minutes(nobody: str) -> None:
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
    assert f"cannot reach a master at {nobody}: Connection refused; is the address right, is `pccl m" in str(error)
    assert took_s == pytest.approx(300, abs=1)
    said = [(at, text) for at, text in shown.lines if "has waited" in text]
    assert [at for at, _ in said] == pytest.approx(range(2, 300, 30), abs=1)
    assert f"connect has waited 2 s for the master at {nobody}, attempt " in said[0][1]
    assert "Connection refused" in said[0][1]


@pytest.mark.usefixtures("attempts_in_a_row")
def test_master_that_starts_later_is_found(monkeypatch: pytest.MonkeyPatch, warned: Warned, nobody: str) -> None:
    monkeypatch.setattr("pccl._session_holder.FIRST_S", 0.1)
    monkeypatch.setattr("pccl._session_holder.EVERY_S", 0.1)
    peer = Communicator(nobody)
    connecting = Background(peer.connect)
    where = re.escape(nobody)
    until(lambda: warned(rf"connect has waited \d+ s for the master at {where}, attempt \d\d:.*refused"), "it is told")
    with MasterNode(nobody, start="new"):
        connecting.result()
        assert peer.world_size == 1
        peer.close()
    assert warned("connect has ended its search for a master after")


@pytest.mark.usefixtures("attempts_in_a_row")
@pytest.mark.parametrize("is_of_the_call", [True, False])
def test_timeout_of_connect(nobody: str, is_of_the_call: bool) -> None:
    """Five attempts take less than a tenth of it."""
    own, call = (None, {"timeout": 0.8}) if is_of_the_call else (0.8, {})
    error = refusal(partial(Communicator(nobody, timeout=own).connect, **call))
    assert error.result is Result.TIMEOUT
    attempts = re.search(r"attempt (\d+): cannot reach a master", str(error))
    assert attempts is not None, str(error)
    assert int(attempts[1]) > 5


@pytest.mark.parametrize("is_refused_by", ["token", "service"])
def test_wrong_token_or_service_fails_at_once(is_refused_by: str) -> None:
    if is_refused_by == "token":
        with MasterNode("127.0.0.1:0", token="one") as master:
            assert "token" in str(refusal(Communicator(master.address, token="two").connect))
        return
    with MasterNode("127.0.0.1:0", http="127.0.0.1:0") as master:
        assert master.http_address is not None
        assert "page of a pccl master" in str(refusal(Communicator(master.http_address).connect))


# A master answers, and holds newcomers.


def test_held_newcomer_is_reported(warned: Warned, monkeypatch: pytest.MonkeyPatch, nobody: str) -> None:
    monkeypatch.setattr("pccl.runtime.master.requests.REFRESH_S", 0.0)
    with MasterNode(nobody) as master:
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


def test_master_timeout_below_peer_timeout() -> None:
    with MasterNode("127.0.0.1:0", peer_timeout=5) as node:
        lone = Communicator(node.address, master_timeout=0.1, timeout=WAIT_S)
        lone.connect()
    with pytest.raises(PCCLError, match=r"master_timeout is less than the run's peer_timeout of 5 s"):
        lone.are_peers_pending()
    lone.close()


@pytest.mark.parametrize("text", ["nan", "soon"])
def test_master_timeout_must_be_a_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PCCL_MASTER_TIMEOUT", text)
    error = refusal(lambda: Communicator("127.0.0.1:1"))
    assert error.result is Result.INVALID_ARGUMENT
    assert f"PCCL_MASTER_TIMEOUT '{text}' is not a number of seconds" in str(error)
