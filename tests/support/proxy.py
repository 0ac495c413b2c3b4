"""A proxy between peers and a master that resets connections on request, or after a number of bytes."""

from __future__ import annotations

import re
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from pccl.runtime.network import addresses
from tests.support.cluster import WAIT_S

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
PIECE_BYTES = 4096
PEEK_BYTES = 64


@dataclass(eq=False)
class Route:
    """One connection through the proxy."""

    peer: socket.socket
    master: socket.socket
    is_for_heartbeats: bool
    carried: int = 0
    """Bytes in both directions."""
    until: int | None = None
    """The connection is reset after this many carried bytes."""
    is_over: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reset(self) -> None:
        """Reset the connection at both ends; bytes in flight are lost."""
        with self.lock:
            self.is_over = True
            for sock in (self.peer, self.master):
                with suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                sock.close()


class Proxy:
    """Forwards bytes between `address` and the target, in its own threads."""

    def __init__(self, target: str, budget: Callable[[str], int | None] = lambda _: None) -> None:
        """`budget(opening)` returns the number of bytes after which to reset a connection whose first message has this
        name, such as "Reattach", or None for never."""
        self._target = addresses.parse(target)
        self._budget = budget
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.routes: list[Route] = []
        self.is_open = True
        """If False, new connections are reset."""
        self.resets = 0
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, peer)

    def _serve(self, peer: socket.socket) -> None:
        try:
            peer.settimeout(WAIT_S)
            opening = peer.recv(PEEK_BYTES, socket.MSG_PEEK)
            if not self.is_open:
                raise ConnectionResetError
            master = socket.create_connection(self._target)
        except OSError:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            peer.close()
            return
        name = re.search(rb"[A-Z]\w+", opening)
        opening_name = name[0].decode() if name else ""
        for sock in (peer, master):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(WAIT_S)
        route = Route(peer, master, opening_name == "HeartbeatHello", until=self._budget(opening_name))
        self.routes.append(route)
        try:
            self._pass_on(route)
        except OSError:
            route.reset()
        except ValueError:  # raised by selectors for a socket that another thread has closed
            assert route.is_over

    def _pass_on(self, route: Route) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(route.peer, selectors.EVENT_READ, route.master)
            selector.register(route.master, selectors.EVENT_READ, route.peer)
            while not route.is_over and selector.get_map():
                for key, _ in selector.select(0.02):
                    if route.is_over:
                        return
                    source, sink = key.fileobj, key.data
                    assert isinstance(source, socket.socket)
                    data = source.recv(PIECE_BYTES)
                    if not data:
                        sink.shutdown(socket.SHUT_WR)
                        selector.unregister(source)
                        continue
                    if route.until is not None and route.carried + len(data) >= route.until:
                        sink.sendall(data[: route.until - route.carried])
                        self.reset(route)
                        return
                    sink.sendall(data)
                    route.carried += len(data)
        route.reset()

    def reset(self, route: Route) -> None:
        if not route.is_over:
            self.resets += 1
            route.reset()

    def reset_all(self, heartbeats: bool = True, control: bool = True) -> None:
        """Reset the open connections: those for heartbeats, or the others."""
        for route in list(self.routes):
            if heartbeats if route.is_for_heartbeats else control:
                self.reset(route)

    def close(self) -> None:
        self.is_open = False
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for route in list(self.routes):
            route.reset()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
