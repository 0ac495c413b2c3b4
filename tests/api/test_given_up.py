"""Calls that one peer gives up again and again while the others are busy with something else."""

from __future__ import annotations

import pytest

from pccl import Result
from tests.support.cluster import SUM, Cluster, ones, reduce_once, refusal


@pytest.mark.parametrize("given_up", [150, pytest.param(1500, marks=pytest.mark.slow)])
def test_the_others_keep_nothing_of_it_and_their_next_calls_succeed(cluster: Cluster, given_up: int) -> None:
    cluster.join(3)
    x = ones()
    for _ in range(given_up):
        assert refusal(lambda: cluster[0].all_reduce(x, op=SUM, timeout=0)).result is Result.TIMEOUT
    for _ in range(3):
        assert cluster.each(reduce_once) == [3] * 3
    for peer in cluster.peers:
        session = peer._inner._session
        assert session is not None
        assert not session._machine.ops.uses.aborts
        assert not session._machine.ops.uses.promises
