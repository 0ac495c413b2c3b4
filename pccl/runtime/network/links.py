"""Opens the connections between peers that the engine or a state transfer then takes over.

The first message on every connection to a peer's port states its purpose (`LinkHello`, `StateHello`, `ProbeHello`); the
answer is `Accepted` or `Rejected`. Padding detects paths that lose full-size packets (wrong MTU): the opening and
`Accepted` are followed by enough random bytes to fill packets, except within one host:

    dialer -> acceptor   opening | padding
    acceptor -> dialer   (Challenge and proof), Accepted | padding
    dialer -> acceptor   the purpose of the connection

The acceptor reads the padding before it answers, and the dialer reads it before it uses the connection. A dialed link
fails early only if none of its full-size packets arrived, or if the answer arrived without its padding.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import trio

from pccl.protocol import messages as m
from pccl.protocol.auth import Keys
from pccl.protocol.codec import ProtocolError, encode, harmless
from pccl.protocol.names import peer_named
from pccl.runtime.network import addresses, handshake
from pccl.runtime.network.datagrams import Datagrams
from pccl.runtime.network.shared_memory import SharedMemory
from pccl.runtime.network.system import SYSTEM, System
from pccl.runtime.network.wire import ConnectionLost, SocketChannel, receive_exactly, receive_some, send_bytes
from pccl.runtime.threads.tasks import start_task

OPENING_TIMEOUT_S = 10.0
"""Time limit for an opening."""
PADDING_TIMEOUT_S = 8.0
"""Time limit for padding, within OPENING_TIMEOUT_S, so that the dialer gives up first."""
PADDING_SEGMENTS = 2
SEGMENT_BYTES = 1460
"""Size of a connection's packets if the system does not report it."""
LOOKS = 8
"""Number of progress checks within `reach_s`."""
REMEDY = (
    "small packets get through but full-size ones do not: is the path's MTU right? Lower it on the hosts' "
    "interfaces (1420 for WireGuard), or set net.ipv4.tcp_mtu_probing=1"
)

Payload = Keys | SharedMemory | Datagrams | None
"""What a connection's payload needs: keys with which it may be encrypted, memory in which it travels, or datagrams."""

_padding = memoryview(os.urandom(m.PADDING_BYTES_MAX))
"""Random, so that tunnels cannot compress it."""
_discarded = memoryview(bytearray(m.PADDING_BYTES_MAX))
"""Buffer for received padding."""


class LinkError(Exception):
    """A connection to another peer could not be established; the text gives the addresses and the reasons."""


@dataclass
class Attempt:
    """The progress of a connection attempt."""

    sock: trio.socket.SocketType | None = None
    """The connected socket."""
    has_received: bool = False
    accepted_at: float | None = None
    is_padded: bool = False
    """Whether some of the other side's padding has arrived."""

    @property
    def reaches_peer(self) -> bool:
        if self.sock is None:
            return False
        return self.has_received or self.sock.fileno() < 0 or not unacknowledged_bytes(self.sock)

    @property
    def reaches_here(self) -> bool:
        return self.is_padded or (self.sock is not None and _has_arrived(self.sock))

    @property
    def remedy(self) -> str:
        if self.sock is None or not padding_bytes(self.sock):  # within one host
            return ""
        return "" if (self.reaches_peer if self.accepted_at is None else self.reaches_here) else f"; {REMEDY}"


def unacknowledged_bytes(sock: trio.socket.SocketType | socket.socket) -> int:
    return _ioctl(sock, getattr(termios, "TIOCOUTQ", None))


def _has_arrived(sock: trio.socket.SocketType) -> bool:
    return _ioctl(sock, getattr(termios, "FIONREAD", None)) > 0


def _ioctl(sock: trio.socket.SocketType | socket.socket, what: int | None) -> int:
    if what is None:
        return 0
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), what, struct.pack("i", 0)))[0])
    except (OSError, ValueError):
        return 0


def padding_bytes(sock: trio.socket.SocketType) -> int:
    """Return the number of bytes that fill this connection's packets; 0 within one host."""
    try:
        segment_bytes = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    except OSError:
        segment_bytes = SEGMENT_BYTES
    if segment_bytes > m.PADDING_BYTES_MAX:
        return 0
    return min(PADDING_SEGMENTS * segment_bytes, m.PADDING_BYTES_MAX)


