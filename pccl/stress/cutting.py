"""Breaks a connection of this very process to another peer, as a stateful firewall or a rebooting router would."""

from __future__ import annotations

import socket
from contextlib import suppress
from random import Random

from pccl.stress.sockets import own_sockets


def cut_one(random: Random, master: str) -> bool:
    """Shuts down one TCP connection that does not lead to the master; False where there is none."""
    master_port = int(master.rpartition(":")[2])
    return any(_cut(sock, master_port) for sock in own_sockets(random))


def _cut(sock: socket.socket, master_port: int) -> bool:
    with suppress(OSError):  # not connected
        if sock.getpeername()[1] != master_port:
            sock.shutdown(socket.SHUT_RDWR)
            return True
    return False
