"""Peers and masters are killed: survivors agree, lose nothing, and go on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pccl import MasterNode
from tests.processes.conftest import Start
from tests.processes.harness import Worker
from tests.support.cluster import until

Run = Callable[..., list[Worker]]

COUNT = 2 * 2**20
"""8 MiB of float32: long enough under way to be hit."""
RARER = ("update_topology", "are_peers_pending", "wait")
"""Calls that CI alone has the master killed in."""


def attempts_of(worker: Worker) -> list[dict[str, Any]]:
    """Return what a reduce loop says of each attempt, until it ends."""
    found = []
    while "seconds" not in (message := worker.hear()):
        if "verdict" in message:
            found.append(message)
    assert not message.get("error"), message
    return found


def start_loops(workers: list[Worker], rest_in: dict[Worker, int] | None = None) -> None:
    """`rest_in` says who goes no further, and in which iteration."""
    for seed, worker in enumerate(workers):
        worker.begin("reduce_loop", count=COUNT, seed=seed, tail=2, rest_in=(rest_in or {}).get(worker))


def hear_iteration(worker: Worker, iteration: int) -> list[dict[str, Any]]:
    """Waits until it begins with this one; returns the attempts before."""
    found = []
    while (message := worker.hear()) != {"iteration": iteration}:
        found.append(message)
    return [message for message in found if "verdict" in message]


@pytest.mark.parametrize(
    "victim", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_survivors_of_a_kill_at_any_time_keep_equal_results(run: Run, victim: int) -> None:
    workers = run(3)
    start_loops(workers)
    hear_iteration(workers[victim], 3 + victim)
    workers[victim].kill()
    attempts = [attempts_of(worker) for worker in workers if worker is not workers[victim]]
    one, other = ([end for end in ends if end["verdict"] == "SUCCESS"] for ends in attempts)
    assert one == other
    assert [end["iteration"] for end in one] == list(range(len(one)))
    assert [end["world"] for end in one][-3:] == [3, 2, 2]
    for end in attempts[0] + attempts[1]:
        if end["verdict"] != "SUCCESS":
            # A peer that had not launched the op yet when the loss was settled never sees it fail.
            assert end == {"iteration": len(one) - 2, "verdict": "RANK_CONNECTION_LOST", "restored": True, "world": 2}


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "kind", ["all_to_all", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gather", "scatter", "reduce"))]
)
@pytest.mark.parametrize("is_late", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_survivors_of_a_kill_exchange_on(run: Run, kind: str, victim: int, is_late: bool) -> None:
    """`is_late`: the victim has not made the call that the others wait in."""
    workers = run(3)
    survivors = [worker for worker in workers if worker is not workers[victim]]
    for worker in workers:
        rest_in = 2 if is_late and worker is workers[victim] else None
        worker.begin("exchange_loop", kind=kind, count=6 * 10**5, tail=2, rest_in=rest_in)
    hear_iteration(workers[victim], 2 if is_late else 4)
    for worker in survivors if is_late else []:
        hear_iteration(worker, 2)
        worker.until_asleep()
    workers[victim].kill()
    attempts = [attempts_of(worker) for worker in survivors]
    assert all(attempt.pop("is_right") for found in attempts for attempt in found)
    one, other = ([attempt for attempt in found if attempt["verdict"] == "SUCCESS"] for found in attempts)
    assert [attempt["world"] for attempt in one][-2:] == [2, 2]
    assert one[-2:] == other[-2:]
    # Only scatter's parts depend on the world that its caller saw, which the kill may have changed since.
    outdated = {"INVALID_ARGUMENT"} if kind == "scatter" else set()
    verdicts = {attempt["verdict"] for found in attempts for attempt in found}
    assert verdicts <= {"SUCCESS", "RANK_CONNECTION_LOST"} | outdated


@pytest.mark.parametrize(
    "victim", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_survivors_agree_on_the_op_that_a_kill_interrupts(run: Run, victim: int) -> None:
    workers = run(3)
    survivors = [worker for worker in workers if worker is not workers[victim]]
    start_loops(workers, {workers[victim]: 2})
    hear_iteration(workers[victim], 2)  # its part of which will never come
    for worker in survivors:
        hear_iteration(worker, 2)
        worker.until_asleep()
    workers[victim].kill()
    one, other = (attempts_of(worker) for worker in survivors)
    assert one == other
    assert one[0] == {"iteration": 2, "verdict": "RANK_CONNECTION_LOST", "restored": True, "world": 2}
    assert [(end["iteration"], end["world"]) for end in one[1:]] == [(2, 2), (3, 2)]


@pytest.mark.parametrize("victims", [[1], [0, 1], [2, 3]])
def test_killed_peers_are_not_waited_for_however_long_a_silent_one_is(
    start: Start, run: Run, victims: list[int]
) -> None:
    """Their heartbeats and their links have ended, too: `tests.runtime.session.test_reattach` has peers that are waited
    for."""
    with MasterNode("127.0.0.1:0", peer_timeout=3600) as master:
        workers = run(4, master.address)
        for victim in victims:
            workers[victim].kill()
        survivors = [worker for index, worker in enumerate(workers) if index not in victims]
        for worker in survivors:
            until(partial(_sees, worker, len(survivors)), "the loss is known")


def test_a_peer_whose_only_partner_is_killed_is_alone(run: Run) -> None:
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


def test_a_stopped_peer_delays_a_reduce_and_harms_nothing(run: Run) -> None:
    one, other = run(2)
    for worker in (one, other):
        worker.do("array", name="x", count=COUNT, value=1)
    other.stop()
    one.begin("all_reduce", name="x")
    one.until_asleep()
    other.resume()
    other.begin("all_reduce", name="x")
    assert [worker.answer().value for worker in (one, other)] == [2, 2]
    assert one.do("digest", name="x") == other.do("digest", name="x")


@pytest.mark.parametrize("kind", ["update_topology", "are_peers_pending", "optimize_topology"])
def test_a_group_call_goes_on_without_the_peer_that_was_killed(run: Run, kind: str) -> None:
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


def test_a_newcomer_is_admitted_although_a_peer_is_killed_in_update_topology(
    run: Run, start: Start, master: MasterNode
) -> None:
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


def test_a_newcomer_that_is_killed_while_links_are_made_is_left_out(run: Run, start: Start, master: MasterNode) -> None:
    accepted = run(2)
    (newcomer,) = start(1)
    newcomer.begin("connect", master=master.address)
    _until_pending(accepted)
    newcomer.stop()  # it cannot make its links
    for worker in accepted:
        worker.begin("update_topology")
        worker.until_asleep()
    newcomer.kill()
    assert [worker.answer().error for worker in accepted] == ["", ""]
    assert _ask_all(accepted, "world") == [2, 2]
    assert _ask_all(accepted, "are_peers_pending") == [False, False]


def _ask_all(workers: list[Worker], command: str, /, **arguments: Any) -> list[Any]:
    for worker in workers:
        worker.begin(command, **arguments)
    answers = [worker.answer() for worker in workers]
    return [answer.error or answer.value for answer in answers]


def _until_pending(workers: list[Worker]) -> None:
    while not all(answers := _ask_all(workers, "are_peers_pending")):
        assert answers == [False] * len(workers)


# The master.


@pytest.mark.parametrize(
    "kind", ["all_reduce", "sync", *(pytest.param(kind, marks=pytest.mark.slow) for kind in RARER)]
)
def test_a_killed_master_fails_every_call_and_buffers_are_as_before(start: Start, run: Run, kind: str) -> None:
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
