"""Processes whose log nobody reads, and loops that stand still: nobody may wait for them for ever."""

from __future__ import annotations

import _thread
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio

from pccl import AsyncCommunicator, MasterNode, PCCLError, Result
from pccl.runtime.extension import ffi
from pccl.runtime.network import addresses
from pccl.runtime.threads import progress
from tests.support.cluster import SUM, WAIT_S, Background, Cluster, ones, reduce_once, refusal, until

PEER_TIMEOUT_S = 2.0

# A process whose own logging handler waits for ever once it was told to.
STUCK = """
import logging, os, sys, threading
import pccl

class Stuck(logging.Handler):
    is_stuck = False

    def emit(self, record):
        if Stuck.is_stuck:
            print("stuck", flush=True)
            os.read(never, 1)

never, _ = os.pipe()
logging.getLogger("pccl").addHandler(Stuck())
logging.getLogger("pccl").setLevel(logging.DEBUG)
{begin}
sys.stdin.readline()
Stuck.is_stuck = True
sys.stdin.readline()
os._exit(0)
"""
MASTER = f"""
node = pccl.MasterNode("127.0.0.1:0", peer_timeout={PEER_TIMEOUT_S})
node.run()
print(node.address, flush=True)
"""
PEER = """
peer = pccl.Communicator(sys.argv[1], listen=sys.argv[2])
peer.connect()
print("in", flush=True)
"""


class Process:
    def __init__(self, begin: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", STUCK.format(begin=begin), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first_line = self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def get_stuck(self, address: str) -> None:
        """Have the handler get stuck with the next record that it hears."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        heard = Background(self._line)
        while not heard.is_over:  # it may not have read that yet
            with socket.create_connection(addresses.parse(address)) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            heard._thread.join(0.05)
        assert heard.result() == "stuck"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def process(begin: str, *arguments: str) -> Iterator[Process]:
    made = Process(begin, *arguments)
    try:
        yield made
    finally:
        made.close()


def test_a_master_whose_log_nobody_reads_goes_on_leading(full_pipe: tuple[int, int]) -> None:
    _, writing = full_pipe
    environment = {**os.environ, "PCCL_LOG_LEVEL": "DEBUG"}
    command = [sys.executable, "-P", "-m", "pccl", "master", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing, env=environment, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().rpartition(" ")[2].strip()
            cluster = Cluster(address, timeout=WAIT_S)
            for _ in range(5):
                cluster.join(3)
                cluster.each(reduce_once)
                while cluster.peers:
                    cluster.close(cluster.peers[-1])
            process.terminate()
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()


def test_a_master_that_stands_still_is_left_for_a_standby() -> None:
    with process(MASTER) as first:
        options = {"peer_timeout": PEER_TIMEOUT_S, "standby_of": first.first_line}
        with MasterNode("127.0.0.1:0", **options) as standby:  # type: ignore[arg-type]
            cluster = Cluster(f"{first.first_line},{standby.address}", timeout=WAIT_S, master_timeout=WAIT_S)
            cluster.join(3)
            cluster.each(reduce_once)
            first.get_stuck(first.first_line)
            cluster.each(lambda peer, _: peer.update_topology())
            assert cluster.each(reduce_once) == [3, 3, 3]
            cluster.close_all()


def test_a_session_that_stands_still_is_left_out(nobody: str) -> None:
    with MasterNode("127.0.0.1:0", peer_timeout=PEER_TIMEOUT_S) as master:
        cluster = Cluster(master.address, timeout=WAIT_S)
        cluster.join(2)

        def let_in() -> None:
            while cluster[0].world_size < 3:
                cluster.each(lambda peer, _: peer.update_topology())

        admitting = Background(let_in)
        with process(PEER, master.address, nobody) as third:
            assert third.first_line == "in"
            admitting.result()
            third.get_stuck(nobody)
            error = refusal(lambda: cluster[0].all_reduce(ones(), op=SUM))
            assert error.result is Result.RANK_CONNECTION_LOST
            until(lambda: [peer.world_size for peer in cluster.peers] == [2, 2], "it is left out")
            assert cluster.each(reduce_once) == [2, 2]
            cluster.close_all()


def in_a_program_that_computes(seconds: float) -> list[int]:
    """The world that a peer in a user's trio program sees before and after it has held up that program for so long."""
    worlds = []
    compute = time.sleep

    async def main(address: str) -> None:
        async with AsyncCommunicator(address) as peer:
            entered.set()
            with trio.fail_after(WAIT_S):
                while peer.membership.world_size < 2:
                    if await peer.are_peers_pending():
                        await peer.update_topology()
                worlds.append(peer.membership.world_size)
                compute(seconds)
                await peer.are_peers_pending()
                worlds.append(peer.membership.world_size)

    def play() -> None:
        try:
            trio.run(main, master.address)
        except PCCLError as error:
            worlds.append(0 if error.result is Result.MASTER_CONNECTION_FAILED else -1)

    entered = threading.Event()
    with MasterNode("127.0.0.1:0", peer_timeout=1.0) as master:
        program = Background(play)
        assert entered.wait(WAIT_S)
        cluster = Cluster(master.address, timeout=WAIT_S)
        other = cluster.new()
        other.connect()
        while len(worlds) < 2:
            other.are_peers_pending()
        program.result()
        other.close()
    return worlds


@pytest.mark.parametrize(("hold_s", "worlds"), [(60.0, [2, 2]), (1.0, [2, 0])])
def test_a_users_trio_program_may_compute_for_as_long_as_is_tolerated(
    hold_s: float, worlds: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "HOLD_S", hold_s)
    monkeypatch.setattr(progress, "STILL_S_MIN", 0.3)
    assert in_a_program_that_computes(5.0) == worlds


def test_watch_that_garbage_collection_ends_does_not_wait_for_itself() -> None:
    watch = progress._Watch()
    number = watch.begin(ffi.new("pccl_progress *"), 1.0)

    def collected() -> None:
        with watch._lock:
            watch.end(number)

    Background(collected).result()


def test_standstill_shows_stacks(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "TOLD_S", 0.1)
    watch, turns = progress._Watch(), ffi.new("pccl_progress *")
    number = watch.begin(turns, 0.01)
    until(lambda: "test_standstill_shows_stacks" in capfd.readouterr().err, "the stacks")
    watch.end(number)


def test_a_run_does_not_wait_for_the_thread_that_watches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread may have its first turn late, on a busy machine."""
    watch = progress._Watch()
    go_on, done = threading.Event(), threading.Event()
    begun: list[object] = []

    def begin() -> None:
        go_on.wait()
        watch.begin(ffi.new("pccl_progress *"), 1.0)
        done.set()

    def never(function: object, *rest: object, **options: object) -> int:
        begun.append(function)
        return 0

    threading.Thread(target=begin, daemon=True).start()
    monkeypatch.setattr(_thread, "start_new_thread", never)
    monkeypatch.setattr(threading, "_start_new_thread", never, raising=False)
    monkeypatch.setattr(threading, "_start_joinable_thread", never, raising=False)
    go_on.set()
    assert done.wait(WAIT_S)
    assert len(begun) == 1
