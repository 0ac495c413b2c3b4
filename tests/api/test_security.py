"""Warnings about runs at public addresses, and the addresses that count as public."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest

from pccl import Communicator, MasterNode, security
from pccl.runtime.network import addresses


@pytest.fixture(autouse=True)
def _unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "_has_warned", False)
    monkeypatch.delenv("PCCL_TOKEN", raising=False)


def has(monkeypatch: pytest.MonkeyPatch, *found: str) -> None:
    monkeypatch.setattr(addresses, "source_addresses", lambda: list(found))


def heard(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(warning.category is security.ExposedWarning for warning in caught)
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def serve(token: str = "") -> None:
    with MasterNode("0.0.0.0:0", token=token):
        pass


def test_warning_for_a_public_master_without_token(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "10.0.0.1", "8.8.4.4")
    node = MasterNode("0.0.0.0:0")
    (text,) = heard(node.run)
    node.interrupt()
    assert node.wait(60)
    assert "8.8.4.4 without a token" in text
    assert "--token-file" in text
    assert heard(serve) == []


def test_no_warning_with_token_or_private_address(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "8.8.4.4")
    assert heard(lambda: serve("secret")) == []
    with MasterNode("127.0.0.1:0"):
        pass
    has(monkeypatch, "192.168.1.7", "fd00::1", "100.64.0.1")
    assert heard(serve) == []


def test_warning_for_a_public_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, "8.8.4.4")
    assert heard(lambda: Communicator("127.0.0.1")) == []
    assert heard(lambda: Communicator("example.org", token="secret")) == []
    assert heard(lambda: Communicator("example.org", listen="10.0.0.1:0")) == []
    assert len(heard(lambda: Communicator("example.org"))) == 1


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("127.0.0.1", None),
        ("localhost", None),
        ("::1", None),
        ("10.1.2.3", None),
        ("fe80::1%lo", None),
        ("8.8.4.4", "8.8.4.4"),
        ("2001:4860:4860::8844", "2001:4860:4860::8844"),
        ("", "8.8.4.4"),
        ("::", "8.8.4.4"),
    ],
)
def test_public_reach(monkeypatch: pytest.MonkeyPatch, host: str, found: str | None) -> None:
    has(monkeypatch, "10.0.0.1", "8.8.4.4")
    assert addresses.public_reach(host) == found


def test_own_addresses_are_valid() -> None:
    addresses.public_reach("")
