"""Connections between peers over paths that carry small packets only, as an acceptor sees or feigns them."""

from __future__ import annotations

import re
import socket
from collections.abc import Awaitable, Callable

import pytest
import trio
from trio.testing import MockClock

from pccl.protocol import messages as m
from pccl.protocol.codec import encode
from pccl.runtime.network import links
from pccl.runtime.network.links import LinkError, dial_link, dial_within
from pccl.runtime.network.wire import ConnectionLost, receive_exactly, receive_message
from tests.support.cluster import WAIT_S

HELLO = m.ProbeHello(m.PROTOCOL_VERSION, "run", 2, 1, pulls=False)
REACH_S = 0.3
SEGMENT_BYTES = 1400
"""Packet size of all connections here: those within one host have larger ones, and no padding."""
Serve = Callable[[trio.socket.SocketType], Awaitable[None]]


async def hear(sock: trio.socket.SocketType) -> m.PeerOpening:
    opening: m.PeerOpening = await receive_message(sock, m.PeerOpening)
    await links.receive_padding(sock, opening, WAIT_S)
    return opening


async def accepts(sock: trio.socket.SocketType) -> None:
    assert (await hear(sock)).padding_bytes > 0
    await links.accept(sock)
    await trio.sleep_forever()


async def hears_the_first_words_only(sock: trio.socket.SocketType) -> None:
    await receive_message(sock, m.PeerOpening)
    await trio.sleep_forever()


async def says_the_first_words_only(sock: trio.socket.SocketType) -> None:
    await hear(sock)
    await links.send_bytes(sock, encode(m.Accepted(padding_bytes=1000)))
    await trio.sleep_forever()


async def is_busy(sock: trio.socket.SocketType) -> None:
    await trio.sleep(3 * REACH_S)
    await accepts(sock)


def dial(serve: Serve, timeout_s: float, room_bytes: int = 0) -> str:
    """Return what becomes of a link of two connections with somebody who `serve`s them, whose system takes no more than
    about `room_bytes` that nobody reads: the error, or "" if it is made."""

    async def one(sock: trio.socket.SocketType) -> None:
        with sock:
            await serve(sock)

    async def run() -> str:
        taken: list[int] = []

        def take(index: int, sock: trio.socket.SocketType, _: object) -> None:
            taken.append(index)
            sock.close()

        with trio.fail_after(WAIT_S), trio.socket.socket() as listener:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
            if room_bytes:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room_bytes)
            await listener.bind(("127.0.0.1", 0))
            listener.listen()
            member = m.PeerInfo(1, 0, ["127.0.0.1"], listener.getsockname()[1], 2)

            async def listen() -> None:
                while True:
                    nursery.start_soon(one, (await listener.accept())[0])

            async with trio.open_nursery() as nursery:
                nursery.start_soon(listen)
                error = ""
                try:
                    await dial_link(member, "127.0.0.1", lambda _: HELLO, 2, "", take, REACH_S, timeout_s)
                except LinkError as failure:
                    error = str(failure)
                nursery.cancel_scope.cancel()
        assert error or sorted(taken) == [0, 1]
        return error

    return trio.run(run)


def test_both_ends_send_full_size_packets_before_a_connection_counts() -> None:
    assert dial(accepts, WAIT_S) == ""


def test_padding_fills_packets_and_there_is_none_where_it_could_not() -> None:
    async def run(segment_bytes: int) -> int:
        with trio.socket.socket() as listener, trio.socket.socket() as dialer:
            if segment_bytes:
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)
            await listener.bind(("127.0.0.1", 0))
            listener.listen()
            await dialer.connect(listener.getsockname())
            segment_bytes = dialer.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
            padding_bytes = links.padding_bytes(dialer)
            assert padding_bytes >= segment_bytes or (padding_bytes == 0 and segment_bytes > m.PADDING_BYTES_MAX)
            return padding_bytes

    assert 0 < trio.run(run, SEGMENT_BYTES) <= links.PADDING_SEGMENTS * SEGMENT_BYTES
    assert 0 < trio.run(run, 8960) <= m.PADDING_BYTES_MAX
    trio.run(run, 0)


def test_a_busy_process_is_waited_for() -> None:
    """The system of a busy process has taken what was sent."""
    assert dial(is_busy, WAIT_S) == ""


@pytest.mark.skipif(not hasattr(links.termios, "TIOCOUTQ"), reason="the system does not tell what lies in its queue")
def test_lost_full_size_packets_fail_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "padding_bytes", lambda _: m.PADDING_BYTES_MAX)  # less where there is so little room
    error = dial(hears_the_first_words_only, WAIT_S, room_bytes=2048)
    assert "peer 1 at 127.0.0.1:" in error
    assert "no answer within 0.3 s" in error
    assert "is the path's MTU right?" in error


def test_lost_full_size_answers_fail_link() -> None:
    error = dial(says_the_first_words_only, WAIT_S)
    assert "peer 1 at 127.0.0.1:" in error
    assert "is the path's MTU right?" in error


def test_silent_peer_is_no_mtu_problem() -> None:
    error = dial(hears_the_first_words_only, 2 * REACH_S)
    assert re.search(r"no answer within (0\.6|1\.2) s", error)  # the second where the machine has stood still
    assert "MTU" not in error


def test_mtu_is_not_to_blame_within_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "padding_bytes", lambda _: 0)
    monkeypatch.setattr(links, "unacknowledged_bytes", lambda _: 100)  # as with a full backlog
    error = dial(hears_the_first_words_only, 2 * REACH_S)
    assert "no answer within" in error
    assert "MTU" not in error


def test_acceptor_reports_missing_padding() -> None:
    async def run() -> None:
        ours, theirs = trio.socket.socketpair()
        with ours, theirs:
            opening = m.ProbeHello(m.PROTOCOL_VERSION, "run", 2, 1, pulls=False, padding_bytes=1000)
            await ours.send(bytes(999))
            with pytest.raises(ConnectionLost, match=r"peer 2 did not send full-size packets within 0\.1 s.*MTU"):
                await links.receive_padding(theirs, opening, 0.1)

    trio.run(run)


def test_acceptor_waits_for_use_or_padding() -> None:
    async def run() -> None:
        ours, theirs = trio.socket.socketpair()
        with ours, theirs, trio.fail_after(WAIT_S):
            await links.until_used(theirs)
            await theirs.send(b"padding")  # which nobody takes
            with trio.move_on_after(0.05) as scope:
                await links.until_used(theirs)
            assert scope.cancelled_caught
            await ours.send(b"engine")
            await links.until_used(theirs)
            assert await receive_exactly(theirs, bytearray(6)) == b"engine"

    trio.run(run)


def test_a_single_connection_is_bounded_too() -> None:
    async def run() -> None:
        with trio.fail_after(WAIT_S), trio.socket.socket() as listener:
            await listener.bind(("127.0.0.1", 0))
            listener.listen()
            member = m.PeerInfo(1, 0, ["127.0.0.1"], listener.getsockname()[1], 2)
            with pytest.raises(LinkError, match=r"peer 1 at 127\.0\.0\.1:\d+: no answer within 0\.1 s"):
                await dial_within(member, "127.0.0.1", HELLO, "", 0.1)

    trio.run(run, clock=MockClock(autojump_threshold=0.05))
