"""A program whose main thread ends while its MasterNode runs serves until a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from pccl import Communicator
from pccl.runtime.network import addresses
from tests.support.cluster import WAIT_S, Cluster, together, until

BEGIN = """
import atexit, sys
atexit.register(lambda: print("the last callback"))  # buffered
import pccl

def begin():
    node = pccl.MasterNode(listen_address="127.0.0.1:0")
    node.run()
    print(node.address, flush=True)
    return node
"""
DROPPED = "begin()\n"
EXITS = "node = begin()\nsys.exit()\n"
GOES_ON = "continues until Ctrl-C or SIGTERM"


class Program:
    """A Python program of the text, which prints its master's address."""

    def __init__(self, text: str, folder: Path) -> None:
        file = folder / "program.py"
        file.write_text(BEGIN + text)
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            bufsize=0,  # `communicate` does not see bytes that a buffer has read
        )
        self.address = self.hear(self.process.stdout)

    def hear(self, pipe: IO[bytes] | None) -> str:
        """The next line."""
        assert pipe is not None
        watch = threading.Timer(WAIT_S, self.process.kill)
        watch.start()
        line = pipe.readline().decode().strip()
        watch.cancel()
        return line

    def until_it_says(self, words: str) -> None:
        """Check that the next line on its stderr has these words."""
        assert words in self.hear(self.process.stderr)

    def end(self, word: str = "") -> tuple[int, str, str]:
        """Gives it a word; how it ended, and what else it has said on stdout and stderr."""
        out, err = self.process.communicate(word.encode(), timeout=WAIT_S)
        return self.process.returncode, out.decode(), err.decode()


@contextmanager
def running(text: str, folder: Path) -> Iterator[Program]:
    program = Program(text, folder)
    try:
        yield program
    finally:
        program.process.kill()
        program.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
@pytest.mark.parametrize("text", [DROPPED, EXITS], ids=["dropped", "exits"])
def test_master_node_serves_until_a_signal(tmp_path: Path, text: str, number: signal.Signals) -> None:
    with running(text, tmp_path) as program:
        program.until_it_says(f"the master at {program.address} {GOES_ON}")
        cluster = Cluster(program.address)
        cluster.join(3)
        together([peer.optimize_topology for peer in cluster.peers])
        program.process.send_signal(number)
        assert program.end() == (-number, "the last callback\n", "")
        addresses.listen(*addresses.parse(program.address)).close()
        cluster.close_all()


def test_signal_handler_interrupts_a_master_node(tmp_path: Path) -> None:
    text = """
import signal
node = begin()
signal.signal(signal.SIGTERM, lambda *_: node.interrupt())
"""
    with running(text, tmp_path) as program:
        program.until_it_says(GOES_ON)
        program.process.terminate()
        assert program.end() == (0, "the last callback\n", "")


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("node = begin()\nnode.interrupt()\n", 0, ""),
        ("with pccl.MasterNode('127.0.0.1:0') as node:\n    print(node.address, flush=True)\n    sys.exit(3)\n", 3, ""),
        ("begin()\nraise KeyboardInterrupt\n", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os\nbegin()\nif os.fork():\n    1 / 0\n", 1, "ZeroDivisionError: division by zero"),
    ],
    ids=["interrupted", "with and an exit", "Ctrl-C before the end", "a fork"],
)
def test_program_with_a_master_node_ends(tmp_path: Path, text: str, code: int, says: str) -> None:
    with running(text, tmp_path) as program:
        returned, out, err = program.end()
        assert (returned, GOES_ON in err) == (code, False)
        # Unbuffered, a fork's lines may come within each other.
        assert "the last callback" in out
        assert not out.replace("the last callback", "").strip()
        assert err.rstrip().endswith(says) if says else err == ""


def test_peer_of_a_program_that_ended_leaves(tmp_path: Path) -> None:
    text = """
node = begin()
comm = pccl.Communicator(node.address)
comm.connect()
while comm.world_size < 2:
    if comm.are_peers_pending():
        comm.update_topology()
"""
    with running(text, tmp_path) as program, Communicator(program.address) as peer:
        while peer.world_size < 2:
            if peer.are_peers_pending():
                peer.update_topology()
        program.until_it_says(GOES_ON)
        until(lambda: peer.world_size == 1, "it has left")
        program.process.terminate()
        assert program.end()[0] == -signal.SIGTERM


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_multiprocessing_process_serves(tmp_path: Path, method: str) -> None:
    text = f"""
import multiprocessing
if __name__ == "__main__":
    process = multiprocessing.get_context({method!r}).Process(target=begin)
    process.start()
    sys.stdin.readline()
    process.terminate()
    process.join()
    print(process.exitcode in (0, -15))
"""
    with running(text, tmp_path) as program:
        program.until_it_says(GOES_ON)
        with Communicator(program.address) as peer:
            assert peer.world_size == 1
        returned, out, err = program.end("now\n")
        assert (returned, err) == (0, "")
        assert "True" in out.splitlines()
