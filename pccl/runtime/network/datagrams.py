"""UDP in place of a connection's TCP stream (`native/src/wire_udp.c`).

The dialer offers a secret and a port of its own in `LinkHello`; the acceptor opens a socket at its peer's port, the
number that it listens at, and says so in `Accepted`. Both sockets are connected. The TCP connection of the handshake is
closed.
"""

from __future__ import annotations

import errno
import secrets
import socket
import sys
from dataclasses import dataclass

import trio

from pccl.protocol.auth import Keys
from pccl.runtime.extension import lib
from pccl.runtime.threads.process import number_of

SECRET_BYTES: int = lib.PCCL_UDP_SECRET_BYTES


@dataclass
class Datagrams:
    """One end: a socket that has a link's bytes or will be connected for them, and the secret of both ends."""

    sock: socket.socket
    secret: bytes
    is_dialer: bool
    keys: Keys | None = None
    """For encryption."""

    @property
    def port(self) -> int:
        return int(self.sock.getsockname()[1])

    def close(self) -> None:
        self.sock.close()


def is_available() -> bool:
    return sys.platform.startswith("linux") and bool(number_of("PCCL_UDP", 1, 1))


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def offer(stream: trio.socket.SocketType, secret: bytes) -> Datagrams:
    """Return the dialer's end, not yet connected, at the address of its connection. Raises OSError."""
    return Datagrams(_bound(stream, 0), secret, is_dialer=True)


def open_offered(stream: trio.socket.SocketType, secret: bytes, port: int) -> Datagrams:
    """Return the acceptor's end. Raises OSError."""
    if len(secret) != SECRET_BYTES or not 0 < port < 65536:
        raise OSError(errno.EINVAL, "not an offer")
    sock = _bound(stream, stream.getsockname()[1])
    try:
        host, _, *rest = stream.getpeername()
        sock.connect((host, port, *rest))
    except BaseException:
        sock.close()
        raise
    return Datagrams(sock, secret, is_dialer=False)


def _bound(stream: trio.socket.SocketType, port: int) -> socket.socket:
    if not is_available():
        raise OSError(errno.EOPNOTSUPP, "no UDP on this system, or PCCL_UDP is 0")
    sock = socket.socket(stream.family, socket.SOCK_DGRAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        host, _, *rest = stream.getsockname()
        sock.bind((host, port, *rest))
    except BaseException:
        sock.close()
        raise
    return sock
