"""Somebody in the process closes descriptors that are not its own."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from pccl import Communicator, MasterNode, PCCLError, Result
from pccl.logs import AboutLogger
from pccl.runtime.session.driver import Lifetime, SessionError
from tests.support.cluster import SUM, WAIT_S, Background, ones, reduce_once, results, together, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for the descriptors where Linux lists them")


SCRIPT = """
import os, sys
import numpy as np
from pccl import Communicator, PCCLError, ReduceOp
peer = Communicator(sys.argv[1])
peer.connect()
x = np.ones(8, np.float32)
peer.all_reduce(x, op=ReduceOp.SUM)
os.closerange(3, 1024)
try:
    while True:
        x[:] = 1
        peer.all_reduce(x, op=ReduceOp.SUM)
except PCCLError as error:
    print(error.result.name, error)
    print("as it was" if np.all(x == 1) else x)
os._exit(7)
"""


def polls() -> set[int]:
    """Descriptors of epoll sets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if "eventpoll" in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except FileNotFoundError:
            continue
    return found


def test_the_engine_ends_and_says_why(master: MasterNode) -> None:
    before = polls()
    one = Communicator(master.address)
    one.connect()
    mine = polls() - before
    assert mine
    other = Communicator(master.address)
    joining = Background(other.connect)
    until(one.are_peers_pending, "the other one waits")
    one.update_topology()
    joining.result()
    assert together([partial(reduce_once, peer) for peer in (one, other)]) == [2, 2]
    for fd in mine:
        os.close(fd)
    arrays = [ones(1 << 16), ones(1 << 16)]
    calls = [
        Background(partial(peer.all_reduce, array, op=SUM, timeout=WAIT_S))
        for peer, array in zip((one, other), arrays, strict=True)
    ]
    found = [call.outcome() for call in calls]
    if results(found) == [Result.SUCCESS] * 2:  # it had not come to notice
        calls = [Background(partial(peer.all_reduce, ones(), op=SUM, tag=1)) for peer in (one, other)]
        until(lambda: calls[0].is_over, "it has noticed")
        found = [call.outcome() for call in calls]
    assert isinstance(found[0], PCCLError)
    assert found[0].result is Result.INTERNAL_ERROR
    assert "closes descriptors that are not its own" in str(found[0])
    assert "bug" not in str(found[0])
    if not isinstance(found[1], PCCLError):  # the engine had sent all of its part before it ended
        found[1] = Background(partial(other.all_reduce, ones(), op=SUM, tag=2)).outcome()
    assert isinstance(found[1], PCCLError)
    assert found[1].result in (Result.RANK_CONNECTION_LOST, Result.TOO_FEW_PEERS)
    until(lambda: other.world_size == 1, "the other one goes on alone")
    assert all(np.all((array == 1) | (array == 2)) for array in arrays)
    one.close()
    other.close()


def test_all_of_them_may_be_closed(master: MasterNode) -> None:
    """The descriptors of the event loop, on which everything waits, are among them."""
    one = Communicator(master.address)
    one.connect()
    command = [sys.executable, "-c", SCRIPT, master.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until(one.are_peers_pending, "the other one waits")
        one.update_topology()

        def reduce_on() -> None:
            while True:
                reduce_once(one)

        left = Background(reduce_on).outcome()
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 7, err
    assert out.startswith("INTERNAL_ERROR"), out
    assert "closes descriptors that are not its own" in out
    assert out.endswith("as it was\n")
    assert isinstance(left, PCCLError)
    assert left.result in (Result.RANK_CONNECTION_LOST, Result.TOO_FEW_PEERS)
    one.close()


def test_all_waits_end_though_those_of_trio_cannot() -> None:
    ended: list[SessionError] = []

    def fails(_: SessionError) -> None:
        raise RuntimeError("must be called from async context")

    lifetime = Lifetime(AboutLogger(logging.getLogger("pccl.peer"), dict), lambda _: None)
    lifetime.at_end(fails)
    lifetime.at_end(ended.append)
    with pytest.raises(RuntimeError, match="async context"):
        lifetime.fail(Result.INTERNAL_ERROR, "closed")
    assert ended == [lifetime.failure]
    assert lifetime.ended.is_set()
