"""Clocks are brought together from what timestamps and ops tell."""

from __future__ import annotations

import random

import pytest

from pccl.flight_recorder import OpRecord, PeerTrace, Recording, Trace
from pccl.trace.clocks import WALL_CLOCK_NS, Shift, shifts

US = 1_000
MS = 1_000_000
BEGIN_NS = 10**15


class World:
    """Peers with clocks of their own, which make ops together. Seeded."""

    def __init__(self, ahead_ns: list[int], seed: int, drift: list[float] | None = None) -> None:
        """Each peer's clock shows so much more than the true time, and runs so much faster."""
        self.ahead_ns = ahead_ns
        self.drift = drift or [0.0] * len(ahead_ns)
        self.draw = random.Random(seed)
        self.ops: list[list[OpRecord]] = [[] for _ in ahead_ns]
        self.now_ns = BEGIN_NS

    def clock(self, peer: int, true_ns: int) -> int:
        return true_ns + self.ahead_ns[peer] + int(self.drift[peer] * (true_ns - BEGIN_NS))

    def run_op(self, sequence: int) -> None:
        """All launch it within 100 us, and hear of each other 20 us later at the soonest."""
        draw, world = self.draw, len(self.ops)
        launched = [self.now_ns + draw.randrange(100 * US) for _ in range(world)]
        last = max(range(world), key=launched.__getitem__)
        for peer in range(world):
            others = [other for other in range(world) if other != peer]
            joiner = max(others, key=launched.__getitem__)
            joined = max(launched[joiner] + 20 * US + draw.randrange(30 * US), launched[peer])
            done = max(joined, launched[last] + 20 * US) + draw.randrange(20 * US)
            times = {"joined_ns": joined, "done_ns": done, "agreed_ns": done + 30 * US, "ended_ns": done + 31 * US}
            self.ops[peer].append(
                OpRecord(
                    *(1, 0, sequence, "all_reduce", "direct", "float", 4096, peer, world, 0),
                    launched_ns=self.clock(peer, launched[peer]),
                    joined_last=joiner + 1,
                    result="SUCCESS",
                    **{name: self.clock(peer, at) for name, at in times.items()},
                )
            )
        self.now_ns += 500 * US

    def recording(self, peer: int, clock: str = "") -> Recording:
        return Recording(
            *("run", peer + 1, 0, f"name {peer}", "host", peer, clock or f"clock {peer}"),
            taken_ns=self.clock(peer, self.now_ns),
            taken_unix_ns=10**18 + self.now_ns + self.draw.randrange(-MS, MS),
            ops=self.ops[peer],
            callers=["MainThread"],
        )

    def trace(self, uncertainty_ns: int = 0) -> Trace:
        """As a master of the true time would make it. Without an uncertainty, as from files."""
        peers = []
        for peer in range(len(self.ops)):
            offset = None
            if uncertainty_ns:
                error = self.draw.randrange(-uncertainty_ns, uncertainty_ns)
                offset = self.clock(peer, self.now_ns) - self.now_ns + error
            peers.append(PeerTrace(peer + 1, f"name {peer}", self.recording(peer), "", offset, uncertainty_ns))
        return Trace("run", "the master's clock" if uncertainty_ns else "", peers)


def causal(trace: Trace, found: dict[int, Shift]) -> bool:
    """Whether nobody is done with an op before all have launched it."""
    launched: dict[tuple[int, int, int], int] = {}
    for peer in trace.peers:
        assert peer.recording is not None
        for op in peer.recording.ops:
            at = op.launched_ns + found[peer.peer].shift_ns
            launched[op.name] = max(launched.get(op.name, 0), at)
    return all(
        op.done_ns + found[peer.peer].shift_ns >= launched[op.name]
        for peer in trace.peers
        if peer.recording is not None
        for op in peer.recording.ops
    )


@pytest.mark.parametrize("seed", range(5))
def test_ops_narrow_what_timestamps_leave_open(seed: int) -> None:
    world = World([0, 3_000 * MS, -70 * MS], seed)
    for sequence in range(500):
        world.run_op(sequence)
    trace = world.trace(uncertainty_ns=2 * MS)
    found = shifts(trace)
    assert causal(trace, found)
    first = found[1].shift_ns
    for peer in (1, 2):
        relative = found[peer + 1].shift_ns - first
        assert abs(relative + world.ahead_ns[peer] - world.ahead_ns[0]) <= found[peer + 1].uncertainty_ns
        assert found[peer + 1].uncertainty_ns < 100 * US
        assert found[peer + 1].source == "timestamps and ops"
    assert abs(first) <= found[1].uncertainty_ns == 2 * MS


def test_files_are_brought_together_by_calendar_and_ops() -> None:
    world = World([0, 3_000 * MS], 1)
    for sequence in range(100):
        world.run_op(sequence)
    trace = world.trace()
    found = shifts(trace)
    assert causal(trace, found)
    assert abs(found[2].shift_ns - found[1].shift_ns + 3_000 * MS) < 100 * US
    assert {each.source for each in found.values()} == {"same clock", "calendar and ops"}


def test_without_ops_there_are_the_timestamps() -> None:
    world = World([5 * MS, 9 * MS], 1)
    found = shifts(world.trace(uncertainty_ns=MS))
    for peer, shift in found.items():
        assert (shift.uncertainty_ns, shift.source) == (MS, "timestamps")
        assert abs(shift.shift_ns + world.ahead_ns[peer - 1]) <= MS
    assert {shift.uncertainty_ns for shift in shifts(world.trace()).values()} == {0, WALL_CLOCK_NS}


def test_processes_of_one_machine_need_no_shift() -> None:
    world = World([0, 0], 1)
    peers = [PeerTrace(peer + 1, "", world.recording(peer, "one"), "", 12 * MS, MS) for peer in range(2)]
    found = shifts(Trace("run", "one", peers))
    assert set(found.values()) == {Shift(0, 0, "same clock")}


def test_a_clock_that_runs_faster_is_compared_at_the_end() -> None:
    """500 ppm for three seconds are more than ops leave room for."""
    world = World([0, 0], 1, drift=[0.0, 500e-6])
    for sequence in range(6_000):
        world.run_op(sequence)
    trace = world.trace(uncertainty_ns=4 * MS)
    found = shifts(trace)
    ahead_ns = world.clock(1, world.now_ns) - world.now_ns
    assert abs(found[2].shift_ns - found[1].shift_ns + ahead_ns) < 200 * US


def test_a_trace_that_was_cut_off_still_has_offsets() -> None:
    world = World([5 * MS, 9 * MS], 1)
    whole = world.trace(uncertainty_ns=MS)
    found = shifts(Trace("", "", whole.peers, "cut off"))
    assert {shift.source for shift in found.values()} == {"timestamps"}
