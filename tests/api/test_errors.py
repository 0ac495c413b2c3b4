"""The classes of errors."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from pccl import (
    MasterLostError,
    MismatchError,
    OpTimeoutError,
    OutcomeUnknownError,
    PCCLError,
    PeerLostError,
    Result,
    TooFewPeersError,
    UsageError,
)
from pccl.errors import InternalError, StateUnavailableError
from tests.support.cluster import SUM, Cluster, ones, refusal

CLASSES = {
    Result.NOT_INITIALIZED: UsageError,
    Result.INTERNAL_ERROR: InternalError,
    Result.INVALID_ARGUMENT: UsageError,
    Result.INVALID_USAGE: UsageError,
    Result.TOO_FEW_PEERS: TooFewPeersError,
    Result.MASTER_CONNECTION_FAILED: MasterLostError,
    Result.RANK_CONNECTION_FAILED: PeerLostError,
    Result.RANK_CONNECTION_LOST: PeerLostError,
    Result.NO_SHARED_STATE_AVAILABLE: StateUnavailableError,
    Result.PENDING_ASYNC_OPS: UsageError,
    Result.UPDATE_TOPOLOGY_FAILED: PCCLError,
    Result.TOPOLOGY_OPTIMIZATION_FAILED: PCCLError,
    Result.TIMEOUT: OpTimeoutError,
    Result.OUTCOME_UNKNOWN: OutcomeUnknownError,
}


@pytest.mark.parametrize("result", set(Result) - {Result.SUCCESS})
def test_class_follows_from_result(result: Result) -> None:
    error = PCCLError(result, "all_reduce", "why")
    assert type(error) is CLASSES[result]
    for same in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(same) is CLASSES[result]
        assert (same.result, same.func_name, same.message) == (result, "all_reduce", "why")
        assert str(same) == f"all_reduce: {result.name}: why"


def test_timeout_is_a_timeout_error(cluster: Cluster) -> None:
    cluster.join(2)
    with pytest.raises(TimeoutError, match="all_reduce: TIMEOUT"):
        cluster[0].all_reduce(ones(), op=SUM, timeout=0.05)


def test_calls_that_differ_are_a_mismatch(cluster: Cluster) -> None:
    cluster.join(2)
    for error in cluster.outcomes(lambda peer, i: peer.all_reduce(ones(8 + i), op=SUM)):
        assert isinstance(error, MismatchError)
    assert type(refusal(lambda: cluster[0].all_reduce(np.array(["text"]), op=SUM))) is UsageError  # type: ignore[arg-type]
