"""Where masters that a process group hosts listen, and what address the other ranks are told."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from pccl.runtime.network import addresses
from pccl.torch.hosting import Hosting, advertised_host
from pccl.torch.reconfigure import Reconfigurer

OUTGOING = "192.0.2.7"


@pytest.fixture(autouse=True)
def on_a_host_whose_name_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Debian, where /etc/hosts has the host's name at 127.0.1.1."""
    monkeypatch.delenv("PCCL_ADVERTISE", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.1.1")
    monkeypatch.setattr(addresses, "source_addresses", lambda: [OUTGOING])


@pytest.fixture
def hosting() -> Iterator[Hosting]:
    made = Hosting("127.0.0.1")
    yield made
    made.retire(0.0)


@pytest.mark.parametrize("store", ["127.0.0.1", "localhost", "127.0.1.1"])
def test_loopback_says_that_the_store_is_on_this_machine(store: str) -> None:
    assert advertised_host(store) == "127.0.0.1"


def test_without_a_store_loopback_is_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    assert advertised_host() == OUTGOING
    monkeypatch.setattr(addresses, "source_addresses", list)
    assert advertised_host() == "127.0.0.1"


@pytest.mark.parametrize("store", ["127.0.0.1", "localhost", ""])
def test_a_handle_never_has_loopback_where_there_is_another_address(store: str) -> None:
    """Nobody knows who is going to read it, and where."""
    reconfigurer = Reconfigurer(store)
    assert reconfigurer.handle.host == OUTGOING
    reconfigurer.close()


def test_a_master_at_loopback_is_reached_at_other_addresses_of_its_host(hosting: Hosting) -> None:
    """Other hosts dial it where they have the store."""
    port = addresses.parse(hosting.start_master(2, "secret"))[1]
    socket.create_connection(("127.0.0.2", port)).close()
