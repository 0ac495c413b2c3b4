"""The classes of errors."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import traceback
from functools import partial
from typing import Any

import numpy as np
import pytest

from pccl import (
    MasterLostError,
    MismatchError,
    OpTimeoutError,
    OutcomeUnknownError,
    PCCLError,
    PeerLostError,
    ReduceAlgorithm,
    ReduceOp,
    Result,
    TooFewPeersError,
    UsageError,
)
from pccl.errors import InternalError, StateUnavailableError
from pccl.protocol.completion import TRAINING_TAGS, tag_named
from pccl.training.diloco.diloco import OuterStep
from pccl.training.group import membership
from pccl.training.state.replicated_state import BUFFERS, TAGS, _tag
from tests.support.cluster import SUM, Cluster, ones, outcomes, refusal, results

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


def test_result_and_info_print_what_users_look_for(cluster: Cluster) -> None:
    assert f"{Result.TOO_FEW_PEERS} {Result.TIMEOUT!s}" == "TOO_FEW_PEERS TIMEOUT"
    assert Result.TIMEOUT == 13
    cluster.join(2)
    assert repr(cluster.each(lambda peer, _: peer.all_reduce(ones()))[0]).startswith("ReduceInfo(world_size=2, ")


@pytest.mark.parametrize(
    ("other", "has_options"), [({"op": ReduceOp.MAX}, False), ({"step": 4}, False), ({"algorithm": "RING"}, True)]
)
def test_mismatch_lists_engine_options_only_if_they_are_all_that_differs(
    cluster: Cluster, other: dict[str, Any], has_options: bool
) -> None:
    cluster.join(2)
    if "algorithm" in other:
        other = {"algorithm": ReduceAlgorithm.RING}
    own: dict[str, Any] = {"step": 3} if "step" in other else {}
    found = outcomes([partial(cluster[0].all_reduce, ones(), **own), partial(cluster[1].all_reduce, ones(), **other)])
    assert results(found) == [Result.INVALID_ARGUMENT] * 2
    for error in found:
        assert ("segments of" in str(error)) == has_options
        assert ("(RING, " in str(error)) == has_options


def test_calls_that_cannot_meet_are_listed_with_their_peers(cluster: Cluster) -> None:
    cluster.join(2)
    found = outcomes([cluster[0].update_topology, partial(cluster[1].all_reduce, ones())])
    assert results(found) == [Result.INVALID_USAGE] * 2
    for error in found:
        assert isinstance(error, MismatchError)
        assert "these calls cannot meet: peer 2 (" in str(error)
        assert "in the op with tag 0, which the others never launched; peer 1 (" in str(error)


def test_call_after_the_op_was_given_up_says_so(cluster: Cluster) -> None:
    cluster.join(2)
    early = refusal(partial(cluster[0].all_reduce, ones(), timeout=0.05))
    late = refusal(partial(cluster[1].all_reduce, ones()))
    assert early.result is late.result is Result.TIMEOUT
    assert late.message == f"{early.message}. That was before this call: call again"
    assert cluster.each(lambda peer, _: peer.all_reduce(ones()).world_size) == [2, 2]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda peer: peer.all_reduce(ones(), ReduceOp.AVG), "not ReduceOp: give it as op="),
        (lambda peer: peer.all_reduce(np.float32(3)), "not float32: make an array of it with numpy.array"),
        (lambda peer: peer.all_reduce([1.0]), "not list: make an array of it with numpy.array"),
    ],
)
def test_wrong_argument_says_what_to_give(cluster: Cluster, call: Any, text: str) -> None:
    cluster.join(2)
    assert text in str(refusal(partial(call, cluster[0])))


@pytest.mark.parametrize("name", ["update_topology", "all_reduce", "connect"])
def test_traceback_has_few_frames_of_pccl(cluster: Cluster, name: str) -> None:
    cluster.join(1)
    calls: dict[str, Any] = {
        "all_reduce": partial(cluster[0].all_reduce, ones()),
        "connect": cluster[0].connect,
        "update_topology": cluster.new().update_topology,
    }
    error = refusal(calls[name])
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert len([each for each in frames if "/pccl/" in each]) <= 3, frames


def test_tags_of_training_are_named() -> None:
    assert tag_named(5) == "tag 5"
    assert tag_named(_tag(7, BUFFERS)) == "pccl.training's tag for buffers"
    assert tag_named(membership.TAG) == "pccl.training's tag for options"
    assert TAGS == TRAINING_TAGS


def test_training_is_imported_on_first_use() -> None:
    script = "import pccl; print(pccl.training.DiLoCo.__name__); assert not hasattr(pccl, 'absent')"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "DiLoCo\n"
    )


def test_report_of_a_step_is_short() -> None:
    step = OuterStep(16, 3, True, False, 1, 14_640_000, 14_640, 0, 0, 0.003946159999941301, True)
    assert str(step) == "step 16: 3 peers, 14.6 MB sent, waited 0.00395 s, 1 aborted, admitted newcomers, skipped"
    assert "world_size=3" in repr(step)
