"""TLS to the master: it carries a run, and every way in which it can go wrong is said clearly on both sides."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pccl import Communicator, MasterNode, PCCLError, ReduceOp, Result
from pccl.protocol import messages as m
from pccl.protocol.codec import encode
from pccl.runtime.network.tls import TlsEnd, TlsError
from tests.support.cluster import WAIT_S, Cluster, until

CERTIFICATES = Path(__file__).parents[2] / "certificates"
CA = str(CERTIFICATES / "ca.pem")


def master_context(name: str = "master", client_ca: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATES / f"{name}.pem")
    if client_ca is not None:
        context.load_verify_locations(CERTIFICATES / f"{client_ca}.pem")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def peer_context(ca: str = "ca", client: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=CERTIFICATES / f"{ca}.pem")
    if client is not None:
        context.load_cert_chain(CERTIFICATES / f"{client}.pem")
    return context


def refusal(address: str, context: ssl.SSLContext | None) -> str:
    with pytest.raises(PCCLError) as caught:
        Communicator(address, ssl_context=context, timeout=WAIT_S).connect(n_attempts=1)
    assert caught.value.result is Result.MASTER_CONNECTION_FAILED
    return str(caught.value)


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The master's, which come by themselves: each names an address."""
    found = until(lambda: [text for text in caplog.messages if "refused" in text], "the master has logged a refusal")
    assert all(text.startswith("127.0.0.1:") for text in found)
    return found


def test_a_run_over_tls() -> None:
    with MasterNode("127.0.0.1:0", token="secret", ssl_context=master_context()) as node:
        cluster = Cluster(node.address, token="secret", ssl_context=peer_context())
        cluster.join(2)
        values = [np.ones(1000, np.float32) for _ in range(2)]
        for _ in range(10):
            cluster.each(lambda peer, i: peer.all_reduce(values[i], op=ReduceOp.AVG))
        cluster.join()
        cluster.close_all()
    assert (values[0] == 1).all()


def test_client_certificate_from_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_TLS_CA", CA)
    monkeypatch.setenv("PCCL_TLS_CERT", str(CERTIFICATES / "client.pem"))
    with (
        MasterNode("localhost:0", ssl_context=master_context(client_ca="ca")) as node,
        Communicator(node.address, timeout=WAIT_S) as peer,
    ):
        assert peer.world_size == 1


