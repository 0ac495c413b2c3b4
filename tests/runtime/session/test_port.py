"""The port that the sessions of a process share."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pccl import Communicator, MasterNode, PCCLError
from pccl.protocol import messages as m
from pccl.protocol.codec import LENGTH_BYTES, decode_body, encode
from tests.support.cluster import WAIT_S, Cluster, reduce_once


@pytest.fixture
def address() -> Iterator[str]:
    """An address with a port that no other program gets, though a communicator may listen on it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


def port_of(peer: Communicator) -> int:
    session = peer._inner._session
    assert session is not None
    return session._port.number


def answer_to(port: int, message: m.Message) -> object:
    """Return a peer's answer to the first message of a connection."""
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as sock:
        sock.sendall(encode(message))
        with sock.makefile("rb") as stream:
            length = int.from_bytes(stream.read(LENGTH_BYTES), "big")
            return decode_body(stream.read(length), m.PeerAnswer | m.Goodbye)


def test_peers_of_runs_with_different_tokens_share_a_port(address: str) -> None:
    with ExitStack() as opened:
        clusters = []
        for token in ("one token", "another token", ""):
            master = opened.enter_context(MasterNode("127.0.0.1:0", token=token))
            cluster = Cluster(master.address, token=token)
            opened.callback(cluster.close_all)
            cluster.join(3, listen=address)
            clusters.append(cluster)
        for cluster in clusters:
            assert cluster.each(reduce_once) == [3, 3, 3]
            assert {port_of(peer) for peer in cluster.peers} == {int(address.rpartition(":")[2])}
        clusters[0].close_all()
        clusters[1].join(1, listen=address)
        assert clusters[1].each(reduce_once) == [4] * 4
        assert clusters[2].each(reduce_once) == [3] * 3


def test_last_session_closes_the_port(address: str) -> None:
    with MasterNode("127.0.0.1:0") as master:
        cluster = Cluster(master.address)
        cluster.join(2, listen=address)
        cluster.peers[0].close()
        with socket.create_connection(("127.0.0.1", port_of(cluster.peers[1])), WAIT_S):
            pass
        cluster.close_all()
        with socket.socket() as taken:
            host, _, port = address.rpartition(":")
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind((host, int(port)))
            taken.listen()
            with pytest.raises(PCCLError, match="in use"):
                cluster.join(1, listen=address)
        cluster.join(2, listen=address)
        assert cluster.each(reduce_once) == [2, 2]
        cluster.close_all()


def test_connection_for_another_process_is_refused(cluster: Cluster) -> None:
    cluster.join(2)
    port = port_of(cluster.peers[0])
    assert port == port_of(cluster.peers[1])
    for run, receiver in (("elsewhere", 1), ("elsewhere", 99)):
        answer = answer_to(port, m.LinkHello(m.PROTOCOL_VERSION, run, 2, receiver, 1, 0, 1))
        assert isinstance(answer, m.Rejected)
        assert f"peer {receiver} of run 'elsewhere' is not at this port" in answer.reason
    answer = answer_to(port, m.StatusRequest(m.PROTOCOL_VERSION))
    assert isinstance(answer, m.Goodbye)
    assert "not of its run's master" in answer.reason
    assert cluster.each(reduce_once) == [2, 2]


def test_peers_of_one_process_share_any_free_port(cluster: Cluster) -> None:
    cluster.join(3)
    assert len({port_of(peer) for peer in cluster.peers}) == 1
    assert cluster.each(reduce_once) == [3, 3, 3]
