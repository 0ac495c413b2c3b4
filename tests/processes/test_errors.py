"""Wrong servers, strangers at the door, ports in use: errors that name the culprit, and nothing lost for the others."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import numpy as np
import pytest

from pccl import Communicator, MasterNode, PCCLError, ReduceOp, Result
from pccl.runtime.session import control
from tests.support.cluster import WAIT_S, Background, Cluster, results, together, until, waits_at_master


def refusal(call: Callable[[], object]) -> PCCLError:
    with pytest.raises(PCCLError) as caught:
        call()
    return caught.value


@contextmanager
def server_that(answers: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does this to everybody; its address."""
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


def a_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# The wrong master.


def test_an_unreachable_master_is_named(nobody: str) -> None:
    error = refusal(partial(Communicator(nobody).connect, n_attempts=1))
    assert error.result is Result.MASTER_CONNECTION_FAILED
    assert nobody in str(error)
    assert "Connection refused" in str(error)


def test_attempts_are_a_second_apart_and_counted(monkeypatch: pytest.MonkeyPatch, nobody: str) -> None:
    monkeypatch.setattr("pccl._session_holder.ATTEMPT_INTERVAL_S", 0.01)
    peer = Communicator(nobody)
    assert "(3 attempts)" in str(refusal(partial(peer.connect, n_attempts=3)))


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
def test_a_port_that_drops_packets_is_given_up(monkeypatch: pytest.MonkeyPatch, attempts: int) -> None:
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
def test_a_short_timeout_at_such_a_port_says_where_what_was_tried_and_what_to_do(attempts: int) -> None:
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


def test_a_short_timeout_at_a_port_that_says_nothing_tells_that_it_takes_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        error = refusal(partial(Communicator(address).connect, timeout=0.3))
    assert f"the master at {address}, attempt 1: the port accepts connections but does not answer" in str(error)
    assert f"`pccl doctor {address}` looks for the reason" in str(error)


def test_an_address_that_drops_packets_takes_no_time_from_the_next(
    monkeypatch: pytest.MonkeyPatch, master: MasterNode
) -> None:
    monkeypatch.setattr("pccl._session_holder.DIAL_S", 0.1)
    monkeypatch.setattr("pccl._session_holder.ATTEMPT_S", 1.0)
    with black_hole() as address, Communicator(f"{address},{master.address}") as peer:
        assert peer.world_size == 1


def test_a_timeout_of_connect_says_what_was_tried(monkeypatch: pytest.MonkeyPatch, nobody: str) -> None:
    monkeypatch.setattr("pccl._session_holder.ATTEMPT_INTERVAL_S", 0.01)
    error = refusal(partial(Communicator(nobody).connect, 1000, timeout=1))
    assert error.result is Result.TIMEOUT
    assert f"not finished within 1 s; it waited for the master at {nobody}, attempt " in str(error)
    assert "of 1000: cannot reach a master" in str(error)
    assert "Connection refused" in str(error)


def test_who_asks_for_many_attempts_has_asked_for_the_time_too(monkeypatch: pytest.MonkeyPatch, nobody: str) -> None:
    monkeypatch.setattr("pccl._session_holder.ATTEMPTS_REACH_S", 0.0)
    monkeypatch.setattr("pccl._session_holder.ATTEMPT_INTERVAL_S", 0.05)
    monkeypatch.setattr("pccl._session_holder.ATTEMPT_INTERVAL_S", 0.05)
    error = refusal(partial(Communicator(nobody).connect, 8))
    assert "(8 attempts)" in str(error)


def test_a_master_that_comes_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl._session_holder.ATTEMPT_INTERVAL_S", 0.01)
    address = f"127.0.0.1:{a_free_port()}"
    peer = Communicator(address)
    with pytest.raises(PCCLError):
        peer.connect(n_attempts=1)
    connecting = Background(partial(peer.connect, n_attempts=10_000))
    with MasterNode(address, start="new"):
        connecting.result()
        assert peer.world_size == 1
        peer.close()


@pytest.mark.parametrize("host", ["host.invalid", "a..b", "x" * 70])
def test_a_host_that_cannot_be_found_is_named(host: str) -> None:
    error = refusal(partial(Communicator(f"{host}:1").connect, n_attempts=1))
    assert error.result is Result.MASTER_CONNECTION_FAILED
    assert host in str(error)


def says_http(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def says_much(connection: socket.socket) -> None:
    connection.sendall(random.Random(1).randbytes(100_000))


def says_nothing_and_closes(connection: socket.socket) -> None:
    connection.recv(1)


@pytest.mark.parametrize("answers", [says_http, says_much, says_nothing_and_closes])
def test_a_server_that_is_no_master_is_named(answers: Callable[[socket.socket], None]) -> None:
    with server_that(answers) as address:
        error = refusal(partial(Communicator(address).connect, n_attempts=2))
    assert error.result is Result.MASTER_CONNECTION_FAILED
    assert address in str(error)


def test_a_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_listening_port_in_use_is_named(master: MasterNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        error = refusal(Communicator(master.address, listen=where).connect)
        assert error.result is Result.INVALID_ARGUMENT
        assert f"cannot listen on {where}: the port is in use" in str(error)


def test_an_address_of_another_machine_cannot_be_listened_on(master: MasterNode) -> None:
    error = refusal(Communicator(master.address, listen="192.0.2.1:0").connect)
    assert error.result is Result.INVALID_ARGUMENT
    assert "cannot listen on 192.0.2.1:0" in str(error)


# Strangers.


GARBAGE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a huge length": b"\xff" * 64,
    "an empty message": bytes(64),
    "noise": random.Random(2).randbytes(5000),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_unauthenticated_connections_at_every_port_disturb_nobody(cluster: Cluster, kind: str) -> None:
    ports = [a_free_port() for _ in range(2)]
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


def test_an_unauthenticated_connection_that_stays_silent_keeps_nobody_out(master: MasterNode) -> None:
    host, _, port = master.address.rpartition(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(20)]
    cluster = Cluster(master.address)
    cluster.join(2)
    assert cluster.each(lambda peer, _: peer.world_size) == [2, 2]
    cluster.close_all()
    for stranger in silent:
        stranger.close()


def test_a_newcomer_that_cannot_reach_a_neighbour_is_turned_away_and_told_why(cluster: Cluster) -> None:
    port = a_free_port()
    cluster.join(1, advertise=f"127.0.0.1:{port}")
    connecting = Background(cluster.new().connect)
    until(cluster[0].are_peers_pending, "it waits")
    cluster[0].update_topology()
    error = connecting.outcome()
    assert error.result is Result.RANK_CONNECTION_FAILED
    assert "peers 1 and 2 cannot connect to each other" in str(error)
    assert f"127.0.0.1:{port}" in str(error)
    assert cluster[0].world_size == 1


def test_a_master_that_stops_fails_the_calls_in_progress() -> None:
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
