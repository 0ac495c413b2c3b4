"""A master's pages over HTTP: what lies where, in which form, and that nobody can hold it up or change anything."""

from __future__ import annotations

import http.client
import json
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from pccl import MasterNode, PCCLError, ReduceOp
from pccl.security import ExposedWarning
from tests.support.cluster import Cluster, until

TIMEOUT_S = 60.0


@pytest.fixture
def shown() -> Iterator[MasterNode]:
    with MasterNode("127.0.0.1:0", http="127.0.0.1:0") as node:
        yield node


@pytest.fixture
def cluster(shown: MasterNode) -> Iterator[Cluster]:
    cluster = Cluster(shown.address)
    yield cluster
    cluster.close_all()


def ask(
    node: MasterNode, path: str, method: str = "GET", host: str | None = None
) -> tuple[http.client.HTTPResponse, str]:
    assert node.http_address is not None
    connection = http.client.HTTPConnection(node.http_address, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        response = connection.getresponse()
        return response, response.read().decode()
    finally:
        connection.close()


def dial(node: MasterNode) -> socket.socket:
    assert node.http_address is not None
    host, port = node.http_address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), TIMEOUT_S)


@pytest.mark.usefixtures("reported_at_once")
def test_status_as_json(shown: MasterNode, cluster: Cluster) -> None:
    cluster.join(2)
    cluster.each(lambda peer, i: peer.all_reduce(np.ones(10, np.float32), op=ReduceOp.SUM))

    def seen() -> dict[str, object] | None:
        response, body = ask(shown, "/status.json?x=1")
        assert (response.status, response.getheader("Content-Type")) == (200, "application/json")
        found: dict[str, dict[str, object]] = json.loads(body)
        return found if found["totals"]["ops_committed"] else None

    status = until(seen, "the op is counted")
    assert status is not None
    assert len(status["members"]) == 2  # type: ignore[arg-type]


def test_page_is_self_contained(shown: MasterNode) -> None:
    response, page = ask(shown, "/")
    assert response.status == 200
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("HTTP", "")
    assert "innerHTML" not in page
    policy = response.getheader("Content-Security-Policy")
    assert policy is not None
    assert "default-src 'none'" in policy


def test_health(shown: MasterNode) -> None:
    response, body = ask(shown, "/healthz")
    assert (response.status, body) == (200, "ok\n")
    response, body = ask(shown, "/healthz", "HEAD")
    assert (response.status, response.getheader("Content-Length"), body) == (200, "3", "")


@pytest.mark.usefixtures("reported_at_once")
def test_metrics(shown: MasterNode, cluster: Cluster) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    cluster.join(3)
    cluster.each(lambda peer, i: peer.all_reduce(np.ones(10, np.float32), op=ReduceOp.SUM))

    def samples() -> dict[tuple[str, tuple[str, ...]], float] | None:
        response, body = ask(shown, "/metrics")
        assert response.status == 200
        families = parser.text_string_to_metric_families(body)
        found = {(s.name, tuple(s.labels.values())): s.value for family in families for s in family.samples}
        return found if found["pccl_ops_committed_total", ()] else None

    found = until(samples, "the op is counted")
    assert found is not None
    assert found["pccl_peers", ("0", "accepted")] == 3
    assert found["pccl_joins_total", ()] == 3
    assert found["pccl_losses_total", ()] == 0
    assert found["pccl_payload_bytes_total", ()] > 0
    assert found["pccl_peers_waiting", ("update_topology",)] == 0


def test_metrics_without_the_library_say_what_to_install(shown: MasterNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    response, body = ask(shown, "/metrics")
    assert response.status == 501
    assert "pip install '.[metrics]' in a clone of pccl" in body


def test_unknown_paths_and_methods(shown: MasterNode) -> None:
    response, body = ask(shown, "/../etc/passwd")
    assert response.status == 404
    assert "/status.json" in body
    response, _ = ask(shown, "/status.json", "POST")
    assert (response.status, response.getheader("Allow")) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "said", [b"\x16\x03\x01nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nA: " + b"x" * 20_000, b"\0" * 9000]
)
def test_other_protocols_are_answered(shown: MasterNode, said: bytes) -> None:
    with dial(shown) as sock:
        sock.sendall(said)
        assert sock.recv(1000).startswith(b"HTTP/1.1 4")
    assert ask(shown, "/healthz")[0].status == 200


