"""`pccl doctor`: what keeps a host from taking part in a run is found, with what to do about it."""

from __future__ import annotations

import json
import socket
import time
from types import SimpleNamespace

import pytest

from pccl import Communicator, MasterNode, PCCLError
from pccl import doctor as doctors
from pccl.doctor import Check, examine
from pccl.protocol import messages as m
from pccl.runtime.master import requests
from pccl.runtime.network import clients
from pccl.runtime.network.clients import PathReport
from tests.api.test_connect import black_hole
from tests.conftest import Command
from tests.runtime.network.test_no_master import server, ssh
from tests.runtime.network.test_tls import CA, master_context
from tests.support.cluster import WAIT_S


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No peer's environment, and short floods."""
    for name in ("PCCL_LISTEN", "PCCL_ADVERTISE", "PCCL_TOKEN", "PCCL_TLS_CA", "PCCL_MASTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(clients, "FLOOD_S", 0.05)


def of(found: list[Check], name: str) -> Check:
    (check,) = (each for each in found if each.name == name)
    return check


def failures(found: list[Check]) -> list[str]:
    return [check.name for check in found if check.verdict == "failed"]


def test_a_healthy_path(master: MasterNode, command: Command) -> None:
    with Communicator(master.address, timeout=WAIT_S) as peer:
        assert peer.world_size == 1
        done = command("doctor", master.address, "--json")
    assert done.returncode == 0, done.stdout
    told = json.loads(done.stdout)
    assert told["healthy"] is True
    found = [Check(**check) for check in told["checks"]]
    assert not failures(found)
    assert f"protocol {m.PROTOCOL_VERSION} on both sides" in of(found, "versions").text
    assert "full-size packets get through in both directions" in of(found, "mtu").text
    assert "reaches this one at 127.0.0.1:" in of(found, "dialled back").text
    assert "peer 1 (" in of(found, "peers").text
    assert {"reach", "round trip", "clock", "bandwidth", "files", "backlog"} <= {check.name for check in found}


def test_for_people(master: MasterNode, command: Command, nobody: str) -> None:
    done = command("doctor", master.address)
    assert done.returncode == 0, done.stdout
    assert "\nok     round trip" in done.stdout
    done = command("doctor", nobody)
    assert done.returncode == 1
    assert "FAILED reach" in done.stdout
    assert "-> start `pccl master --listen" in done.stdout
    done = command("doctor", "http://h:1")
    assert done.returncode == 1
    assert "is a URL" in done.stderr


def test_a_port_that_drops_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctors, "DIAL_S", 0.2)
    with black_hole() as address:
        reach = of(examine(address), "reach")
    assert reach.verdict == "failed"
    assert "packets are dropped on the path" in reach.text
    assert "firewall" in reach.advice


def test_something_else_answers() -> None:
    with server(ssh) as address:
        check = of(examine(address), "master")
    assert check.verdict == "failed"
    assert "no pccl master answered (got b'SSH-" in check.text
    assert check.advice == "give the master's own address"


def test_missing_token_and_tls() -> None:
    with MasterNode("127.0.0.1:0", token="secret") as node:
        assert "PCCL_TOKEN" in of(examine(node.address), "master").advice
        assert not failures(examine(node.address, token="secret"))
    with MasterNode("127.0.0.1:0", ssl_context=master_context()) as node:
        assert "PCCL_TLS_CA" in of(examine(node.address), "master").advice


def test_over_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_TLS_CA", CA)
    with MasterNode("127.0.0.1:0", ssl_context=master_context()) as node:
        assert not failures(examine(node.address))


