"""A ring of plain sockets and NumPy adds, which gives the benchmark a lower bound on time.

It moves the bytes that a ring all-reduce must move, over one TCP connection per neighbour, without frames, checksums,
agreement or recovery. Its time is limited by this machine's TCP and memory or, between hosts, by one TCP stream.

The array is split into one chunk per rank. In step t of 2(W-1), a rank sends chunk r-t and receives chunk r-t-1, all
modulo W. In the first W-1 steps it adds the received chunk to its own; in later steps it replaces its own. A step sends
the chunk received in the previous step, so the steps form one stream: a byte is sent as soon as it is received and
added. A reduce-scatter is the first half, and an all-gather is the second. A broadcast goes around the ring once.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

# In measurements, segments of 64 KiB and 1 MiB were no faster than this.
SEGMENT_BYTES = 256 << 10
JOIN_TIMEOUT_S = 60.0

Call = Callable[[], None]


def chunk_bounds(count: int, world_size: int) -> list[int]:
    """Return the chunk bounds. Chunk c spans the elements from bound c to bound c + 1."""
    return [count * c // world_size for c in range(world_size + 1)]


class _Spans:
    """A cursor over the chunks' byte ranges, in sending or receiving order."""

    def __init__(self, bounds: list[int], chunks: list[int]) -> None:
        spans = [(bounds[c], bounds[c + 1]) for c in chunks if bounds[c] < bounds[c + 1]]
        self._spans = iter(spans)
        self._start, self._stop = next(self._spans, (0, 0))
        self.total_bytes = sum(stop - start for start, stop in spans)
        self.done_bytes = 0

    def next(self, bytes_max: int) -> slice:
        return slice(self._start, min(self._stop, self._start + bytes_max))

    def advance(self, count: int) -> None:
        self.done_bytes += count
        self._start += count
        if self._start == self._stop:
            self._start, self._stop = next(self._spans, (0, 0))


def join_ring(rank: int, addresses: list[tuple[str, int]], listener: socket.socket) -> RawRing:
    """Connect a rank to its neighbours, given all ranks' addresses, and close `listener`. Raise OSError on failure."""
    with listener:
        listener.settimeout(JOIN_TIMEOUT_S)
        # The listen backlog completes a dial before accept(), so ranks may connect in any order.
        next_socket = socket.create_connection(addresses[(rank + 1) % len(addresses)], JOIN_TIMEOUT_S)
        previous_socket, _ = listener.accept()
    next_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return RawRing(rank, len(addresses), previous_socket, next_socket)


