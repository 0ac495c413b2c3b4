"""A process is killed in the middle of ops and calls: survivors have one verdict and equal arrays, and continue."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from pccl import MasterNode
from tests.processes.conftest import Run, Start
from tests.processes.harness import Worker
from tests.support.cluster import until

COUNT = 2 * 2**20
"""8 MiB of float32: long enough under way to be hit."""


@pytest.fixture
def master() -> Iterator[MasterNode]:
    """A master that waits long for silent peers: a killed one is noticed by its connections."""
    with MasterNode("127.0.0.1:0", peer_timeout=3600) as node:
        yield node


def attempts_of(worker: Worker) -> list[dict[str, Any]]:
    """Return a reduce loop's report of each attempt, until it ends."""
    found = []
    while "seconds" not in (message := worker.hear()):
        if "verdict" in message:
            found.append(message)
    assert not message.get("error"), message
    return found


def start_loops(workers: list[Worker], rest_in: dict[Worker, int] | None = None) -> None:
    """Start the loops; `rest_in` maps a worker to the iteration of its stop."""
    for seed, worker in enumerate(workers):
        worker.begin("reduce_loop", count=COUNT, seed=seed, tail=2, rest_in=(rest_in or {}).get(worker))


def hear_iteration(worker: Worker, iteration: int) -> list[dict[str, Any]]:
    """Wait until the iteration begins; return the attempts before it."""
    found = []
    while (message := worker.hear()) != {"iteration": iteration}:
        found.append(message)
    return [message for message in found if "verdict" in message]


@pytest.mark.parametrize("engine_threads", [1, 2])
def test_kill_gives_survivors_equal_results(run: Run, engine_threads: int) -> None:
    with MasterNode("127.0.0.1:0", peer_timeout=3600, engine_threads=engine_threads) as master:
        *survivors, victim = workers = run(3, master.address)
        start_loops(workers)
        hear_iteration(victim, 4)
        victim.kill()
        attempts = [attempts_of(worker) for worker in survivors]
    one, other = ([end for end in ends if end["verdict"] == "SUCCESS"] for ends in attempts)
    assert one == other
    assert [end["iteration"] for end in one] == list(range(len(one)))
    assert [end["world"] for end in one][-3:] == [3, 2, 2]
    for end in attempts[0] + attempts[1]:
        if end["verdict"] != "SUCCESS":
            # A peer that had not launched the op yet when the loss was settled never sees it fail.
            assert end == {"iteration": len(one) - 2, "verdict": "RANK_CONNECTION_LOST", "restored": True, "world": 2}


