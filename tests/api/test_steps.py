"""Ops that carry a count of their callers': those of different steps do not go together, whichever way they take."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from pccl import (
    Communicator,
    MismatchError,
    PCCLError,
    ReduceAlgorithm,
    ReduceDescriptor,
    ReduceOpDescriptor,
    Result,
)
from tests.api.test_async_communicator import Peers, all_of, in_run
from tests.support.cluster import SUM, Cluster, ones, outcomes, reduce_once, refusal, results
from tests.support.fake_device import FakeDevice

Call = Callable[[Communicator, int, int | None], Any]
"""A call of a peer with an index, at a step."""

LATEST = 2**63 - 1


def reduce_at(peer: Communicator, _: int, step: int | None, **options: Any) -> Any:
    x = ones(**({"count": options.pop("count")} if "count" in options else {}))
    try:
        return peer.all_reduce(x, op=SUM, step=step, **options)
    except PCCLError:
        assert np.all(x == 1)
        raise


def launch_at(peer: Communicator, _: int, step: int | None) -> Any:
    return peer.all_reduce_async(ones(), op=SUM, step=step).result()


def retry_at(peer: Communicator, _: int, step: int | None) -> Any:
    x = ones()
    descriptor = ReduceDescriptor(count=x.size, op=SUM, tag=3, step=step)
    return peer.all_reduce_multiple_with_retry([ReduceOpDescriptor.from_numpy(x, x, descriptor)])


EVERY: dict[str, Call] = {
    "all_reduce": reduce_at,
    "ring": partial(reduce_at, algorithm=ReduceAlgorithm.RING),
    "direct": partial(reduce_at, algorithm=ReduceAlgorithm.DIRECT),
    "large": partial(reduce_at, count=1 << 20),
    "async": launch_at,
    "retry": retry_at,
    "all_gather": lambda peer, _, step: peer.all_gather(ones(), step=step),
    "reduce_scatter": lambda peer, _, step: peer.reduce_scatter(ones(), op=SUM, step=step),
    "broadcast": lambda peer, _, step: peer.broadcast(ones(), root=0, step=step),
    "barrier": lambda peer, _, step: peer.barrier(step=step),
    "all_gather_async": lambda peer, _, step: peer.launch.all_gather(ones(), step=step).result(),
    "barrier_async": lambda peer, _, step: peer.launch.barrier(step=step).result(),
}


def fails_for_all(cluster: Cluster, call: Call, steps: list[int | None]) -> list[str]:
    found = cluster.outcomes(lambda peer, i: call(peer, i, steps[i]))
    assert results(found) == [Result.INVALID_ARGUMENT] * len(steps), found
    return [str(error) for error in found]


@pytest.mark.parametrize("name", EVERY)
def test_mismatched_steps_fail_on_all(three_peers: Cluster, name: str) -> None:
    call = EVERY[name]
    for _ in range(2):  # the second time a small op goes past the trio thread
        three_peers.each(lambda peer, i: call(peer, i, 7))
        for odd in range(3):
            texts = fails_for_all(three_peers, call, [7 if i == odd else 8 for i in range(3)])
            for text in texts:
                found = re.search(
                    r"peer (\d) \S+ (?:reduces|is at) step (\d) but peer (\d) \S+ (?:reduces|is at) step", text
                )
                assert found, text
                assert (int(found[2]) == 7) == (int(found[1]) == odd + 1)
                assert "one of them has missed or repeated a step" in text
        three_peers.each(lambda peer, i: call(peer, i, LATEST))
        three_peers.each(lambda peer, i: call(peer, i, 0))
        three_peers.each(lambda peer, i: call(peer, i, None))


def test_a_step_or_none_is_part_of_what_is_compared(three_peers: Cluster) -> None:
    for text in fails_for_all(three_peers, reduce_at, [0, None, 0]):
        assert re.search(r"gives (no step but peer \d \S+ gives step 0|step 0 but peer 2 \S+ gives no step)", text)
        assert "the same step, or none" in text
    assert three_peers.each(reduce_once) == [3] * 3


def test_step_of_send_and_recv(three_peers: Cluster) -> None:
    def calls(sent: int | None, received: int | None) -> list[Any]:
        x = ones()
        return outcomes(
            [
                lambda: three_peers[0].send(x, dst=1, step=sent),
                lambda: three_peers[1].recv(x.copy(), src=0, step=received),
            ]
        )

    assert results(calls(4, 4)) == [Result.SUCCESS] * 2
    assert results(calls(4, 5)) == [Result.INVALID_ARGUMENT] * 2
    assert results(calls(None, 0)) == [Result.INVALID_ARGUMENT] * 2
    assert results(calls(None, None)) == [Result.SUCCESS] * 2


@pytest.mark.parametrize("step", [-1, 2**63, True, 1.0, "7"])
def test_wrong_step_is_refused(three_peers: Cluster, step: Any) -> None:
    for call in EVERY.values():
        error = refusal(partial(call, three_peers[0], 0, step))
        assert error.result is Result.INVALID_ARGUMENT
        assert "step" in str(error)


@pytest.mark.parametrize("on_device", [(0, 1, 2), (0,), (0, 2)])
def test_steps_with_device_arrays(three_peers: Cluster, devices: list[FakeDevice], on_device: tuple[int, ...]) -> None:
    count = 3077

    def reduce_here(peer: Communicator, i: int, step: int | None) -> Any:
        array = devices[i].array(ones(count)) if i in on_device else ones(count)
        return peer.all_reduce(array, op=SUM, step=step)

    for odd in range(3):
        three_peers.each(lambda peer, i: reduce_here(peer, i, 8))
        for text in fails_for_all(three_peers, reduce_here, [7 if i == odd else 8 for i in range(3)]):
            assert re.search(r"reduces step (7|8) but peer \d \S+ reduces step (7|8)", text), text
    three_peers.each(lambda peer, i: reduce_here(peer, i, None))


@in_run(2)
async def test_coroutines_take_steps(peers: Peers) -> None:
    def calls(*steps: int) -> Any:
        return all_of(*(partial(p.all_reduce, ones(), op=SUM, step=step) for p, step in zip(peers, steps, strict=True)))

    assert results(await calls(3, 3)) == [Result.SUCCESS] * 2
    assert results(await calls(3, 4)) == [Result.INVALID_ARGUMENT] * 2
    handles = [peer.all_reduce_async(ones(), op=SUM, step=step) for peer, step in zip(peers, (5, 6), strict=True)]
    for handle in handles:
        with pytest.raises(MismatchError):
            await handle
