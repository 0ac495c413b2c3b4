"""Messages over real sockets: backlog, cut-off, unauthenticated senders, and bytes left for the next reader."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

import pytest
import trio

from pccl.protocol import messages as m
from pccl.protocol.codec import OPENING_BYTES_MAX, ProtocolError, encode
from pccl.runtime.network.wire import ConnectionLost, ControlConnection, receive_exactly, receive_message

BOUND_S = 60


def run(function: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(BOUND_S):
            await function()

    trio.run(bounded)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        a = socket.create_connection(listener.getsockname())
        b, _ = listener.accept()
    return a, b


def test_messages_arrive_in_order() -> None:
    async def body() -> None:
        a, b = tcp_pair()
        a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sender: ControlConnection[m.FromMaster] = ControlConnection(a, m.FromMaster, OPENING_BYTES_MAX)
        receiver: ControlConnection[m.FromPeer] = ControlConnection(b, m.FromPeer, OPENING_BYTES_MAX)
        sent = [m.Leave("x" * (i % 3000)) for i in range(2000)]
        received: list[object] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.run_sender)
            for message in sent:
                sender.send([message])
            while len(received) < len(sent):
                received += await receiver.receive()
            await sender.flush()
        assert received == sent
        sender.close()
        receiver.close()

    run(body)


def test_flush_sends_backlog() -> None:
    async def body() -> None:
        a, b = tcp_pair()
        sender: ControlConnection[m.FromMaster] = ControlConnection(a, m.FromMaster, OPENING_BYTES_MAX)
        receiver: ControlConnection[m.FromPeer] = ControlConnection(b, m.FromPeer, OPENING_BYTES_MAX)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sender.run_sender)
            sender.send([m.Leave("last words")])
            await sender.flush()
        sender.send([m.Leave("too late")])
        sender.close()
        assert await receiver.receive() == [m.Leave("last words")]
        with pytest.raises(ConnectionLost, match="closed by the other side"):
            await receiver.receive()
        receiver.close()

    run(body)


def test_part_waits_for_other_side() -> None:
    async def body() -> None:
        a, b = tcp_pair()
        leaver: ControlConnection[m.FromMaster] = ControlConnection(a, m.FromMaster, OPENING_BYTES_MAX)
        stayer: ControlConnection[m.FromPeer] = ControlConnection(b, m.FromPeer, OPENING_BYTES_MAX)
        has_parted = trio.Event()

        async def part() -> None:
            await leaver.part()
            has_parted.set()
            leaver.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(leaver.run_sender)
            nursery.start_soon(stayer.run_sender)
            leaver.send([m.Leave("last words")])
            nursery.start_soon(part)
            stayer.send([m.Leave("x" * 3000)] * 100)
            assert await stayer.receive() == [m.Leave("last words")]
            with pytest.raises(ConnectionLost, match="closed by the other side"):
                await stayer.receive()
            assert not has_parted.is_set()
            await stayer.flush()
            assert not has_parted.is_set()
            stayer.close()
            await has_parted.wait()

    run(body)


def test_a_reset_is_a_lost_connection() -> None:
    async def body() -> None:
        a, b = tcp_pair()
        receiver: ControlConnection[m.FromPeer] = ControlConnection(b, m.FromPeer, OPENING_BYTES_MAX)
        a.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        a.close()
        with pytest.raises(ConnectionLost, match="reset"):
            await receiver.receive()
        receiver.close()

    run(body)


def test_flooded_connection() -> None:
    async def body() -> None:
        a, b = tcp_pair()
        sender: ControlConnection[m.FromMaster] = ControlConnection(a, m.FromMaster, OPENING_BYTES_MAX)
        message = m.Leave("x" * 2**20)
        for _ in range(200):
            sender.send([message])
            if sender.is_flooded:
                break
        assert sender.is_flooded
        sender.shutdown()
        with pytest.raises(ConnectionLost):
            await sender.receive()
        sender.close()
        b.close()

    run(body)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\0", b"\0\0\0\1\xc1", b"\xff" * 100])
def test_garbage_is_a_protocol_error(garbage: bytes) -> None:
    async def body() -> None:
        a, b = tcp_pair()
        receiver: ControlConnection[m.FromPeer] = ControlConnection(b, m.FromPeer, OPENING_BYTES_MAX)
        a.sendall(garbage)
        with pytest.raises(ProtocolError):
            await receiver.receive()
        a.close()
        receiver.close()

    run(body)


def test_receive_message_leaves_later_bytes() -> None:
    async def body() -> None:
        a, b = trio.socket.socketpair()
        with a, b:
            await a.send(encode(m.Accepted()) + b"payload")
            assert await receive_message(b, m.PeerAnswer) == m.Accepted()
            assert await receive_exactly(b, bytearray(7)) == b"payload"

    run(body)


def test_oversized_opening_is_refused() -> None:
    async def body() -> None:
        a, b = trio.socket.socketpair()
        with a, b:
            await a.send((OPENING_BYTES_MAX + 1).to_bytes(4, "big"))
            with pytest.raises(ProtocolError, match=str(OPENING_BYTES_MAX)):
                await receive_message(b, m.PeerOpening)

    run(body)


def test_a_message_cut_off_is_a_lost_connection() -> None:
    async def body() -> None:
        a, b = trio.socket.socketpair()
        with b:
            with a:
                await a.send(encode(m.Rejected("because"))[:-1])
            with pytest.raises(ConnectionLost):
                await receive_message(b, m.PeerAnswer)

    run(body)


def test_detach_leaves_later_bytes() -> None:
    async def body() -> None:
        a, b = tcp_pair()
        receiver: ControlConnection[m.FromPeer] = ControlConnection(b, m.FromPeer, OPENING_BYTES_MAX)
        a.sendall(encode(m.Leave()))
        assert await receiver.receive() == [m.Leave()]
        a.sendall(b"more")
        with socket.socket(fileno=receiver.detach()) as other:
            other.settimeout(BOUND_S)
            assert other.recv(4) == b"more"
        receiver.close()
        a.close()

    run(body)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such option")
def test_unacknowledged_data_breaks_connection() -> None:
    a, b = tcp_pair()
    connection: ControlConnection[m.FromPeer] = ControlConnection(a, m.FromPeer, OPENING_BYTES_MAX)
    connection.bound_silence(5.0)
    assert a.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
    assert a.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    for timeout_s in (0.1, 1.0, 2.0, 5.0, 60.0, 86_400.0):
        connection.bound_silence(timeout_s)
        idle, interval, broken_ms = (
            a.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
        )
        assert 1000 * (idle + 2 * interval) <= broken_ms, "one probe may be lost, and the next one, too"
        assert broken_ms <= max(3000, 2000 * timeout_s)
    a.close()
    b.close()
