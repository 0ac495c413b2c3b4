"""sync_shared_state as a user sees it: elections, transfers and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from pccl import (
    PCCLError,
    Result,
    SharedState,
    SharedStateSyncInfo,
    SharedStateSyncStrategy,
    TensorInfo,
)
from tests.support.cluster import Cluster, results

POPULAR = SharedStateSyncStrategy.ENFORCE_POPULAR
RECEIVE = SharedStateSyncStrategy.RECEIVE_ONLY
SEND = SharedStateSyncStrategy.SEND_ONLY

MIB = 2**20


class Holder:
    """A peer's state: one array that must be equal everywhere."""

    def __init__(self, value: float, revision: int, count: int = 10) -> None:
        self.x = np.full(count, value, np.float32)
        self.state = SharedState.from_numpy({"x": self.x})
        self.state.revision = revision

    @property
    def held(self) -> tuple[float, int]:
        assert np.all(self.x == self.x[0])
        return float(self.x[0]), self.state.revision


def sync(
    cluster: Cluster, holders: Sequence[Holder], strategies: Sequence[SharedStateSyncStrategy] = (POPULAR,) * 9
) -> list[SharedStateSyncInfo]:
    return cluster.each(lambda peer, i: peer.sync_shared_state(holders[i].state, strategies[i]))


def refused(
    cluster: Cluster, holders: Sequence[Holder], strategies: Sequence[SharedStateSyncStrategy] = (POPULAR,) * 9
) -> tuple[Result, str]:
    """Return the error that all peers get; the states must be unchanged."""
    before = [holder.held for holder in holders]
    errors = cluster.outcomes(lambda peer, i: peer.sync_shared_state(holders[i].state, strategies[i]))
    assert results(errors) == [errors[0].result] * len(errors)
    assert {str(error) for error in errors} == {str(errors[0])}
    assert [holder.held for holder in holders] == before
    return errors[0].result, str(errors[0])


# Elections.


def test_single_peer_syncs_with_itself(cluster: Cluster) -> None:
    cluster.join(1)
    holder = Holder(3, 9)
    assert sync(cluster, [holder]) == [SharedStateSyncInfo(0, 0, 9)]
    assert holder.held == (3, 9)


def test_newcomers_receive_the_state(cluster: Cluster) -> None:
    cluster.join(2)
    holders = [Holder(1, 5, MIB), Holder(1, 5, MIB)]
    sync(cluster, holders)
    cluster.join(2)
    holders += [Holder(0, 0, MIB), Holder(8, 0, MIB)]
    infos = sync(cluster, holders)
    assert [holder.held for holder in holders] == [(1, 5)] * 4
    assert [(info.rx_bytes, info.revision) for info in infos] == [(0, 5), (0, 5), (4 * MIB, 5), (4 * MIB, 5)]
    assert sum(info.tx_bytes for info in infos) == 8 * MIB


def test_only_differing_blocks_are_sent(cluster: Cluster) -> None:
    cluster.join(2)
    holders = [Holder(1, 5, 4 * MIB) for _ in range(2)]
    holders[1].x[2 * MIB] = 2  # one of the 16 MiB
    infos = sync(cluster, holders)
    assert [holder.held for holder in holders] == [(1, 5)] * 2
    assert infos == [SharedStateSyncInfo(MIB, 0, 5), SharedStateSyncInfo(0, MIB, 5)]


def test_late_peer_catches_up(cluster: Cluster) -> None:
    cluster.join(3)
    holders = [Holder(1, 0) for _ in range(3)]
    sync(cluster, holders)
    for holder in holders[1:]:
        holder.x += 1
        for _ in range(3):  # a revision may grow by more than one between two syncs
            holder.state.push_revision()
    sync(cluster, holders)
    assert [holder.held for holder in holders] == [(2, 3)] * 3


def test_revision_is_never_lowered(cluster: Cluster) -> None:
    cluster.join(2)
    holders = [Holder(1, 7), Holder(1, 7)]
    sync(cluster, holders)
    for holder in holders:
        holder.state.revision = 3
    result, text = refused(cluster, holders)
    assert result is Result.NO_SHARED_STATE_AVAILABLE
    assert "revision 7" in text
    assert "3" in text


# Strategies.


def test_receive_only(cluster: Cluster) -> None:
    cluster.join(3)
    holders = [Holder(1, 0), Holder(1, 0), Holder(2, 0)]
    infos = sync(cluster, holders, [RECEIVE, RECEIVE, POPULAR])
    assert [holder.held for holder in holders] == [(2, 0)] * 3
    assert [info.tx_bytes for info in infos] == [0, 0, 80]


def test_send_only(cluster: Cluster) -> None:
    cluster.join(3)
    holders = [Holder(1, 0), Holder(1, 0), Holder(2, 0)]
    sync(cluster, holders, [POPULAR, POPULAR, SEND])
    assert [holder.held for holder in holders] == [(2, 0)] * 3


def test_receive_only_on_all_peers_fails(cluster: Cluster) -> None:
    cluster.join(2)
    result, text = refused(cluster, [Holder(1, 0), Holder(1, 0)], [RECEIVE, RECEIVE])
    assert result is Result.NO_SHARED_STATE_AVAILABLE
    assert "RECEIVE_ONLY" in text


