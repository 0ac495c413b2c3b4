"""What a master shows over HTTP: what lies where, in which form, and that nobody can hold it up or change anything."""

from __future__ import annotations

import http.client
import json
import socket
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from pccl import MasterNode, PCCLError, ReduceOp
from pccl.security import ExposedWarning
from pccl.web import server
from tests.crew import Crew, until

TIMEOUT_S = 60.0


@pytest.fixture
def shown() -> Iterator[MasterNode]:
    with MasterNode("127.0.0.1:0", http="127.0.0.1:0") as node:
        yield node


@pytest.fixture
def crew(shown: MasterNode) -> Iterator[Crew]:
    crew = Crew(shown.address)
    yield crew
    crew.close_all()


def ask(node: MasterNode, path: str, method: str = "GET") -> tuple[http.client.HTTPResponse, str]:
    assert node.http_address is not None
    connection = http.client.HTTPConnection(node.http_address, timeout=TIMEOUT_S)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response, response.read().decode()
    finally:
        connection.close()


def dial(node: MasterNode) -> socket.socket:
    assert node.http_address is not None
    host, port = node.http_address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), TIMEOUT_S)


@pytest.mark.usefixtures("told_at_once")
def test_status_as_json(shown: MasterNode, crew: Crew) -> None:
    crew.join(2)
    crew.each(lambda peer, i: peer.all_reduce(np.ones(10, np.float32), op=ReduceOp.SUM))

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


@pytest.mark.usefixtures("told_at_once")
def test_metrics(shown: MasterNode, crew: Crew) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    crew.join(3)
    crew.each(lambda peer, i: peer.all_reduce(np.ones(10, np.float32), op=ReduceOp.SUM))

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
    assert "pip install 'pccl[metrics]'" in body


def test_nothing_else_is_there_and_nothing_can_be_changed(shown: MasterNode) -> None:
    response, body = ask(shown, "/../etc/passwd")
    assert response.status == 404
    assert "/status.json" in body
    response, _ = ask(shown, "/status.json", "POST")
    assert (response.status, response.getheader("Allow")) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "said", [b"\x16\x03\x01nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nA: " + b"x" * 20_000, b"\0" * 9000]
)
def test_what_is_no_http_is_told_so(shown: MasterNode, said: bytes) -> None:
    with dial(shown) as sock:
        sock.sendall(said)
        assert sock.recv(1000).startswith(b"HTTP/1.1 4")
    assert ask(shown, "/healthz")[0].status == 200


def test_idle_connections_are_bounded_and_hold_nobody_up(shown: MasterNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", 3)
    monkeypatch.setattr(server, "CONNECTION_S", 0.2)
    idle = [dial(shown) for _ in range(5)]
    crew = Crew(shown.address)
    crew.join(2)
    crew.close_all()
    for sock in idle:
        assert sock.recv(1) == b""
        sock.close()
    assert ask(shown, "/healthz")[0].status == 200


def test_it_ends_with_the_master_and_its_port_is_free_again() -> None:
    with MasterNode("127.0.0.1:0", http="127.0.0.1:0") as node:
        address = node.http_address
        assert address is not None
        with pytest.raises(PCCLError, match="in use"):
            MasterNode("127.0.0.1:0", http=address).run()
    assert node.wait(TIMEOUT_S)
    with MasterNode("127.0.0.1:0", http=address) as again:
        assert ask(again, "/healthz")[0].status == 200


def test_an_address_that_others_reach_is_warned_of() -> None:
    with (
        pytest.warns(ExposedWarning, match="every interface|0\\.0\\.0\\.0"),
        MasterNode("127.0.0.1:0", http="0.0.0.0:0"),
    ):
        pass
    with MasterNode("127.0.0.1:0") as node:
        assert node.http_address is None
