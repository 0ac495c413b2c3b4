"""Sockets that are given to an engine: whoever fails, the descriptor is closed, and the caller is not blamed for it."""

from __future__ import annotations

import os
import socket

import pytest

from pccl.runtime.data_plane.engine import Engine
from pccl.runtime.data_plane.events import EngineFailedError


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_closed_engine_leaves_no_descriptor() -> None:
    engine = Engine(1)
    engine.close()
    ours, theirs = socket.socketpair()
    fd = ours.detach()
    with theirs, pytest.raises(EngineFailedError):
        engine.link_add(1, 0, fd)
    assert not is_open(fd)


def test_a_descriptor_that_other_code_has_closed_is_no_wrong_argument() -> None:
    engine = Engine(1)
    ours, theirs = socket.socketpair()
    fd = ours.detach()
    os.close(fd)
    with theirs, pytest.raises(EngineFailedError, match="link_add"):
        engine.link_add(1, 0, fd)
    engine.close()
