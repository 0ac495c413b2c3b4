"""Aborted ops in training: all peers launch them again; an unknown outcome ends the run of this peer."""

from __future__ import annotations

from functools import partial

import numpy as np

from pccl import PCCLError, ReduceOp, Result, SharedState
from pccl.training.group.membership import Membership
from pccl.training.group.relaunch import average
from tests.support.cluster import Background, Cluster, refusal

TAG = 7
STEP = 3


def test_timed_out_average_is_relaunched(cluster: Cluster) -> None:
    cluster.join(2)
    vectors = [np.full(1000, index, np.float32) for index in range(2)]
    given_up = refusal(partial(cluster[1].all_reduce, vectors[1], op=ReduceOp.AVG, tag=TAG, step=STEP, timeout=0.0))
    assert given_up.result is Result.TIMEOUT
    averaging = Background(average(cluster[0], vectors[0], TAG, STEP).wait)
    again = average(cluster[1], vectors[1], TAG, STEP).wait()
    assert (again.world_size, again.aborted) == (2, 0)
    first = averaging.result()
    assert (first.world_size, first.aborted) == (2, 1)
    assert all(np.all(vector == 0.5) for vector in vectors)


def test_unknown_outcome_requires_rejoin(cluster: Cluster) -> None:
    cluster.join(1)
    membership = Membership(cluster[0], SharedState.from_numpy({"x": np.ones(3)}))
    membership.join()
    for result, refused in ((Result.INVALID_ARGUMENT, False), (Result.OUTCOME_UNKNOWN, True)):

        def fail(result: Result = result) -> None:
            with membership.step("step"):
                raise PCCLError(result, "all_reduce", "it failed")

        assert refusal(fail).result is result
        if refused:
            again = refusal(partial(membership.require_step, "step"))
            assert again.result is Result.INVALID_USAGE
            assert "has an unknown outcome" in str(again)
        else:
            membership.require_step("step")
