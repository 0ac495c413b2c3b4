"""Names what answers at an address where a pccl master should be.

Whoever mistypes a port meets a web server, an SSH server or a database there. What such a server says is clearly not
pccl's, and its first bytes tell what it is (`named`): a message of pccl's begins with a length below 2**24, so with a
byte 0, and no other protocol that is common on servers does.

Some servers say nothing before they are asked in their own language, or hang up. Then `identify` asks: it makes a
connection of its own, waits a moment for a greeting, and sends a request that web servers and Redis answer, and that a
pccl master refuses in pccl's own words. It is asked once and bounded in time; what it does not recognize it does not
name.
"""

from __future__ import annotations

import socket
from contextlib import suppress

import trio

from pccl.protocol.codec import ProtocolError
from pccl.runtime.network.dialing import Dial, dial_tcp

SEEN_BYTES_MAX = 512
"""The bytes at the beginning of a connection that are kept to recognize who says them."""
GREETING_S = 0.3
"""Time that `identify` gives a server to speak first."""
IDENTIFY_S = 1.5
QUESTION = b"GET / HTTP/1.0\r\n\r\n"
PAGE_HEADER = "Pccl-Master-Port"
"""The header by which the page of a run tells peers that come to it the port of its master."""
SHOWN_MAX = 40

GREETINGS = (
    (b"HTTP/", "a web server"),
    (b"<!DOCTYPE", "a web server"),
    (b"<html", "a web server"),
    (b"<HTML", "a web server"),
    (b"-ERR", "a Redis server"),
    (b"-NOAUTH", "a Redis server"),
    (b"-DENIED", "a Redis server"),
    (b"-MISCONF", "a Redis server"),
    (b"+PONG", "a Redis server"),
    (b"220", "a mail or FTP server"),
    (b"AMQP", "an AMQP broker"),
    (b"RFB ", "a VNC server"),
)
MYSQL_GREETING = b"\0\n"
"""The end of the header of MySQL's first packet, and the version of its protocol."""
TLS_ALERT, TLS_HANDSHAKE = 21, 22
TLS_MAJOR = 3


class StrangerError(ProtocolError):
    """Whoever answers is no pccl master; the text says what it is instead, and what to do."""


def named(first: bytes) -> str:
    """Return what says these first bytes of a connection, in words; empty if they may be pccl's, or are too few."""
    if len(first) < 2 or first[0] == 0:
        return ""
    if first[:5] == b"HTTP/":
        port = _header(first, PAGE_HEADER)
        if port.isdigit():
            return f"the page of a pccl master, which is for browsers: that master's own port is {port}"
    if first[:4] == b"SSH-":
        return f"an SSH server ({_shown(first)})"
    if first[0] in (TLS_ALERT, TLS_HANDSHAKE) and first[1] == TLS_MAJOR:
        return "a server that speaks TLS, and this side does not: give the peer ssl_context= or PCCL_TLS_CA"
    if first[3:5] == MYSQL_GREETING:
        return "a MySQL server"
    for greeting, name in GREETINGS:
        if first.startswith(greeting):
            return name
    text = _shown(first)
    return f"something else, which says {text!r}" if text else "something else, in a language that pccl does not know"


def refusal(first: bytes) -> str:
    """Return the text for somebody who is no master, by its first bytes; empty if it may be one."""
    return no_master(named(first))


def no_master(who: str) -> str:
    """Return the text for somebody who is no master but `who`, as `named` says; empty if that is."""
    return f"this is no pccl master but {who}; check host and port" if who else ""


def _shown(first: bytes) -> str:
    """Return the first line of a text, as far as it is one."""
    line = first.splitlines()[0][:SHOWN_MAX] if first.splitlines() else b""
    text = line.decode("ascii", errors="replace")
    return text if text.isprintable() and "\N{REPLACEMENT CHARACTER}" not in text else ""


def _header(first: bytes, name: str) -> str:
    for line in first.decode("latin-1").split("\r\n")[1:]:
        found, _, value = line.partition(":")
        if found.lower() == name.lower():
            return value.strip()
    return ""


async def identify(host: str, port: int, dial: Dial = dial_tcp) -> str:
    """Return what listens at an address, as `named` does; empty: it is a pccl master, says nothing, or is not there."""
    first = b""
    with trio.move_on_after(IDENTIFY_S), suppress(OSError):
        sock = await dial(host, port)
        try:
            with trio.move_on_after(GREETING_S):
                first = await _heard(sock)
            if not first:
                sock.send(QUESTION)
                first = await _heard(sock)
        finally:
            trio.lowlevel.notify_closing(sock.fileno())
            sock.close()
    return named(first)


async def _heard(sock: socket.socket) -> bytes:
    await trio.lowlevel.wait_readable(sock.fileno())
    return sock.recv(SEEN_BYTES_MAX)
