"""Giving an op up returns its arrays at once, unchanged, and pccl does not touch them again: three peers in a ring, one
of them never calls, and the master is stopped."""

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
RAISED = {
    "call": "OUTCOME_UNKNOWN",
    "many": "OUTCOME_UNKNOWN",
    "interrupt": "KeyboardInterrupt",
    "cancel": "OUTCOME_UNKNOWN",
}


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
def test_timeout_cancel_and_interrupt_return_arrays_without_master(silent_master: Worker, run: Run, how: str) -> None:
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
    for peer in peers:
        until(partial(has_settled, peer), "the op has its verdict")
        if peer is not peers[2]:
            assert peer.do("is_full_of", name="x", value=NEW)
    # It has yet to learn of the ops that it has never called.
    assert peers[2].ask("all_reduce", name="x", tag=5).error == "TIMEOUT"
    for peer in peers:
        peer.begin("all_reduce", name="x", tag=5)
    assert [peer.answer().value for peer in peers] == [3] * 3


def test_cancelled_task_gets_its_array_back_without_master(
    silent_master: Worker, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccl.async_communicator.CANCEL_GRACE_S", VERDICT_WAIT_S)
    monkeypatch.setattr("pccl.handle.CANCEL_GRACE_S", VERDICT_WAIT_S)
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
            with pytest.raises(PCCLError) as cancelled:
                await handle.async_cancel()
            assert cancelled.value.result is Result.OUTCOME_UNKNOWN
            assert z.tobytes() == kept.tobytes()
            z[:] = NEW
            silent_master.resume()
            assert (await trio.to_thread.run_sync(workers[0].answer)).error in {"OUTCOME_UNKNOWN", "TIMEOUT"}
            await trio.to_thread.run_sync(until, handle.done, "it has its verdict")
            for array in (x, y, z):
                assert (array == NEW).all()

    for worker in workers:
        worker.begin("gather", world=3)
    trio.run(main)