class _PaddingChannel(SocketChannel):
    def __init__(self, sock: trio.socket.SocketType, attempt: Attempt, padding_bytes: int) -> None:
        super().__init__(sock)
        self._attempt = attempt
        self._due_bytes = padding_bytes

    async def send_frame(self, frame: bytes) -> None:
        due_bytes, self._due_bytes = self._due_bytes, 0
        await super().send_frame(frame + _padding[:due_bytes] if due_bytes else frame)

    async def receive_body(self) -> bytes:
        body = await super().receive_body()
        self._attempt.has_received = True
        return body


async def accept(sock: trio.socket.SocketType, shares_memory: bool = False, uses_udp: bool = False) -> None:
    count = padding_bytes(sock)
    await send_bytes(sock, encode(m.Accepted(count, shares_memory, uses_udp)) + _padding[:count])


async def receive_padding(sock: trio.socket.SocketType, opening: m.PeerOpening, timeout_s: float) -> None:
    if not opening.padding_bytes:
        return
    with trio.move_on_after(timeout_s) as scope:
        await receive_exactly(sock, _discarded[: opening.padding_bytes])
    if scope.cancelled_caught:
        raise ConnectionLost(f"peer {opening.sender} did not send full-size packets within {timeout_s:g} s; {REMEDY}")


async def until_used(sock: trio.socket.SocketType) -> None:
    """Wait until the dialer uses an accepted connection or has acknowledged all data. Raises ConnectionLost."""
    if not unacknowledged_bytes(sock):
        return
    try:
        is_used = await sock.recv(1, socket.MSG_PEEK)
    except OSError as error:
        raise ConnectionLost(error.strerror or str(error)) from None
    if not is_used:
        raise ConnectionLost("closed by the dialer")


async def dial(
    member: m.PeerInfo,
    master_host: str,
    opening: m.PeerOpening,
    token: str,
    attempt: Attempt,
    system: System = SYSTEM,
) -> tuple[trio.socket.SocketType, Payload]:
    """Return an accepted connection to `member` that has carried full-size packets in both directions, and its keys
    (`handshake.Dialled`) or the memory that it shares with `member`. `attempt` is updated with the progress. Raises
    LinkError."""
    failures, rejection = [], ""
    for host in addresses.reachable(member.hosts, master_host):
        where = addresses.join(host, member.port)
        try:
            sock = system.stream(await system.dial(host, member.port))
        except OSError as error:
            failures.append(f"{where}: {error.strerror or error}")
            continue
        attempt.sock, attempt.has_received, attempt.accepted_at, attempt.is_padded = sock, False, None, False
        count = padding_bytes(sock)
        padded = msgspec.structs.replace(opening, padding_bytes=count)
        offered = None
        if isinstance(padded, m.LinkHello):
            padded, offered = _add_offer(padded, sock, system)
        channel = _PaddingChannel(sock, attempt, count)
        try:
            dialled = await handshake.dial_keyed(channel, token, opening.run, padded, m.PeerAnswer)
            if isinstance(dialled.answer, m.Accepted):
                attempt.accepted_at = trio.current_time()
                rest = _discarded[: dialled.answer.padding_bytes]
                while rest:
                    rest = rest[await receive_some(sock, rest) :]
                    attempt.is_padded = True
                return sock, _use_offer(offered, dialled, sock)
            failures.append(f"{where}: rejected")
            rejection = f"{harmless(dialled.answer.reason)}; "
        except (ConnectionLost, ProtocolError) as error:
            failures.append(f"{where}: {error}{attempt.remedy}")
        except OSError as error:
            failures.append(f"{where}: {error.strerror or error}")
        except BaseException:
            _discard(sock, offered)
            raise
        _discard(sock, offered)
    raise LinkError(f"{rejection}{peer_named(member.peer, member.name)} at {'; '.join(failures)}")


