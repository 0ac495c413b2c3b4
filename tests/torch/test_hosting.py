"""Where masters that a process group hosts listen, and what address the other ranks are told."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("torch")

from pccl.runtime.network import addresses
from pccl.torch.bootstrap import Hosting, advertised_host
from pccl.torch.reconfigure import Reconfigurer

OUTGOING = "192.0.2.7"


@pytest.fixture(autouse=True)
def on_a_host_whose_name_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Debian, where /etc/hosts has the host's name at 127.0.1.1."""
    monkeypatch.delenv("PCCL_ADVERTISE", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.1.1")
    monkeypatch.setattr(addresses, "source_addresses", lambda: [OUTGOING])


@pytest.mark.parametrize("store", ["127.0.0.1", "localhost", "127.0.1.1"])
def test_loopback_advertised_for_local_store(store: str) -> None:
    assert advertised_host(store) == "127.0.0.1"


def test_loopback_is_last_resort_without_store(monkeypatch: pytest.MonkeyPatch) -> None:
    assert advertised_host() == OUTGOING
    monkeypatch.setattr(addresses, "source_addresses", list)
    assert advertised_host() == "127.0.0.1"


@pytest.mark.parametrize("store", ["127.0.0.1", "localhost", ""])
def test_handle_avoids_loopback(store: str) -> None:
    """Handles may be read on any host."""
    reconfigurer = Reconfigurer(store)
    assert reconfigurer.handle.host == OUTGOING
    reconfigurer.close()


def test_master_listens_on_all_interfaces() -> None:
    """Other hosts dial it where they have the store."""
    hosting = Hosting("127.0.0.1", "secret", founders=2)
    port = addresses.parse(hosting.address)[1]
    socket.create_connection(("127.0.0.2", port)).close()
    hosting.retire(0.0)
