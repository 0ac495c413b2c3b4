"""Addresses as people write them, and where a peer is dialled."""

from __future__ import annotations

import errno
import socket

import pytest

from pccl.runtime.network import addresses


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10.1.2.3:5000", ("10.1.2.3", 5000)),
        ("master.example:48148", ("master.example", 48148)),
        ("master.example", ("master.example", addresses.DEFAULT_PORT)),
        ("[::1]:7", ("::1", 7)),
        ("[fe80::1%eth0]", ("fe80::1%eth0", addresses.DEFAULT_PORT)),
        ("::1", ("::1", addresses.DEFAULT_PORT)),
        (" localhost:0 ", ("localhost", 0)),
    ],
)
def test_parse(text: str, expected: tuple[str, int]) -> None:
    assert addresses.parse(text) == expected


@pytest.mark.parametrize("text", ["", ":5", "host:", "host:x", "host:65536", "host:-1", "[::1", "[::1]x", "host:٣"])
def test_parse_names_what_is_wrong(text: str) -> None:
    with pytest.raises(ValueError, match="address"):
        addresses.parse(text)


@pytest.mark.parametrize("text", ["48150", "48150:48148"])
def test_port_without_host_is_recognized(text: str) -> None:
    with pytest.raises(ValueError, match=r"48150 is a port: write 0\.0\.0\.0:48150 to listen on all interfaces"):
        addresses.parse(text)


@pytest.mark.parametrize("address", [("10.0.0.1", 5), ("::1", 48148), ("name", 1)])
def test_join_is_the_inverse_of_parse(address: tuple[str, int]) -> None:
    assert addresses.parse(addresses.join(*address)) == address


def test_a_loopback_address_stands_for_the_masters_machine() -> None:
    assert addresses.reachable(["127.0.0.1"], "10.0.0.9") == ["10.0.0.9"]
    assert addresses.reachable(["::1", "10.0.0.9"], "10.0.0.9") == ["10.0.0.9"]
    assert addresses.reachable(["127.0.0.1"], "127.0.0.1") == ["127.0.0.1"]
    assert addresses.reachable(["10.0.0.5", "localhost"], "10.0.0.9") == ["10.0.0.5", "10.0.0.9"]


def test_an_ipv4_address_in_ipv6_clothes_becomes_plain() -> None:
    assert addresses.plain_host(("::ffff:10.0.0.1", 5, 0, 0)) == "10.0.0.1"
    assert addresses.plain_host(("fe80::1", 5, 0, 0)) == "fe80::1"


@pytest.mark.parametrize("host", ["", "0.0.0.0", "127.0.0.1", "localhost"])
def test_listen_takes_ipv4_connections(host: str) -> None:
    with addresses.listen(host, 0) as listener:
        port = listener.getsockname()[1]
        family = listener.family
        target = "::1" if host == "localhost" and family == socket.AF_INET6 else "127.0.0.1"
        with socket.create_connection((target, port), 5):
            pass


def test_every_interface_means_ipv6_too() -> None:
    with addresses.listen("", 0) as listener, socket.create_connection(("::1", listener.getsockname()[1]), 5):
        pass


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_a_port_in_use_is_named(host: str) -> None:
    with addresses.listen(host, 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(OSError, match=f"{port}.*in use") as caught:
            addresses.listen(host, port)
        assert caught.value.errno == errno.EADDRINUSE