@pytest.mark.parametrize("said", [b"", b"GET /status.json HTTP/1.1\r\n", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_idle_connections_do_not_delay_requests(shown: MasterNode, said: bytes) -> None:
    """They say nothing, half of a request, or do not take their answer and go."""
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(dial(shown)).sendall(said)
        for path in ("/healthz", "/metrics", "/status.json"):
            for _ in range(3):
                assert ask(shown, path)[0].status in (200, 501)


def test_page_ends_with_master() -> None:
    with MasterNode("127.0.0.1:0", http="127.0.0.1:0") as node:
        address = node.http_address
        assert address is not None
        with pytest.raises(PCCLError, match="in use"):
            MasterNode("127.0.0.1:0", http=address).run()
    assert node.wait(TIMEOUT_S)
    with MasterNode("127.0.0.1:0", http=address) as again:
        assert ask(again, "/healthz")[0].status == 200


def test_public_page_warns() -> None:
    with (
        pytest.warns(ExposedWarning, match="every interface|0\\.0\\.0\\.0"),
        MasterNode("127.0.0.1:0", http="0.0.0.0:0"),
    ):
        pass
    with MasterNode("127.0.0.1:0") as node:
        assert node.http_address is None


# Who asks by which name.

GUARDED = ("/", "/status.json", "/metrics", "/nowhere")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:48149",
        "127.0.0.1.evil.example",
        "[::1].evil.example",
        "[::1",
        "10.0.0.5",
        "[::2]",
        "",
    ],
)
def test_loopback_refuses_other_hosts(shown: MasterNode, host: str) -> None:
    """A page of evil.example may have made it resolve to 127.0.0.1."""
    for path in GUARDED:
        response, body = ask(shown, path, host=host)
        assert response.status == 421
        assert "members" not in body
        assert "--http-host" in body
    assert ask(shown, "/healthz", host=host)[0].status == 200


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost.:1", "127.0.0.1:9", "127.1.2.3", "[::1]:80", "[::ffff:127.0.0.1]"]
)
def test_own_names_are_answered(shown: MasterNode, host: str) -> None:
    assert ask(shown, "/status.json", host=host)[0].status == 200


def test_request_without_host_is_answered(shown: MasterNode) -> None:
    with dial(shown) as sock:
        sock.sendall(b"GET /status.json HTTP/1.0\r\n\r\n")
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")


def test_refusal_names_option(shown: MasterNode) -> None:
    _, body = ask(shown, "/", host="runs.example:8080")
    assert "--http-host runs.example" in body
    _, body = ask(shown, "/", host="<script>")
    assert "script" not in body


def test_names_can_be_added() -> None:
    names = ["Runs.example", "10.1.2.3", "[2001:db8::1]"]
    with MasterNode("127.0.0.1:0", http="127.0.0.1:0", http_hosts=names) as node:
        for host in ("runs.example", "RUNS.example:443", "10.1.2.3:80", "[2001:db8::1]"):
            assert ask(node, "/status.json", host=host)[0].status == 200
        assert ask(node, "/status.json", host="example")[0].status == 421


@pytest.mark.filterwarnings("ignore::pccl.security.ExposedWarning")
def test_hosts_of_public_address() -> None:
    with MasterNode("127.0.0.1:0", http="0.0.0.0:0", http_hosts=["master"]) as node:
        for host in ("10.1.2.3:48149", "[2001:db8::1]", "localhost", "master", socket.gethostname()):
            assert ask(node, "/status.json", host=host)[0].status == 200
        assert ask(node, "/status.json", host="evil.example")[0].status == 421


@pytest.mark.parametrize("names", [["http://x"], ["x:80"], [""], ["a b"], [5], "name", None])
def test_invalid_host_names(names: object) -> None:
    with pytest.raises(PCCLError, match="host name"):
        MasterNode("127.0.0.1:0", http="127.0.0.1:0", http_hosts=names)  # type: ignore[arg-type]


def test_host_names_need_http() -> None:
    with pytest.raises(PCCLError, match="http="):
        MasterNode("127.0.0.1:0", http_hosts=["x"])