@pytest.mark.parametrize(
    ("variable", "value"), [("PCCL_TLS_CA", "nowhere.pem"), ("PCCL_TLS_CERT", "nowhere.pem"), ("PCCL_TLS_CERT", CA)]
)
def test_unusable_certificate_file(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv("PCCL_TLS_CA", CA)
    monkeypatch.setenv(variable, value)
    with pytest.raises(PCCLError, match=f"{variable}='{value}'") as caught:
        Communicator("127.0.0.1:1")
    assert caught.value.result is Result.INVALID_ARGUMENT


def test_untrusted_master_certificate(caplog: pytest.LogCaptureFixture) -> None:
    with MasterNode("127.0.0.1:0", ssl_context=master_context()) as node:
        text = refusal(node.address, peer_context("other_ca"))
        assert "certificate was not accepted" in text
        assert node.address in text
        assert "unknown ca" in refusals(caplog)[0]


def test_an_expired_certificate() -> None:
    with MasterNode("127.0.0.1:0", ssl_context=master_context("expired")) as node:
        assert "certificate has expired" in refusal(node.address, peer_context())


def test_a_certificate_for_another_host() -> None:
    """127.0.0.2 is this machine too, and not in the certificate."""
    with MasterNode("127.0.0.1:0", ssl_context=master_context()) as node:
        host, port = node.address.rsplit(":", 1)
        assert host == "127.0.0.1"
        with socket.create_server(("", 0)) as listener:
            forward = threading.Thread(target=_forward, args=(listener, int(port)), daemon=True)
            forward.start()
            text = refusal(f"127.0.0.2:{listener.getsockname()[1]}", peer_context())
    assert "IP address mismatch" in text


def _forward(listener: socket.socket, port: int) -> None:
    near, _ = listener.accept()
    with near, socket.create_connection(("127.0.0.1", port)) as far:
        back = threading.Thread(target=_pump, args=(far, near), daemon=True)
        back.start()
        _pump(near, far)
        back.join(WAIT_S)


def _pump(source: socket.socket, sink: socket.socket, change: Callable[[bytes], bytes] = bytes) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(change(data))
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def test_missing_client_certificate(caplog: pytest.LogCaptureFixture) -> None:
    with MasterNode("127.0.0.1:0", ssl_context=master_context(client_ca="ca")) as node:
        assert "TLS" in refusal(node.address, peer_context())
        assert "TLS" in refusals(caplog)[0]


def test_peer_without_tls(caplog: pytest.LogCaptureFixture) -> None:
    with MasterNode("127.0.0.1:0", ssl_context=master_context()) as node:
        assert "the master asks for TLS; give the peer an ssl_context= or PCCL_TLS_CA" in refusal(node.address, None)
        assert "asks for TLS" in refusals(caplog)[0]


def test_master_without_tls(master: MasterNode, caplog: pytest.LogCaptureFixture) -> None:
    assert "does not speak TLS" in refusal(master.address, peer_context())
    assert "speaks TLS, but this master has no certificate" in refusals(caplog)[0]


def test_a_peer_with_tls_at_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            listener.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        text = refusal(f"127.0.0.1:{listener.getsockname()[1]}", peer_context())
    assert "TLS handshake" in text or "reset" in text


@pytest.mark.parametrize("how", ["cut", "changed", "reset"])
def test_corrupt_tls_ends_own_session_only(how: str) -> None:
    """Somebody on the way cuts or changes it: the peer hears of it, the master goes on."""
    stop = threading.Event()

    def change(data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1]) if stop.is_set() else data

    with (
        MasterNode("127.0.0.1:0", peer_timeout=3, ssl_context=master_context()) as node,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        port = int(node.address.rsplit(":", 1)[1])
        ends: list[socket.socket] = []

        def forward() -> None:
            for alter in (change, bytes):  # the control connection, then the one for heartbeats
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", port))
                ends.extend((near, far))
                threading.Thread(target=_pump, args=(near, far), daemon=True).start()
                threading.Thread(target=_pump, args=(far, near, alter), daemon=True).start()

        forwarder = threading.Thread(target=forward, daemon=True)
        forwarder.start()
        peer = Communicator(f"127.0.0.1:{listener.getsockname()[1]}", ssl_context=peer_context(), timeout=WAIT_S)
        peer.connect()
        forwarder.join(WAIT_S)
        if how == "changed":
            stop.set()
        if how == "cut":
            ends[0].shutdown(socket.SHUT_WR)
            expected = "cut off in the middle of TLS"
        elif how == "reset":
            ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            ends[0].shutdown(socket.SHUT_RD)
            ends[0].close()
            expected = "reset|cut off|closed by the other side"  # the master may have heard of it first
        else:
            expected = "TLS failed: "
        with pytest.raises(PCCLError, match=expected) as caught:
            until(peer.update_topology, "the session is over")
        assert caught.value.result is Result.MASTER_CONNECTION_FAILED
        peer.close()
        for end in ends:
            end.close()
        with Communicator(node.address, ssl_context=peer_context(), timeout=WAIT_S) as other:
            assert other.world_size == 1


# The conversion alone.


def established() -> tuple[TlsEnd, TlsEnd]:
    peer, master = TlsEnd(peer_context(), "localhost"), TlsEnd(master_context())
    said = peer.handshake(b"")
    while not (peer.is_established and master.is_established):
        said = peer.handshake(master.handshake(said)) if not peer.is_established else master.handshake(said)
    return peer, master


def test_tls_with_any_segmentation() -> None:
    peer, master = established()
    words = [encode(m.Leave("x" * n)) for n in (0, 1, 100, 15_000)] * 3
    stream = b"".join(peer.encrypt(word) for word in words)
    heard = b""
    for start in range(0, len(stream), 777):
        said, _ = master.decrypt(stream[start : start + 777])
        heard += said
    assert heard == b"".join(words)
    assert not master.is_over
    assert master.decrypt(peer.close_notify())[0] == b""
    assert master.is_over


def test_a_changed_record_is_an_error() -> None:
    peer, master = established()
    record = bytearray(peer.encrypt(b"hello"))
    record[-1] ^= 1
    with pytest.raises(TlsError, match="bad record mac"):
        master.decrypt(bytes(record))
