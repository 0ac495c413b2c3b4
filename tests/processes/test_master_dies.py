"""The master is killed while peers reduce: a restarted one, or a standby, continues the run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes.conftest import Run, Start
from tests.processes.harness import Worker
from tests.support.cluster import until

COUNT = 2**20
ITERATIONS = 120
MASTER_TIMEOUT_S = 30.0
PEER_TIMEOUT_S = 2.0


def _hear_iteration(worker: Worker, iteration: int) -> None:
    while worker.hear() != {"iteration": iteration}:
        pass


def _ends(worker: Worker) -> list[list[Any]]:
    while "seconds" not in (message := worker.hear()):
        pass
    assert not message.get("error"), message
    return message["value"]  # type: ignore[no-any-return]


def _sums(world: int) -> list[list[Any]]:
    return [["SUCCESS", world, float(sum(range(world)) + world * iteration)] for iteration in range(ITERATIONS)]


def test_master_killed_and_restarted(start: Start, run: Run) -> None:
    (master,) = start(1)
    address = master.do("listen", peer_timeout=PEER_TIMEOUT_S)
    peers = run(3, address, master_timeout=MASTER_TIMEOUT_S)
    for seed, peer in enumerate(peers):
        peer.begin("reduce_many", count=COUNT, seed=seed, iterations=ITERATIONS)
    for kill in range(3):
        _hear_iteration(peers[0], 3 + 2 * kill)
        master.kill()
        (master,) = start(1)
        assert master.do("listen", address=address, peer_timeout=PEER_TIMEOUT_S) == address
    assert [_ends(peer) for peer in peers] == [_sums(3)] * 3
    (newcomer,) = start(1)
    newcomer.begin("connect", master=address)
    for peer in peers:
        peer.begin("gather", world=4)
    assert [worker.answer().error for worker in (*peers, newcomer)] == [""] * 4


def test_standby_takes_over(start: Start, run: Run) -> None:
    primary, standby = start(2)
    first = primary.do("listen", peer_timeout=PEER_TIMEOUT_S)
    second = standby.do("listen", peer_timeout=PEER_TIMEOUT_S, standby_of=first)
    peers = run(3, f"{first},{second}", master_timeout=MASTER_TIMEOUT_S)
    for seed, peer in enumerate(peers):
        peer.begin("reduce_many", count=COUNT, seed=seed, iterations=ITERATIONS)
    _hear_iteration(peers[1], 3)
    primary.kill()
    assert [_ends(peer) for peer in peers] == [_sums(3)] * 3
    (newcomer,) = start(1)
    newcomer.begin("connect", master=f"{first},{second}", master_timeout=MASTER_TIMEOUT_S)
    for peer in peers:
        peer.begin("gather", world=4)
    assert [worker.answer().error for worker in (*peers, newcomer)] == [""] * 4
    # The old master returns and leads no run.
    (again,) = start(1)
    again.do("listen", address=first, peer_timeout=PEER_TIMEOUT_S)
    (late,) = start(1)
    late.begin("connect", master=f"{first},{second}", master_timeout=MASTER_TIMEOUT_S)
    for peer in (*peers, newcomer):
        peer.begin("gather", world=5)
    assert [worker.answer().error for worker in (*peers, newcomer, late)] == [""] * 5


@pytest.mark.parametrize("kind", ["update_topology", "sync"])
def test_call_survives_a_killed_master(start: Start, run: Run, kind: str) -> None:
    (master,) = start(1)
    address = master.do("listen", peer_timeout=PEER_TIMEOUT_S)
    peers = run(2, address, master_timeout=MASTER_TIMEOUT_S)
    for seed, peer in enumerate(peers):
        peer.do("array", name="x", count=COUNT, seed=seed)
        peer.do("state", name="s", arrays=["x"])
    arguments = {"name": "s"} if kind == "sync" else {}
    peers[0].begin(kind, **arguments)
    peers[0].until_asleep()
    master.kill()
    peers[1].begin(kind, **arguments)
    (master,) = start(1)
    master.do("listen", address=address, peer_timeout=PEER_TIMEOUT_S)
    assert [peer.answer().error for peer in peers] == [""] * 2
    if kind == "sync":
        assert peers[0].do("digest", name="x") == peers[1].do("digest", name="x")


def test_stopped_master_continues(start: Start, run: Run) -> None:
    (master,) = start(1)
    address = master.do("listen", peer_timeout=1.0)
    peers = run(2, address, master_timeout=MASTER_TIMEOUT_S)
    master.stop()
    for peer in peers:
        until(lambda peer=peer: not peer.do("has_master"), "it is missed")  # type: ignore[misc]
    for seed, peer in enumerate(peers):
        peer.begin("reduce_many", count=COUNT, seed=seed, iterations=ITERATIONS)
        _hear_iteration(peer, 0)
    master.resume()
    assert [_ends(peer) for peer in peers] == [_sums(2)] * 2


def test_master_timeout_ends_the_session(start: Start, run: Run) -> None:
    (master,) = start(1)
    address = master.do("listen", peer_timeout=PEER_TIMEOUT_S)
    peers = run(4, address, master_timeout=0.5)
    for lost in (master, peers[0], peers[3]):
        lost.process.kill()
    for peer in peers[1:3]:
        peer.begin("update_topology")
    for peer in peers[1:3]:
        answer = peer.answer()
        assert answer.error == "MASTER_CONNECTION_FAILED"
        assert "no master has taken over within 0.5 s" in answer.text
