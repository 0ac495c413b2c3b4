"""A measurement of how long a run of three peers stands still when something falls silent, in a lab:

python -m tests.wan.outage [--peer-timeout 5] [--delay-ms 1]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from tests.processes.harness import Worker
from tests.wan.lab import Lab, Link

PEERS = 3
COUNT = 100_000
WAIT_S = 60.0
MASTER_OUT_TIMEOUTS = 2.0
"""The peer timeouts while the master's cable is out."""
AFTER_TIMEOUTS = 4.0
"""The peer timeouts while the run is watched after that."""


@dataclass(frozen=True)
class Stage:
    """A lab whose first host has the master, and the others a peer each, all in a loop of reduces."""

    lab: Lab
    master: Worker
    peers: list[Worker]

    def cut(self, sender: int, receiver: int) -> None:
        """Block everything from one host to another. Host 0 is the master's."""
        self.lab.block(self.lab.hosts[sender], self.lab.hosts[receiver])


def stop(stage: Stage) -> None:
    stage.peers[-1].stop()


def pull_cable(stage: Stage) -> None:
    stage.lab.hosts[PEERS].down()


def block_one_way(stage: Stage) -> None:
    stage.cut(PEERS - 1, PEERS)


def block_other_way(stage: Stage) -> None:
    stage.cut(PEERS, PEERS - 1)


def block_both_ways(stage: Stage) -> None:
    stage.cut(PEERS - 1, PEERS)
    stage.cut(PEERS, PEERS - 1)


def silence_to_master(stage: Stage) -> None:
    stage.cut(PEERS, 0)


def silence_of_master(stage: Stage) -> None:
    stage.cut(0, PEERS)


FAULTS: dict[str, Callable[[Stage], None]] = {
    "SIGSTOP of a peer": stop,
    "a peer's cable pulled": pull_cable,
    "peer 2 to peer 3 blocked": block_one_way,
    "peer 3 to peer 2 blocked": block_other_way,
    "peers 2 and 3 blocked": block_both_ways,
    "peer 3 to the master blocked": silence_to_master,
    "the master to peer 3 blocked": silence_of_master,
}


@dataclass(frozen=True)
class Outage:
    seconds: float
    """The times from the fault to the first commit in the next view, one for every survivor."""
    lost: int
    """Peers that are not in that view."""


@contextmanager
def _staged(peer_timeout_s: float, link: Link) -> Iterator[Stage]:
    with Lab(PEERS + 1, link) as lab, ExitStack() as stack:
        workers = [Worker(host.namespace.command([])) for host in lab.hosts]
        for worker in workers:
            stack.callback(worker.discard)
        master, *peers = workers
        host = lab.hosts[0].address
        address = f"{host}:{master.do('listen', peer_timeout=peer_timeout_s, address=f'{host}:0').rpartition(':')[2]}"
        for world, peer in enumerate(peers, 1):
            peer.begin("connect", master=address)
            for other in peers[: world - 1]:
                other.begin("gather", world=world)
            for each in peers[:world]:
                answer = each.answer()
                assert not answer.error, answer.text
        for seed, peer in enumerate(peers):
            peer.begin("reduce_loop", count=COUNT, seed=seed, tail=1)
        for peer in peers:
            _until(peer, lambda message: message.get("iteration", 0) >= 5)
        yield Stage(lab, master, peers)


def outage(fault: Callable[[Stage], None], peer_timeout_s: float, link: Link) -> Outage:
    with _staged(peer_timeout_s, link) as stage:
        start_s = time.monotonic()
        fault(stage)
        ends_s = [_commit_s(peer) for peer in stage.peers if peer.is_running]
        commits_s = [end_s - start_s for end_s in ends_s if end_s is not None]
        assert commits_s, "no peer goes on"
        return Outage(max(commits_s), PEERS - len(commits_s))


def outage_of_master(seconds: float, peer_timeout_s: float, link: Link) -> Outage:
    """Its cable is out for that long. `seconds` of what is found: the longest time between two commits."""
    with _staged(peer_timeout_s, link) as stage:
        stage.lab.hosts[0].down()
        time.sleep(seconds)
        stage.lab.hosts[0].up()
        end_s = time.monotonic() + AFTER_TIMEOUTS * peer_timeout_s
        gaps_s = [_longest_gap_s(peer, end_s) for peer in stage.peers]
        kept = [gap_s for gap_s in gaps_s if gap_s is not None]
        assert kept, "no peer goes on"
        return Outage(max(kept), PEERS - len(kept))


def _longest_gap_s(peer: Worker, end_s: float) -> float | None:
    """Between two commits of all peers, up to `end_s`; None if it is lost."""
    gap_s, before_s, is_kept = 0.0, 0.0, False
    while before_s < end_s:
        message = peer.hear(WAIT_S)
        if "seconds" in message:
            return None
        if message.get("verdict") == "SUCCESS":
            is_kept = message["world"] == PEERS
            gap_s = max(gap_s, peer.heard_at_s - before_s) if before_s else 0.0
            before_s = peer.heard_at_s
    return gap_s if is_kept else None


def _until(peer: Worker, condition: Callable[[dict[str, Any]], bool]) -> None:
    while not condition(peer.hear(WAIT_S)):
        pass


def _commit_s(peer: Worker) -> float | None:
    """Return the time of a peer's first commit without the lost one; None if it is the lost one."""
    while "seconds" not in (message := peer.hear(WAIT_S)):
        if message.get("verdict") == "SUCCESS" and message["world"] < PEERS:
            return peer.heard_at_s
    assert message.get("error"), message
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-timeout", type=float, default=5.0)
    parser.add_argument("--delay-ms", type=float, default=1.0)
    arguments = parser.parse_args()
    for name, fault in FAULTS.items():
        found = outage(fault, arguments.peer_timeout, Link(delay_ms=arguments.delay_ms))
        print(f"{name:32} {found.seconds:6.2f} s, {found.lost} lost", flush=True)
    seconds = MASTER_OUT_TIMEOUTS * arguments.peer_timeout
    found = outage_of_master(seconds, arguments.peer_timeout, Link(delay_ms=arguments.delay_ms))
    print(f"the master's cable out for {seconds:g} s {found.seconds:6.2f} s, {found.lost} lost", flush=True)


if __name__ == "__main__":
    main()