def test_conflicting_senders_fail(cluster: Cluster) -> None:
    cluster.join(3)
    result, text = refused(cluster, [Holder(1, 0), Holder(2, 0), Holder(3, 0)], [POPULAR, SEND, SEND])
    assert result is Result.INVALID_USAGE
    assert "peers 2 and 3 are both SEND_ONLY" in text
    # The call failed, not the run.
    holders = [Holder(1, 0) for _ in range(3)]
    assert len(sync(cluster, holders, [POPULAR, SEND, SEND])) == 3


def test_older_sender_fails(cluster: Cluster) -> None:
    cluster.join(2)
    result, text = refused(cluster, [Holder(1, 5), Holder(2, 3)], [POPULAR, SEND])
    assert result is Result.INVALID_USAGE
    assert "peer 2 is SEND_ONLY at revision 3" in text


# Tensors whose contents may differ.


def test_allow_content_inequality(cluster: Cluster) -> None:
    cluster.join(3)
    strict = [np.full(10, 1, np.float32) for _ in range(3)]
    loose = [np.full(5, i, np.int64) for i in range(3)]
    states = [
        SharedState(
            [
                TensorInfo.from_numpy(strict[i], "strict"),
                TensorInfo.from_numpy(loose[i], "loose", allow_content_inequality=True),
            ]
        )
        for i in range(3)
    ]
    cluster.each(lambda peer, i: peer.sync_shared_state(states[i]))
    assert [x[0] for x in loose] == [0, 1, 2]
    states[0].revision = states[1].revision = 1
    infos = cluster.each(lambda peer, i: peer.sync_shared_state(states[i]))
    assert [x[0] for x in loose] == [0, 1, 0]
    assert [info.rx_bytes for info in infos] == [0, 0, 40]


# What must agree.


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"x": np.zeros(3)}, "offers 2 tensors, but peer 2 offers 1"),
        ({"x": np.zeros(3), "z": np.zeros(2)}, "'z'"),
        ({"y": np.zeros(2), "x": np.zeros(3)}, "same order"),
        ({"x": np.zeros(3), "y": np.zeros((2, 1))}, "[2, 1]"),
        ({"x": np.zeros(3), "y": np.zeros(2, np.float32)}, "FLOAT"),
    ],
)
def test_mismatched_states_fail(cluster: Cluster, other: dict[str, Any], says: str) -> None:
    cluster.join(2)
    states = [SharedState.from_numpy({"x": np.zeros(3), "y": np.zeros(2)}), SharedState.from_numpy(other)]
    errors = cluster.outcomes(lambda peer, i: peer.sync_shared_state(states[i]))
    assert results(errors) == [Result.INVALID_ARGUMENT] * 2
    assert all(says in str(error) for error in errors)


def test_tensors_of_all_kinds(cluster: Cluster) -> None:
    cluster.join(2)
    random = np.random.default_rng(1)
    arrays = {
        "scalar": np.array(1.5),
        "empty": np.empty((0, 4), np.float32),
        "bytes": random.integers(0, 255, 3 * MIB + 1).astype(np.uint8),
        "matrix": random.normal(0, 1, (33, 65)),
        "half": random.normal(0, 1, 7).astype(np.float16),
        "integers": random.integers(-9, 9, 1001),
    }
    mine, theirs = arrays, {name: np.zeros_like(x) for name, x in arrays.items()}
    states = [SharedState.from_numpy(mine), SharedState.from_numpy(theirs)]
    cluster.each(lambda peer, i: peer.sync_shared_state(states[i]))
    assert all(mine[name].tobytes() == theirs[name].tobytes() for name in arrays)


# Wrong use.


def refusal(call: Any) -> PCCLError:
    with pytest.raises(PCCLError) as caught:
        call()
    return caught.value


READ_ONLY = np.zeros(3)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"x": READ_ONLY}, "'x' is read-only"),
        ({"x": np.zeros((4, 4))[:, ::2]}, "tensor 'x' is not contiguous"),
        ({"x": np.zeros(3, complex)}, "complex128"),
        ({"x": [1, 2]}, "not list"),
        ({"": np.zeros(3)}, "cannot be a tensor's name"),
        ({"a\0b": np.zeros(3)}, "cannot be a tensor's name"),
        ({}, "needs tensors"),
    ],
)
def test_wrong_tensors(tensors: dict[str, Any], says: str) -> None:
    error = refusal(partial(SharedState.from_numpy, tensors))
    assert error.result is Result.INVALID_ARGUMENT
    assert says in str(error)


def test_duplicate_names_are_refused() -> None:
    tensor = TensorInfo.from_numpy(np.zeros(3), "x")
    assert "x" in str(refusal(partial(SharedState, [tensor, tensor])))


def test_revision_is_set_and_pushed() -> None:
    state = SharedState.from_numpy({"x": np.zeros(3, np.int8)})
    state.revision = 2**63 - 3
    state.revision += 1
    assert state.push_revision() == 2**63 - 1
    assert refusal(state.push_revision).result is Result.INVALID_ARGUMENT
    assert repr(state) == f"SharedState(revision={2**63 - 1}, tensors=[TensorInfo('x', INT8, shape=[3])])"


def test_too_many_tensors_are_refused(cluster: Cluster) -> None:
    cluster.join(1)
    tiny = np.zeros(1, np.uint8)
    state = SharedState([TensorInfo.from_numpy(tiny, f"{i}{'x' * 60_000}") for i in range(300)])
    with pytest.raises(PCCLError, match="too many to list") as caught:
        cluster[0].sync_shared_state(state)
    assert caught.value.result is Result.INVALID_ARGUMENT
    assert sync(cluster, [Holder(1, 1)])[0].revision == 1