def _add_offer(
    opening: m.LinkHello, sock: trio.socket.SocketType, system: System
) -> tuple[m.LinkHello, SharedMemory | Datagrams | None]:
    if opening.udp_secret:
        over_udp = system.offer_datagrams(sock, opening.udp_secret)
        port, secret = (over_udp.port, over_udp.secret) if over_udp is not None else (0, b"")
        return msgspec.structs.replace(opening, udp_secret=secret, udp_port=port), over_udp
    memory = None if opening.encrypt else system.share_memory(sock)
    return msgspec.structs.replace(opening, memory=memory.offer if memory is not None else b""), memory


def _use_offer(
    offered: SharedMemory | Datagrams | None, dialled: handshake.Dialled, sock: trio.socket.SocketType
) -> Payload:
    if isinstance(offered, Datagrams) and dialled.answer.uses_udp:
        offered.sock.connect(sock.getpeername())
        offered.keys = dialled.keys
        return offered
    if isinstance(offered, SharedMemory) and dialled.answer.shares_memory:
        return offered
    if offered is not None:
        offered.close()
    return dialled.keys


def _discard(sock: trio.socket.SocketType, offered: SharedMemory | Datagrams | None) -> None:
    sock.close()
    if offered is not None:
        offered.close()


async def dial_within(
    member: m.PeerInfo,
    master_host: str,
    opening: m.PeerOpening,
    token: str,
    timeout_s: float,
    system: System = SYSTEM,
) -> tuple[trio.socket.SocketType, Payload]:
    taken: list[tuple[trio.socket.SocketType, Payload]] = []

    def take(_: int, sock: trio.socket.SocketType, payload: Payload) -> None:
        taken.append((sock, payload))

    try:
        await dial_link(member, master_host, lambda _: opening, 1, token, take, timeout_s, timeout_s, system)
    except BaseException:
        for sock, payload in taken:
            _discard(sock, payload if isinstance(payload, SharedMemory | Datagrams) else None)
        raise
    return taken[0]


async def dial_link(
    member: m.PeerInfo,
    master_host: str,
    hello: Callable[[int], m.PeerOpening],
    connections: int,
    token: str,
    take: Callable[[int, trio.socket.SocketType, Payload], None],
    reach_s: float,
    timeout_s: float,
    system: System = SYSTEM,
) -> None:
    """Open all connections of a link concurrently and pass each to `take` with its index. Raises LinkError after
    `timeout_s`, after `reach_s` if no connection has delivered full-size packets, or `reach_s` after the first was
    accepted if none has received any."""
    failure: LinkError | None = None
    attempts = [Attempt() for _ in range(connections)]
    standing = 0

    def fail(error: LinkError) -> None:
        nonlocal failure
        failure = failure or error
        nursery.cancel_scope.cancel()

    async def one(index: int) -> None:
        nonlocal standing
        try:
            take(index, *await dial(member, master_host, hello(index), token, attempts[index], system))
        except LinkError as error:
            fail(error)
        standing += 1
        if standing == connections:
            nursery.cancel_scope.cancel()

    async def bound() -> None:
        start_s = now_s = trio.current_time()
        pause_s = reach_s
        while now_s < start_s + timeout_s and (now_s < start_s + reach_s or not _is_stuck(attempts, reach_s)):
            await trio.sleep(min(pause_s, start_s + timeout_s - now_s))
            now_s, pause_s = trio.current_time(), reach_s / LOOKS
        furthest = max(attempts, key=_progress)
        reason = f"no answer within {round(now_s - start_s, 1):g} s{furthest.remedy}"
        where = ", ".join(addresses.join(host, member.port) for host in member.hosts)
        fail(LinkError(f"{peer_named(member.peer, member.name)} at {where}: {reason}"))

    async with trio.open_nursery() as nursery:
        start_task(nursery, bound)
        for index in range(connections):
            start_task(nursery, one, index)
    if failure is not None:
        raise failure


def _progress(attempt: Attempt) -> tuple[bool, bool, bool]:
    return attempt.accepted_at is not None, attempt.reaches_peer, attempt.sock is not None


def _is_stuck(attempts: Sequence[Attempt], reach_s: float) -> bool:
    if not any(each.reaches_peer for each in attempts):
        return True
    accepted = [each for each in attempts if each.accepted_at is not None]
    if not accepted or any(each.reaches_here for each in accepted):
        return False
    return trio.current_time() >= min(each.accepted_at or 0.0 for each in accepted) + reach_s
