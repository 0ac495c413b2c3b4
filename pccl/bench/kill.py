"""`pccl bench --kill`: measures what the sudden death of a peer costs the others.

Three peers reduce in a loop; one is sent SIGKILL in the middle of a reduce. Each survivor notes when every one of its
reduces ended and how. A gap is the time between the ends of two consecutive committed reduces of one survivor: the
usual gap is a step, the longest one holds the loss, the new view and the reduce after it.
"""

from __future__ import annotations

import itertools
import statistics
import time

import msgspec

from pccl.bench.errors import BenchError
from pccl.bench.messages import COMMIT, Loop, Step, Steps
from pccl.bench.peers import LocalPeers


class KillPlan(msgspec.Struct, frozen=True):
    bytes: int = 16 << 20
    peers: int = 3
    steps_before: int = 20
    steps_after: int = 20
    connections: int = 0


class Survivor(msgspec.Struct, frozen=True):
    """What the loss has cost one of the peers that stay."""

    rank: int
    verdict: str
    """The verdict on the reduce that was in progress when the peer died."""
    usual_step_s: float
    longest_gap_s: float


class KillReport(msgspec.Struct, frozen=True):
    plan: KillPlan
    survivors: list[Survivor]
    usual_step_s: float
    longest_gap_s: float
    cost_s: float


def measure_kill(plan: KillPlan) -> KillReport:
    victim = plan.peers - 1
    with LocalPeers(plan.peers) as peers:
        peers.connect(plan.connections)
        for rank in range(plan.peers):
            peers.send(rank, Loop(plan.bytes, plan.steps_after, announce_steps=rank == victim))
        steps = [peers.receive(victim, Step) for _ in range(plan.steps_before)]
        time.sleep(statistics.median(step.end_s - step.start_s for step in steps) / 2)
        killed_at_s = time.monotonic()
        peers.kill(victim)
        survivors = [survivor(rank, peers.receive(rank, Steps).steps, killed_at_s) for rank in range(victim)]
    usual_step_s = statistics.median(one.usual_step_s for one in survivors)
    longest_gap_s = max(one.longest_gap_s for one in survivors)
    return KillReport(plan, survivors, usual_step_s, longest_gap_s, longest_gap_s - usual_step_s)


def survivor(rank: int, steps: list[Step], killed_at_s: float) -> Survivor:
    """Return what a survivor's notes say."""
    ends_s = [step.end_s for step in steps if step.verdict == COMMIT]
    gaps_s = [(later - earlier, later) for earlier, later in itertools.pairwise(ends_s)]
    usual_s = [gap_s for gap_s, end_s in gaps_s if end_s < killed_at_s]
    after = [step for step in steps if step.end_s >= killed_at_s]
    # Killed between two reduces, a peer is missed by the second; one survivor may note the end of the first later.
    interrupted = next((step for step in after if step.verdict != COMMIT), after[0] if after else None)
    if interrupted is None or not usual_s:
        raise BenchError(f"rank {rank} did not reduce both before and after the kill")
    return Survivor(rank, interrupted.verdict, statistics.median(usual_s), max(gaps_s)[0])
