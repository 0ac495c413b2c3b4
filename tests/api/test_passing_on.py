"""What a signal handler raises comes out of the calls that catch its type for reasons of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from pccl import Communicator, MasterNode, PCCLError, Result, SharedState, _exchanges, flight_recorder, security, status
from pccl._replacement import Replacement
from pccl.runtime.network import addresses
from pccl.runtime.threads import portal
from tests.support.interrupts import AlarmError, refused
from tests.support.ringing import Ring, ringing

IP_ADDRESS = "pccl.runtime.network.addresses.ipaddress.ip_address"
RESOLVE = "pccl.runtime.network.addresses.socket.getaddrinfo"
SOCKET = "pccl.runtime.network.addresses.socket.socket"
PARSE = "pccl.runtime.network.addresses.parse"
PARSE_MASTERS = "pccl.runtime.network.addresses.parse_masters"

STUBBED: dict[str, tuple[str, Callable[[], Any]]] = {
    "a communicator's addresses": (IP_ADDRESS, lambda: Communicator("127.0.0.1:1", token="of the run")),
    "whether one is unspecified": (IP_ADDRESS, lambda: addresses.is_unspecified("127.0.0.1")),
    "public reach by name": (RESOLVE, lambda: addresses.public_reach("localhost")),
    "public reach by socket": (SOCKET, lambda: addresses.public_reach("")),
    "a master's address": (PARSE, lambda: MasterNode("127.0.0.1:0")),
    "a master's resolver": (RESOLVE, lambda: MasterNode("localhost:0").run()),
    "a master's socket": (SOCKET, lambda: MasterNode("0.0.0.0:0").run()),
    "a status' masters": (PARSE_MASTERS, lambda: status.run_status("127.0.0.1:1")),
    "a trace's masters": (PARSE_MASTERS, lambda: flight_recorder.collect("127.0.0.1:1")),
}


@pytest.mark.parametrize("what", STUBBED)
def test_a_handlers_error_is_not_that_of(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    place, call = STUBBED[what]
    with ringing(AlarmError("of the program")) as ring:
        monkeypatch.setattr(place, ring)
        call()


def test_a_masters_ports_are_free_after_a_handlers_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listen, opened = addresses.listen, []

    def noting(*arguments: Any, **named: Any) -> Any:
        opened.append(listen(*arguments, **named))
        return opened[-1]

    monkeypatch.setattr(addresses, "listen", noting)
    with ringing(AlarmError("of the program")) as ring:
        monkeypatch.setattr("pccl._default_state.FenceFile", ring)
        MasterNode("127.0.0.1:0", state=tmp_path / "state", http="127.0.0.1:0").run()
    assert [each.fileno() for each in opened] == [-1, -1]


@pytest.mark.parametrize("text", ["PCCL_PEER_TIMEOUT", "PCCL_ENGINE_THREADS"])
def test_a_handlers_error_is_no_wrong_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(text, "7")
    with ringing(AlarmError("of the program")) as ring:
        monkeypatch.setattr(f"pccl.master_node.{'float' if 'TIMEOUT' in text else 'int'}", ring, raising=False)
        MasterNode("127.0.0.1:0")


def test_a_handlers_error_does_not_go_under_as_a_master_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    master = MasterNode("127.0.0.1:0")
    with ringing(refused()) as ring, master, monkeypatch.context() as patched:
        patched.setattr(master, "interrupt", ring)
        master.__exit__(RuntimeError, RuntimeError("of the block"), None)


@pytest.mark.parametrize("call", [status.run_status, flight_recorder.collect])
@pytest.mark.parametrize("kind", [trio.TooSlowError, portal.PortalClosedError])
def test_a_handlers_error_is_no_lack_of_an_answer(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[str], Any], kind: type[Exception]
) -> None:
    with ringing(kind("of the program")) as ring:
        monkeypatch.setattr(portal, "current", ring)
        call("127.0.0.1:1")


def test_a_handlers_error_is_not_that_of_a_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_TLS_CA", "some file")
    with ringing(AlarmError("of the program")) as ring:
        monkeypatch.setattr("ssl.create_default_context", ring)
        security.client_tls(None, "connect")


class Iterated:
    """A sequence that rings as it is gone through."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    def __iter__(self) -> Iterator[Any]:
        self._ring()
        return iter([1])


def test_a_handlers_error_is_no_wrong_argument() -> None:
    with ringing(AlarmError("of the program")) as ring:
        SharedState(Iterated(ring))  # type: ignore[arg-type]
    with ringing(AlarmError("of the program")) as ring:
        _exchanges._checked(Iterated(ring), [1], 1, "all_to_all")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stubbed", "error"),
    [("os.stat", FileNotFoundError(2, "of the program")), ("shutil.copymode", AlarmError("of the program"))],
    ids=["stat", "copymode"],
)
def test_a_handlers_error_is_not_that_of_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stubbed: str, error: Exception
) -> None:
    path = tmp_path / "file"
    with ringing(error) as ring, monkeypatch.context() as patched:
        patched.setattr(f"pccl._replacement.{stubbed}", ring)
        with Replacement(path) as replacement:
            replacement.write(b"content")
    assert not list(tmp_path.iterdir())


def test_what_no_handler_has_raised_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AlarmError("of the resolver")

    monkeypatch.setattr(RESOLVE, fail)
    with pytest.raises(PCCLError, match="cannot listen on localhost:0: of the resolver") as raised:
        MasterNode("localhost:0").run()
    assert raised.value.result is Result.INVALID_ARGUMENT