class RawRing:
    """One rank's end of the ring. `next_socket` leads to rank + 1, `previous_socket` to rank - 1."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        previous_socket: socket.socket,
        next_socket: socket.socket,
        *,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._previous = previous_socket
        self._next = next_socket
        self._segment_bytes = segment_bytes
        for end in (previous_socket, next_socket):
            end.setblocking(False)

    def barrier(self) -> None:
        """Return once every rank has called it. A token goes around the ring once to gather and once to release."""
        for _ in range(2):
            if self._rank == 0:
                self._send_token()
                self._receive_token()
            else:
                self._receive_token()
                self._send_token()

    def all_reduce(self, values: NDArray[Any], tensors: int = 1) -> Call:
        """Return a call that replaces contiguous `values` with their sum, as one tensor."""
        steps = 2 * (self._world_size - 1)
        return partial(self._stream, values, self._rank, steps, added_steps=steps // 2)

    def reduce_scatter(self, send: NDArray[Any], recv: NDArray[Any]) -> tuple[Call, NDArray[Any]]:
        """Return a call, and the view of `send` that holds this rank's part of the sum after the call."""
        steps = self._world_size - 1
        part = send.reshape(self._world_size, -1)[self._rank]
        return partial(self._stream, send, self._rank - 1, steps, added_steps=steps), part

    def all_gather(self, send: NDArray[Any], recv: NDArray[Any]) -> Call:
        """Return a call that fills `recv` with the rows of all ranks; `send` is this rank's row in `recv`."""
        return partial(self._stream, recv, self._rank, self._world_size - 1, added_steps=0)

    def broadcast(self, array: NDArray[Any]) -> Call:
        return partial(self._pass_on, array, self._world_size - 1)

    def send(self, array: NDArray[Any]) -> Call:
        return partial(self._pass_on, array, 1)

    def _stream(self, values: NDArray[Any], first: int, step_count: int, added_steps: int) -> None:
        """Send chunks `first`, `first - 1`, ... and receive the next ones, adding the first `added_steps` of them."""
        world_size, itemsize = self._world_size, values.itemsize
        bounds = [bound * itemsize for bound in chunk_bounds(values.size, world_size)]
        chunks = [(first - step) % world_size for step in range(step_count + 1)]
        outgoing = _Spans(bounds, chunks[:-1])
        incoming = _Spans(bounds, chunks[1:])
        added_bytes = _Spans(bounds, chunks[1 : added_steps + 1]).total_bytes
        self._run(values, outgoing, incoming, added_bytes, bounds[chunks[0] + 1] - bounds[chunks[0]])

    def _pass_on(self, values: NDArray[Any], last: int) -> None:
        bounds = [0, values.nbytes]
        outgoing = _Spans(bounds, [0] if self._rank < last else [])
        incoming = _Spans(bounds, [0] if 0 < self._rank <= last else [])
        self._run(values, outgoing, incoming, 0, 0 if self._rank else values.nbytes)

    def _run(self, values: NDArray[Any], outgoing: _Spans, incoming: _Spans, added_bytes: int, own_bytes: int) -> None:
        itemsize = values.itemsize
        flat = values.reshape(-1)
        data = flat.view(np.uint8).data
        segment = np.empty(max(self._segment_bytes // itemsize, 1), values.dtype)
        segment_data = segment.view(np.uint8).data
        held = 0  # bytes of an unfinished element at the start of the segment

        while outgoing.done_bytes < outgoing.total_bytes or incoming.done_bytes < incoming.total_bytes:
            # After its own chunk, a rank sends what it has received, in the same order.
            sendable = min(outgoing.total_bytes, own_bytes + incoming.done_bytes) - outgoing.done_bytes
            sent = self._send(data[outgoing.next(sendable)]) if sendable else 0
            outgoing.advance(sent)

            received = 0
            if incoming.done_bytes < added_bytes:
                span = incoming.next(len(segment_data))
                received = self._receive(segment_data[held : span.stop - span.start])
                whole = (held + received) // itemsize
                first = span.start // itemsize
                np.add(flat[first : first + whole], segment[:whole], out=flat[first : first + whole])
                incoming.advance(whole * itemsize)
                rest = held + received - whole * itemsize
                segment_data[:rest] = bytes(segment_data[whole * itemsize : whole * itemsize + rest])
                held = rest
            elif incoming.done_bytes < incoming.total_bytes:
                received = self._receive(data[incoming.next(self._segment_bytes)])
                incoming.advance(received)

            if not sent and not received:
                self._wait(sending=sendable > 0, receiving=incoming.done_bytes < incoming.total_bytes)

    def close(self) -> None:
        self._previous.close()
        self._next.close()

    def _send_token(self) -> None:
        while not self._send(memoryview(b"t")):
            self._wait(sending=True, receiving=False)

    def _receive_token(self) -> None:
        while not self._receive(memoryview(bytearray(1))):
            self._wait(sending=False, receiving=True)

    def _send(self, data: memoryview) -> int:
        try:
            return self._next.send(data)
        except BlockingIOError:
            return 0

    def _receive(self, buffer: memoryview) -> int:
        try:
            count = self._previous.recv_into(buffer)
        except BlockingIOError:
            return 0
        if count == 0:
            raise ConnectionError("the previous rank of the raw ring has closed its connection")
        return count

    def _wait(self, *, sending: bool, receiving: bool) -> None:
        poll = select.poll()
        if sending:
            poll.register(self._next, select.POLLOUT)
        if receiving:
            poll.register(self._previous, select.POLLIN)
        poll.poll()
