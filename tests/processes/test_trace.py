"""A trace of processes whose clocks differ."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from pccl import MasterNode
from pccl.flight_recorder import Trace, collect
from pccl.trace.clocks import Shift, shifts

AHEAD_S = [0, 1000, 50_000]
"""Lead of each peer's monotonic clock over this process's."""
OPS = 60
PEER = """
import sys, numpy, pccl
with pccl.Communicator(sys.argv[1]) as comm:
    while comm.get_attribute(pccl.Attribute.GLOBAL_WORLD_SIZE) < int(sys.argv[2]):
        comm.update_topology()
    for _ in range(int(sys.argv[3])):
        comm.all_reduce(numpy.ones(1000, numpy.float32), op=pccl.ReduceOp.SUM)
    print("reduced", flush=True)
    sys.stdin.read()
"""


def in_time_namespace(ahead_s: int) -> list[str]:
    return ["unshare", "-T", "--monotonic", str(ahead_s), "--fork", "--kill-child"] if ahead_s else []


def has_time_namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*in_time_namespace(1), "true"], capture_output=True).returncode == 0


@contextmanager
def peers(address: str, ahead_s: list[int]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start peers, which stay in the run after their ops."""
    with ExitStack() as stack:
        processes = []
        for each in ahead_s:
            command = [sys.executable, "-P", "-c", PEER, address, str(len(ahead_s)), str(OPS)]
            process = subprocess.Popen(
                [*in_time_namespace(each), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "reduced\n"
        yield processes


def check_causality(trace: Trace, found: dict[int, Shift]) -> None:
    """Check that no peer finishes an op before the last peer launches it."""
    launched: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    done: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for peer in trace.peers:
        assert peer.recording is not None
        for op in peer.recording.ops:
            launched[op.name].append(op.launched_ns + found[peer.peer].shift_ns)
            done[op.name].append(op.done_ns + found[peer.peer].shift_ns)
    assert len(launched) == OPS
    assert all(len(times) == len(AHEAD_S) and min(done[name]) >= max(times) for name, times in launched.items())


@pytest.mark.slow
@pytest.mark.skipif(not has_time_namespaces(), reason="needs root, unshare and time namespaces")
def test_trace_aligns_distant_clocks() -> None:
    with MasterNode("127.0.0.1:0") as node, peers(node.address, AHEAD_S):
        trace = collect(node.address)
    found = shifts(trace)
    assert sorted(round(-shift.shift_ns / 1e9) for shift in found.values()) == AHEAD_S
    for shift in found.values():
        ahead_ns = round(-shift.shift_ns / 1e9) * 10**9
        assert abs(shift.shift_ns + ahead_ns) <= shift.uncertainty_ns
        assert shift.uncertainty_ns < 50_000_000
    check_causality(trace, found)
