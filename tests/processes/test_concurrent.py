"""Many ops in flight between processes, some of which are killed."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.processes.harness import Worker
from tests.support.cluster import until

Run = Callable[..., list[Worker]]

COUNT = 64 * 1024


def launch(worker: Worker, tags: list[int], seed: int) -> None:
    random.Random(seed).shuffle(tags)
    worker.do("launch_many", tags=tags, count=COUNT, seed=seed)


def has_in_flight(worker: Worker, ops: int) -> bool:
    return bool(worker.do("stats") == ops)


def verdicts(workers: list[Worker]) -> list[dict[str, Any]]:
    for worker in workers:
        worker.begin("verdicts")
    return [worker.answer().value for worker in workers]


def test_many_tags_launched_in_different_orders(run: Run) -> None:
    workers = run(3)
    for seed, worker in enumerate(workers):
        launch(worker, list(range(40)), seed)
    one, two, three = verdicts(workers)
    assert one == two == three
    assert [status for status, _ in one.values()] == ["SUCCESS"] * 40


def test_survivors_agree_on_every_op_that_was_in_flight(run: Run) -> None:
    *survivors, victim = run(3, segment_bytes=4096)
    for seed, worker in enumerate(survivors):
        launch(worker, list(range(40)), seed)
    for worker in survivors:
        until(partial(has_in_flight, worker, 40), "all are in flight")
    launch(victim, list(range(0, 40, 2)), 2)
    victim.kill()  # whatever its ops have come to
    one, other = verdicts(survivors)
    assert one == other
    for tag, (status, detail) in one.items():
        assert status == "RANK_CONNECTION_LOST" or (status == "SUCCESS" and int(tag) % 2 == 0)
        assert status == "SUCCESS" or detail is True, f"the input of tag {tag} is not back"


def test_many_at_once_end_well_although_a_peer_is_killed(run: Run) -> None:
    workers = run(3)
    *survivors, victim = workers
    names = [str(i) for i in range(12)]
    for worker in workers:
        for name in names:
            worker.do("array", name=name, count=COUNT, value=1)
    for worker in survivors:
        worker.begin("all_reduce_multiple", names=names)
    # The first three are committed with the victim, the fourth is what it dies in, the others never hear of it.
    assert victim.do("all_reduce_multiple", names=names[:3]) == 3
    victim.do("launch", name="3", tag=3)
    victim.kill()
    assert [worker.answer().value for worker in survivors] == [2, 2]
    for name in names:
        digests = [worker.do("digest", name=name) for worker in survivors]
        assert digests[0] == digests[1], f"tag {name}"
    assert survivors[0].do("digest", name="0") != survivors[0].do("digest", name="11")