@pytest.mark.parametrize(
    "kind", ["all_to_all", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gather", "scatter", "reduce"))]
)
def test_kill_during_exchanges(run: Run, kind: str) -> None:
    *survivors, victim = workers = run(3)
    for worker in workers:
        worker.begin("exchange_loop", kind=kind, count=6 * 10**5, tail=2)
    hear_iteration(victim, 4)
    victim.kill()
    attempts = [attempts_of(worker) for worker in survivors]
    assert all(attempt.pop("is_right") for found in attempts for attempt in found)
    one, other = ([attempt for attempt in found if attempt["verdict"] == "SUCCESS"] for found in attempts)
    assert [attempt["world"] for attempt in one][-2:] == [2, 2]
    assert one[-2:] == other[-2:]
    # Only scatter's parts depend on the world that its caller saw, which the kill may have changed since.
    outdated = {"INVALID_ARGUMENT"} if kind == "scatter" else set()
    verdicts = {attempt["verdict"] for found in attempts for attempt in found}
    assert verdicts <= {"SUCCESS", "RANK_CONNECTION_LOST"} | outdated


def test_kill_before_its_call_aborts_the_op(run: Run) -> None:
    *survivors, victim = workers = run(3)
    start_loops(workers, {victim: 2})
    hear_iteration(victim, 2)  # it never calls this one
    for worker in survivors:
        hear_iteration(worker, 2)
        worker.until_asleep()
    victim.kill()
    one, other = (attempts_of(worker) for worker in survivors)
    assert one == other
    assert one[0] == {"iteration": 2, "verdict": "RANK_CONNECTION_LOST", "restored": True, "world": 2}
    assert [(end["iteration"], end["world"]) for end in one[1:]] == [(2, 2), (3, 2)]


def test_kill_of_the_only_other_peer(run: Run) -> None:
    survivor, victim = run(2)
    for worker in (survivor, victim):
        worker.do("array", name="x", count=COUNT, seed=1)
    before = survivor.do("digest", name="x")
    survivor.begin("all_reduce", name="x")
    survivor.until_asleep()
    victim.kill()
    answer = survivor.answer()
    assert (answer.error, "peer 2" in answer.text) == ("RANK_CONNECTION_LOST", True)
    assert survivor.do("digest", name="x") == before
    assert survivor.do("world") == 1, "an op that a loss has ended returns when that is settled"
    alone = survivor.ask("all_reduce", name="x")
    assert (alone.error, "alone in peer group 0" in alone.text) == ("TOO_FEW_PEERS", True)


@pytest.mark.parametrize("kind", ["update_topology", "are_peers_pending"])
def test_group_call_without_a_killed_peer(run: Run, kind: str) -> None:
    *waiting, victim = run(3)
    for worker in waiting:
        worker.begin(kind)
        worker.until_asleep()
    victim.kill()
    assert [worker.answer().error for worker in waiting] == ["", ""]
    for worker in waiting:
        until(partial(_sees, worker, 2), "the loss is known")


def _sees(worker: Worker, world: int) -> bool:
    return bool(worker.do("world") == world)


def test_newcomer_is_admitted_despite_a_kill(run: Run, start: Start, master: MasterNode) -> None:
    *waiting, victim = run(3)
    (newcomer,) = start(1)
    newcomer.begin("connect", master=master.address)
    _until_pending([*waiting, victim])
    for worker in waiting:
        worker.begin("update_topology")
        worker.until_asleep()
    victim.kill()
    assert [worker.answer().error for worker in (*waiting, newcomer)] == ["", "", ""]
    for worker in (*waiting, newcomer):
        worker.do("array", name="x", count=10, value=1)
        worker.begin("all_reduce", name="x")
    assert [worker.answer().value for worker in (*waiting, newcomer)] == [3, 3, 3]


def _ask_all(workers: list[Worker], command: str, /, **arguments: Any) -> list[Any]:
    for worker in workers:
        worker.begin(command, **arguments)
    answers = [worker.answer() for worker in workers]
    return [answer.error or answer.value for answer in answers]


def _until_pending(workers: list[Worker]) -> None:
    while not all(answers := _ask_all(workers, "are_peers_pending")):
        assert answers == [False] * len(workers)


# Many ops.


def launch_many(worker: Worker, tags: list[int], seed: int) -> None:
    random.Random(seed).shuffle(tags)
    worker.do("launch_many", tags=tags, count=64 * 1024, seed=seed)


def verdicts(workers: list[Worker]) -> list[dict[str, Any]]:
    for worker in workers:
        worker.begin("verdicts")
    return [worker.answer().value for worker in workers]


def test_kill_with_many_ops_in_flight(run: Run) -> None:
    *survivors, victim = run(3, segment_bytes=4096)
    for seed, worker in enumerate(survivors):
        launch_many(worker, list(range(40)), seed)
    for worker in survivors:
        until(lambda worker=worker: worker.do("stats") == 40, "all are in flight")  # type: ignore[misc]
    launch_many(victim, list(range(0, 40, 2)), 2)
    victim.kill()  # in whatever state its ops are
    one, other = verdicts(survivors)
    assert one == other
    for tag, (status, detail) in one.items():
        assert status == "RANK_CONNECTION_LOST" or (status == "SUCCESS" and int(tag) % 2 == 0)
        assert status == "SUCCESS" or detail is True, f"the input of tag {tag} is not restored"


def test_kill_during_all_reduce_multiple_with_retry(run: Run) -> None:
    *survivors, victim = workers = run(3)
    names = [str(i) for i in range(12)]
    for worker in workers:
        for name in names:
            worker.do("array", name=name, count=64 * 1024, value=1)
    for worker in survivors:
        worker.begin("all_reduce_multiple", names=names)
    # Three ops commit with the victim, it dies in the fourth, and it does not launch the others.
    assert victim.do("all_reduce_multiple", names=names[:3]) == 3
    victim.do("launch", name="3", tag=3)
    victim.kill()
    assert [worker.answer().value for worker in survivors] == [2, 2]
    for name in names:
        digests = [worker.do("digest", name=name) for worker in survivors]
        assert digests[0] == digests[1], f"tag {name}"
    assert survivors[0].do("digest", name="0") != survivors[0].do("digest", name="11")


# The master.


@pytest.mark.parametrize("kind", ["all_reduce", "sync", "update_topology", "wait"])
def test_killed_master_fails_calls_and_restores_arrays(start: Start, run: Run, kind: str) -> None:
    (master,) = start(1)
    peers = run(3, master.do("listen"))
    for seed, worker in enumerate(peers):
        worker.do("array", name="x", count=COUNT, seed=seed)
        worker.do("state", name="s", arrays=["x"])
    before = _ask_all(peers, "digest", name="x")
    needs: dict[str, dict[str, Any]] = {"all_reduce": {"name": "x"}, "sync": {"name": "s"}, "wait": {"tag": 0}}
    arguments = needs.get(kind, {})
    for worker in peers[:2]:  # the third is missing, so that they are still waiting
        if kind == "wait":
            worker.do("launch", name="x", tag=0)
        worker.begin(kind, **arguments)
        worker.until_asleep()
    master.kill()
    answers = [worker.answer() for worker in peers[:2]]
    if kind == "wait":
        assert [answer.value for answer in answers] == ["MASTER_CONNECTION_FAILED"] * 2
    else:
        assert [answer.error for answer in answers] == ["MASTER_CONNECTION_FAILED"] * 2
        assert all("lost the master" in answer.text for answer in answers)
    assert _ask_all(peers, "digest", name="x") == before
    assert _ask_all(peers, "all_reduce", name="x") == ["MASTER_CONNECTION_FAILED"] * 3
    assert _ask_all(peers, "world") == ["MASTER_CONNECTION_FAILED"] * 3
    assert [worker.end() for worker in peers] == [0, 0, 0]
