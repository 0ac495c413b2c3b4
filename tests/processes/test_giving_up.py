"""Whoever gives an op up has its arrays back at once, as they were, and nobody touches them again, whatever becomes of
the op: three peers in a ring, one of which never calls, under a master that is stopped meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import trio

from pccl import AsyncCommunicator, Attribute, PCCLError, ReduceOp, Result
from tests.processes.conftest import Start
from tests.processes.harness import Worker
from tests.processes.worker import VERDICT_WAIT_S
from tests.support.cluster import until

Run = Callable[..., list[Worker]]

COUNT = 2**21
NEW = -7.0
"""The value that callers put into their arrays once they have them back."""
PEER_TIMEOUT_S = 60.0
"""Nobody misses the master."""
RAISED = {"call": "OUTCOME_UNKNOWN", "many": "OUTCOME_UNKNOWN", "interrupt": "KeyboardInterrupt", "wait": "TIMEOUT"}


@pytest.fixture
def silent_master(start: Start) -> Worker:
    (master,) = start(1)
    return master


def address_of(master: Worker) -> str:
    address = master.do("listen", peer_timeout=PEER_TIMEOUT_S)
    assert isinstance(address, str)
    return address


def has_settled(worker: Worker) -> bool:
    return worker.do("stats") == 0


@pytest.mark.parametrize("how", RAISED)
def test_arrays_are_their_callers_again(silent_master: Worker, run: Run, how: str) -> None:
    peers = run(3, address_of(silent_master))
    for seed, peer in enumerate(peers):
        peer.do("array", name="x", count=COUNT, seed=seed)
    silent_master.stop()
    for peer in peers[:2]:
        peer.begin("give_up", how=how, name="x", value=NEW, tag=5)
        if how == "interrupt":
            peer.until_asleep()
    if how == "interrupt":
        for peer in peers[:2]:
            peer.interrupt()
    assert [peer.answer().value for peer in peers[:2]] == [[RAISED[how], True]] * 2
    again = peers[0].ask("all_reduce", name="x", tag=5)
    assert again.error == "INVALID_USAGE"
    assert "in flight" in again.text
    assert peers[0].do("is_full_of", name="x", value=NEW)
    silent_master.resume()
    if how == "wait":  # it goes on, for the others, and is committed among three
        peers[2].do("array", name="y", count=COUNT, seed=2)
        assert peers[2].do("all_reduce", name="y", tag=5) == 3
    for peer in peers:
        until(partial(has_settled, peer), "the op has its verdict")
        if peer is not peers[2]:
            assert peer.do("is_full_of", name="x", value=NEW)
    if how != "wait":  # which has yet to hear of the ops that it has never called
        assert peers[2].ask("all_reduce", name="x", tag=5).error == "TIMEOUT"
    for peer in peers:
        peer.begin("all_reduce", name="x", tag=5)
    assert [peer.answer().value for peer in peers] == [3] * 3


def test_a_cancelled_task_has_its_array_back(silent_master: Worker, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.async_communicator.CANCEL_GRACE_S", VERDICT_WAIT_S)
    address = address_of(silent_master)
    workers = run(2, address)
    kept = np.arange(COUNT, dtype=np.float32)
    x = kept.copy()

    async def main() -> None:
        async with AsyncCommunicator(address) as peer:
            assert peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 3
            for worker in workers:
                await trio.to_thread.run_sync(worker.answer)
            silent_master.stop()
            workers[0].do("array", name="x", count=COUNT, value=1)
            workers[0].begin("all_reduce", name="x", tag=5, timeout=2)
            with trio.move_on_after(1) as scope:
                await peer.all_reduce(x, op=ReduceOp.SUM, tag=5)
            assert scope.cancelled_caught
            assert x.tobytes() == kept.tobytes()
            x[:] = NEW
            with pytest.raises(PCCLError) as timed_out:
                await peer.all_reduce(y := kept.copy(), op=ReduceOp.SUM, tag=6, timeout=0.1)
            assert timed_out.value.result is Result.OUTCOME_UNKNOWN
            assert y.tobytes() == kept.tobytes()
            y[:] = NEW
            handle = peer.all_reduce_async(z := kept.copy(), op=ReduceOp.SUM, tag=7)
            with pytest.raises(PCCLError) as waited:
                handle.wait(0.1)  # in the trio thread
            assert waited.value.result is Result.TIMEOUT
            assert z.tobytes() == kept.tobytes()
            z[:] = NEW
            silent_master.resume()
            assert (await trio.to_thread.run_sync(workers[0].answer)).error in {"OUTCOME_UNKNOWN", "TIMEOUT"}
            for worker in workers:
                worker.do("array", name="z", count=COUNT, value=1)
                worker.begin("all_reduce", name="z", tag=7)
            await trio.to_thread.run_sync(until, handle.done, "it goes on")
            for array in (x, y, z):
                assert (array == NEW).all()
            (_, status, _) = await handle.async_wait()
            assert status is Result.SUCCESS
            assert (z == kept + 2).all()

    for worker in workers:
        worker.begin("gather", world=3)
    trio.run(main)
    for worker in workers:
        assert worker.answer().value == 3


def test_a_result_that_comes_later_is_there_after_the_next_wait(run: Run) -> None:
    peers = run(2)
    for peer in peers:
        peer.do("array", name="x", count=COUNT, value=2)
    assert peers[0].do("give_up", how="wait_and_keep", name="x", value=NEW, timeout=0.1) == ["TIMEOUT", True]
    peers[1].do("all_reduce", name="x")
    assert peers[0].do("is_full_of", name="x", value=NEW)
    assert peers[0].do("wait", tag=0) == "SUCCESS"
    assert peers[0].do("is_full_of", name="x", value=4.0)
