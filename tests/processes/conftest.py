"""Worker processes as fixtures: none outlives its test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pccl import MasterNode
from tests.processes.harness import Worker

Start = Callable[[int], list[Worker]]
Run = Callable[..., list[Worker]]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(n)` starts n workers."""
    workers: list[Worker] = []

    def start(count: int) -> list[Worker]:
        new = [Worker() for _ in range(count)]
        workers.extend(new)
        return new

    yield start
    for worker in workers:
        worker.discard()


@pytest.fixture
def run(master: MasterNode, start: Start) -> Run:
    """`run(n)` starts n workers and connects them to one run, in their order."""

    def run(count: int, address: str = "", **options: object) -> list[Worker]:
        workers = start(count)
        for world, worker in enumerate(workers, 1):
            worker.begin("connect", master=address or master.address, **options)
            for other in workers[: world - 1]:
                other.begin("gather", world=world)
            for each in workers[:world]:
                answer = each.answer()
                assert not answer.error, answer.text
        return workers

    return run
