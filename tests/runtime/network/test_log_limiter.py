"""A process at a dead master's address that knows nothing of the run sends nobody away, with or without a token."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType

import pytest

from pccl import Communicator, MasterNode, Result
from pccl.protocol import messages as m
from pccl.protocol.codec import encode
from tests.support.cluster import WAIT_S, Cluster, outcomes, reduce_once, results, until

PEERS = 2
REASON = "your run is over"
SHORT_S = 1.0


class Refuser:
    """Sends away whoever comes to its address."""

    def __init__(self, address: str = "127.0.0.1:0", secret: bytes = b"") -> None:
        host, port = address.rsplit(":", 1)
        self._listener = socket.create_server((host, int(port)))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.refused = 0
        self._goodbye = encode(m.Goodbye(Result.MASTER_CONNECTION_FAILED, REASON, secret))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                with self._listener.accept()[0] as sock, suppress(OSError):
                    sock.settimeout(WAIT_S)
                    sock.recv(2**16)
                    sock.sendall(self._goodbye)
                    sock.recv(1)
                self.refused += 1

    def __enter__(self) -> Refuser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(WAIT_S)


@contextmanager
def orphans(master_timeout: float = WAIT_S) -> Iterator[Cluster]:
    """Peers whose master has just ended; it was at their address."""
    with MasterNode("127.0.0.1:0") as node:
        cluster = Cluster(node.address, master_timeout=master_timeout)
        cluster.join(PEERS)
    try:
        yield cluster
    finally:
        cluster.close_all()


@pytest.mark.parametrize("secret", [b"", b"a guess"])
def test_refused_peer_continues_search(secret: bytes) -> None:
    with orphans() as cluster:
        with Refuser(cluster.address, secret) as refuser:
            until(lambda: refuser.refused >= 3 * PEERS, "each has asked again")
        with MasterNode(cluster.address):
            assert cluster.each(reduce_once) == [PEERS] * PEERS
            cluster.each(lambda peer, _: peer.update_topology())


def test_master_of_other_run_with_token(caplog: pytest.LogCaptureFixture) -> None:
    with orphans() as cluster:
        with MasterNode(cluster.address, token="of another run"):
            until(lambda: sum("has none" in text for text in caplog.messages) >= 3 * PEERS, "each has asked again")
        with MasterNode(cluster.address):
            cluster.each(lambda peer, _: peer.update_topology())


def test_in_the_end_the_refusal_is_named() -> None:
    with orphans(master_timeout=SHORT_S) as cluster, Refuser(cluster.address):
        found = cluster.outcomes(lambda peer, _: peer.update_topology())
        assert results(found) == [Result.MASTER_CONNECTION_FAILED] * PEERS
        for error in found:
            assert f"within {SHORT_S:g} s" in str(error)
            assert f"{cluster.address}: refused: {REASON}" in str(error)


def test_refused_newcomer_asks_all_masters() -> None:
    with Refuser() as refuser, MasterNode("127.0.0.1:0") as node:
        with Communicator(f"{refuser.address},{node.address}", timeout=WAIT_S) as peer:
            assert peer.world_size == 1
        assert refuser.refused


def test_refused_newcomer_without_other_master() -> None:
    with Refuser() as one, Refuser() as other:
        newcomer = Communicator(f"{one.address},{other.address}", timeout=WAIT_S)
        (error,) = outcomes([newcomer.connect])
        assert error.result is Result.MASTER_CONNECTION_FAILED
        assert REASON in str(error)
        assert one.refused + other.refused <= 4