def test_another_protocol(master: MasterNode, monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(**{**vars(m), "PROTOCOL_VERSION": m.PROTOCOL_VERSION - 1})
    monkeypatch.setattr(clients, "m", other)
    check = of(examine(master.address), "master")
    assert f"this master speaks protocol {m.PROTOCOL_VERSION}, the client {m.PROTOCOL_VERSION - 1}" in check.text
    assert check.advice == "install the same version of pccl on both sides"


def test_clocks_that_differ(master: MasterNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "time", SimpleNamespace(time=lambda: time.time() + 7))
    clock = of(examine(master.address), "clock")
    assert clock.verdict == "warning"
    assert "the master's clock is 7.0" in clock.text
    assert "s ahead" in clock.text


def test_unreachable_peer_port(command: Command, nobody: str) -> None:
    """It would advertise a port that nobody forwards to it."""
    with MasterNode("127.0.0.1:0", token="secret") as node:
        found = examine(node.address, token="secret", advertise=nobody)
        check = of(found, "dialled back")
        assert check.verdict == "failed"
        assert "cannot reach this one at 127.0.0.1:" in check.text
        assert "Connection refused" in check.text
        assert "open the port" in check.advice
        with server(ssh) as other:
            check = of(examine(node.address, token="secret", advertise=other), "dialled back")
            assert "the port answers with another protocol" in check.text


def test_master_without_token_dials_only_client() -> None:
    with MasterNode("127.0.0.1:0") as node, server(ssh) as other:
        check = of(examine(node.address, advertise=f"localhost:{other.rpartition(':')[2]}"), "dialled back")
    assert check.verdict == "warning"
    assert "dials only the address of the client" in check.text


def test_listen_port_in_use(master: MasterNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = examine(master.address, listen=f"127.0.0.1:{taken.getsockname()[1]}")
    assert of(found, "listen").verdict == "warning"
    assert "the port is in use" in of(found, "listen").text
    assert not failures(found)


def test_one_check_at_a_time(master: MasterNode) -> None:
    service = master._service
    assert service is not None
    service._server._checking.is_busy = True
    assert "busy with requests of this kind; try again" in of(examine(master.address), "path").text


def healthy_path() -> PathReport:
    return PathReport(
        "1", "203.0.113.7", "10.0.0.5", [0.1] * 3, 0.0, 0.05, 1448, "both", [("203.0.113.7:48150", "")], 1e6, 1e6
    )


def judged(path: PathReport, advertised: tuple[str, int] | None = None) -> list[Check]:
    return list(doctors._Doctor("h", 1, "", None, ("", 0), advertised)._path_checks(path))


def test_nat_is_reported() -> None:
    nat = of(judged(healthy_path()), "nat")
    assert nat.verdict == "warning"
    assert "this host sends from 10.0.0.5, but the master sees 203.0.113.7" in nat.text
    assert "PCCL_ADVERTISE" in nat.advice
    assert of(judged(healthy_path(), ("203.0.113.7", 48150)), "nat").verdict == "ok"


@pytest.mark.parametrize(("lost", "says"), [("out", "from this host to the master"), ("back", "to this host")])
def test_lost_full_size_packets(lost: str, says: str) -> None:
    path = healthy_path()
    path.full_size = lost
    found = judged(path)
    assert failures(found) == ["mtu"]
    assert says in of(found, "mtu").text
    assert "tcp_mtu_probing" in of(found, "mtu").advice


@pytest.mark.parametrize("lost", ["out", "back"])
def test_mtu_is_not_to_blame_within_one_host(lost: str) -> None:
    path = healthy_path()
    path.full_size, path.segment_bytes = lost, 65483
    check = of(judged(path), "mtu")
    assert check.verdict == "failed"
    assert "is it stopped or overloaded?" in check.advice
    assert "MTU" not in check.text + check.advice


def test_small_windows_on_long_path(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"ipv4/tcp_rmem": "4096 131072 6291456", "ipv4/tcp_wmem": "4096 16384 67108864"}
    monkeypatch.setattr(doctors, "_setting", lambda name: settings.get(name, "1"))
    small, large, idle = (check for check in judged(healthy_path()) if check.name == "windows")
    assert (small.verdict, large.verdict, idle.verdict) == ("warning", "ok", "warning")
    assert "tcp_rmem limits one connection to 503.3 Mbit/s at 100 ms" in small.text
    assert "net.ipv4.tcp_rmem" in small.advice
    assert "slow_start_after_idle" in idle.advice


@pytest.mark.parametrize(
    ("control", "may_choose", "round_trip_s", "lost", "verdict", "says"),
    [
        ("bbr", True, 0.1, 100, "ok", "bbr here"),
        ("cubic", True, 0.1, 100, "ok", "links to distant peers use bbr"),
        ("cubic", False, 0.001, 100, "ok", "a short path does not need it"),
        ("cubic", False, 0.1, 0, "warning", "none of 100000 packets were lost"),
        ("cubic", False, 0.1, 100, "warning", "(0.10%), which limits a TCP connection to 4.4 Mbit/s"),
    ],
)
def test_congestion_control(
    monkeypatch: pytest.MonkeyPatch,
    *,
    control: str,
    may_choose: bool,
    round_trip_s: float,
    lost: int,
    verdict: str,
    says: str,
) -> None:
    monkeypatch.setattr(doctors, "_setting", lambda name: "reno cubic" if "congestion" in name else "")
    path = healthy_path()
    path.congestion_control, path.may_choose_bbr, path.round_trips_s = control, may_choose, [round_trip_s]
    path.sent_segments, path.lost_segments = 100000, lost
    found = of(judged(path), "congestion")
    assert found.verdict == verdict
    assert says in found.text
    advice = (
        "where it does not, as root: modprobe tcp_bbr; "
        "sysctl -w net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'"
    )
    assert found.advice == (advice if verdict == "warning" else "")


def test_a_limit_on_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctors.resource, "getrlimit", lambda _: (256, 4096))
    files = of(list(doctors._limits()), "files")
    assert (files.verdict, files.advice) == ("warning", "ulimit -n 4096: each link takes several")


def test_wrong_arguments() -> None:
    for wrong in ({"listen": "h:x"}, {"advertise": "h:x"}):
        with pytest.raises(PCCLError, match="INVALID_ARGUMENT"):
            examine("h:1", **wrong)
