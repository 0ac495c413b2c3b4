"""Finds this host's network interfaces and addresses: Gloo wants to be told which to use."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 16


def loopback_interface() -> str | None:
    """Return the name of the loopback interface: `lo` on Linux, `lo0` on macOS."""
    return next((name for _, name in socket.if_nameindex() if name.rstrip("0123456789") == "lo"), None)


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this address, None if that cannot be found out."""
    if ipaddress.ip_address(address).is_loopback:
        return loopback_interface()
    if not sys.platform.startswith("linux"):
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_NAME_BYTES}s24x", name.encode())
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[_NAME_BYTES + 4 : _NAME_BYTES + 8]) == address:
                    return name
    return None


def address_towards(host: str) -> str:
    """Return the address of this host from which `host`, a name or an address, is reached. Nothing is sent."""
    family, kind, protocol, _, destination = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as one:
        one.connect(destination)
        return str(one.getsockname()[0])
