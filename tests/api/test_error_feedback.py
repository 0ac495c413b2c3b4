"""`ErrorFeedback` against a model in NumPy, to the bit, also after failures and changes of the view."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl import (
    Communicator,
    DataType,
    ErrorFeedback,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceAlgorithm,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    Result,
)
from tests.api.test_quantization import FOUR_BITS, LEVELS, there_and_back
from tests.support.cluster import Cluster, refusal, run_of

Vector = npt.NDArray[np.float32]

LLOYD_MAX, SIGN = LEVELS
OPTIONS = [LLOYD_MAX, SIGN, FOUR_BITS, QuantizationOptions(DataType.INT8, QuantizationAlgorithm.ZERO_POINT_SCALE)]
SEGMENT = 100
"""Elements of a segment, where blocks begin again."""


class Model:
    """All peers of one view, by rank."""

    def __init__(self, world: int, decay: float, options: QuantizationOptions, is_ring: bool) -> None:
        self.world, self.decay, self.options, self.is_ring = world, np.float32(decay), options, is_ring
        self.residuals: list[Vector] | None = None

    def reduce(self, inputs: list[Vector], op: ReduceOp) -> Vector:
        if self.residuals is None or self.residuals[0].size != inputs[0].size:
            self.residuals = [np.zeros_like(x) for x in inputs]
        ends = np.cumsum([len(part) for part in np.array_split(inputs[0], self.world)])
        return np.concatenate(
            [
                self._segment(inputs, op, owner, slice(at, min(at + SEGMENT, end)))
                for owner, end in enumerate(ends)
                for at in range(ends[owner - 1] if owner else 0, end, SEGMENT)
            ]
        )

    def _segment(self, inputs: list[Vector], op: ReduceOp, owner: int, place: slice) -> Vector:
        parts = [x[place] for x in inputs]
        if self.is_ring:
            order = [(owner + 1 + i) % self.world for i in range(self.world)]
            total = parts[order[0]]
            for before, rank in pairwise(order):
                total = parts[rank] + self._encoded(before, place, total)
        else:
            sent = [part if rank == owner else self._encoded(rank, place, part) for rank, part in enumerate(parts)]
            total = sent[0].copy()
            for part in sent[1:]:
                total += part
        return self._encoded(owner, place, total / np.float32(self.world) if op is ReduceOp.AVG else total)

    def _encoded(self, rank: int, place: slice, values: Vector) -> Vector:
        """Return what the others decode, by the definition of error feedback."""
        assert self.residuals is not None
        values = values + self.residuals[rank][place]
        decoded = there_and_back(self.options, values)
        self.residuals[rank][place] = self.decay * (values - decoded)
        return decoded


def inputs_of(world: int, count: int, seed: int = 0) -> list[Vector]:
    return [np.random.default_rng([seed, rank]).normal(size=count).astype(np.float32) for rank in range(world)]


class Run:
    """The peers of a cluster, each with its own `ErrorFeedback`, and their model."""

    def __init__(self, cluster: Cluster, decay: float, options: QuantizationOptions, is_ring: bool = False) -> None:
        self.cluster, self.decay, self.options, self.is_ring = cluster, decay, options, is_ring
        self.of: dict[Communicator, ErrorFeedback] = {}
        self.forget()

    def forget(self) -> None:
        """The view has changed."""
        world = len(self.cluster.peers)
        self.model = Model(world, self.decay, self.options, self.is_ring)
        for peer in self.cluster.peers:
            self.of.setdefault(peer, ErrorFeedback(self.decay))

    def arguments(self, peer: Communicator) -> dict[str, Any]:
        algorithm = ReduceAlgorithm.RING if self.is_ring else None
        return {"quantization": self.options, "feedback": self.of[peer], "algorithm": algorithm}

    def reduce(
        self, count: int, seed: int, op: ReduceOp = ReduceOp.AVG, in_place: bool = True, form: str = "call"
    ) -> None:
        by_rank = inputs_of(self.model.world, count, seed)
        expected = self.model.reduce(by_rank, op)

        def call(peer: Communicator, _: int) -> None:
            given = by_rank[peer.rank]
            sent = given.copy()
            result = sent if in_place else np.empty_like(sent)
            given_as = {"op": op, **self.arguments(peer)}
            if form == "call":
                peer.all_reduce(sent, result, **given_as)
            elif form == "handle":
                peer.launch.all_reduce(sent, result, **given_as).result()
            else:
                given_as["quantization_options"] = given_as.pop("quantization")
                descriptor = ReduceDescriptor(count, **given_as)
                peer.all_reduce_multiple_with_retry([ReduceOpDescriptor.from_numpy(sent, result, descriptor)])
            assert in_place or sent.tobytes() == given.tobytes()
            np.testing.assert_array_equal(result, expected)
            np.testing.assert_array_equal(self.of[peer].kept.array, self.model.residuals[peer.rank])

        self.cluster.each(call)

    def fail(self, count: int) -> None:
        """All but one peer launch an op, which one of them cancels. The last one then launches it, too."""
        kept = [self.of[peer].kept.array for peer in self.cluster.peers]
        arrays = [np.ones(count, np.float32) for _ in kept]
        *_, last = peers = list(zip(self.cluster.peers, arrays, strict=True))
        handles = [peer.launch.all_reduce(array, **self.arguments(peer)) for peer, array in peers[:-1]]
        assert handles[-1].cancel()
        handles.append(last[0].launch.all_reduce(last[1], **self.arguments(last[0])))
        for handle in handles:
            assert refusal(handle.result).result is Result.TIMEOUT
        assert all((array == 1).all() for array in arrays)
        assert all(self.of[peer].kept.array is array for peer, array in zip(self.cluster.peers, kept, strict=True))


@pytest.fixture(scope="module")
def cluster() -> Any:
    with run_of(3, segment_bytes=4 * SEGMENT) as three:
        yield three


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("is_ring", [False, True])
@pytest.mark.parametrize(("decay", "op", "in_place"), [(1.0, ReduceOp.SUM, True), (0.4, ReduceOp.AVG, False)])
def test_results_and_residuals_are_those_of_the_definition(
    cluster: Cluster, options: QuantizationOptions, is_ring: bool, decay: float, op: ReduceOp, in_place: bool
) -> None:
    run = Run(cluster, decay, options, is_ring)
    for step, form in enumerate(["call", "handle", "descriptor", "call"]):
        run.reduce(1000 if step < 3 else 777, step, op, in_place, form)  # another count drops the residuals


def test_errors_do_not_add_up(cluster: Cluster) -> None:
    inputs = inputs_of(3, 5000)
    exact = np.mean(inputs, axis=0)
    for feedback, worst in [(True, 0.03), (False, 0.1)]:
        run, sums = Run(cluster, 1.0, LLOYD_MAX), [np.zeros(5000, np.float32) for _ in inputs]

        def call(peer: Communicator, i: int, run: Run = run, sums: Any = sums, feedback: bool = feedback) -> None:
            given = {**run.arguments(peer), **({} if feedback else {"feedback": None})}
            for _ in range(100):
                result = np.empty(5000, np.float32)
                peer.all_reduce(inputs[i], result, op=ReduceOp.AVG, **given)
                sums[i] += result / 100

        cluster.each(call)
        error = float(((sums[0] - exact) ** 2).mean() / (exact**2).mean()) ** 0.5
        assert error < worst if feedback else error > worst, error


@settings(deadline=None, max_examples=8)
@given(st.data())
def test_residuals_under_churn(data: st.DataObject) -> None:
    """They survive ops that fail, and are dropped with the view. Results are equal on all peers."""
    options, is_ring = data.draw(st.sampled_from(OPTIONS)), data.draw(st.booleans())
    with run_of(3, segment_bytes=4 * SEGMENT) as cluster:
        run = Run(cluster, data.draw(st.sampled_from([0.0, 0.4, 1.0])), options, is_ring)
        for step in range(data.draw(st.integers(3, 8))):
            what = data.draw(st.sampled_from(["reduce", "reduce", "fail", "join", "leave", "reset"]))
            if what == "fail":
                run.fail(400)
            elif what == "join" and len(cluster.peers) < 4:
                cluster.join()
                run.forget()
            elif what == "leave" and len(cluster.peers) > 2:
                cluster.close(cluster.peers[data.draw(st.integers(0, len(cluster.peers) - 1))])
                run.forget()
            elif what == "reset":
                for feedback in run.of.values():
                    feedback.reset()
                run.forget()
            run.reduce(data.draw(st.sampled_from([400, 400, 401])), step)


def test_a_lost_peer_leaves_inputs_and_residuals() -> None:
    with run_of(3, segment_bytes=4 * SEGMENT) as cluster:
        run = Run(cluster, 0.4, LLOYD_MAX)
        run.reduce(1000, 0)
        lost, *survivors = cluster.peers
        kept = [run.of[peer].kept.array for peer in survivors]
        arrays = [np.ones(1000, np.float32) for _ in survivors]
        handles = [peer.launch.all_reduce(x, **run.arguments(peer)) for peer, x in zip(survivors, arrays, strict=True)]
        lost.close()
        for handle in handles:
            assert refusal(handle.result).result is Result.RANK_CONNECTION_LOST
        assert all((array == 1).all() for array in arrays)
        assert all(run.of[peer].kept.array is array for peer, array in zip(survivors, kept, strict=True))
        cluster.peers.remove(lost)
        run.forget()
        run.reduce(1000, 1)


def test_one_op_at_a_time(cluster: Cluster) -> None:
    run = Run(cluster, 1.0, SIGN)
    peer, arrays = cluster[0], [np.ones(64, np.float32) for _ in range(2)]
    handle = peer.launch.all_reduce(arrays[0], tag=1, **run.arguments(peer))
    error = refusal(lambda: peer.launch.all_reduce(arrays[1], tag=2, **run.arguments(peer)))
    assert error.result is Result.INVALID_USAGE
    assert "one ErrorFeedback for each array" in error.message
    others = [
        each.launch.all_reduce(np.ones(64, np.float32), tag=1, **run.arguments(each)) for each in cluster.peers[1:]
    ]
    for each in (handle, *others):
        each.result()
    run.forget()
    for feedback in run.of.values():
        feedback.reset()
    run.reduce(64, 0)


def test_a_block_that_is_not_finite_begins_again(cluster: Cluster) -> None:
    run = Run(cluster, 1.0, LLOYD_MAX)
    run.reduce(600, 0)
    arrays = inputs_of(3, 600)
    arrays[0][7] = np.nan
    cluster.each(lambda peer, i: peer.all_reduce(arrays[i], **run.arguments(peer)))
    residuals = np.array([run.of[peer].kept.array for peer in cluster.peers])
    assert np.isnan(arrays[1][:64]).all()
    assert np.isfinite(residuals).all()
    assert np.count_nonzero(residuals[:, 64:]) > np.count_nonzero(residuals[:, :64]) / 64


@pytest.mark.parametrize(
    ("array", "arguments", "message"),
    [
        (np.ones(8, np.float32), {}, "not for FLOAT SUM without quantization"),
        (np.ones(8), {"quantization": FOUR_BITS}, "not for DOUBLE SUM with quantization"),
        (np.ones(8, np.float32), {"quantization": FOUR_BITS, "op": ReduceOp.MAX}, "FLOAT MAX with quantization"),
        (np.ones(8, np.float32), {"quantization": FOUR_BITS, "feedback": 0.4}, "must be an ErrorFeedback or None"),
    ],
)
def test_wrong_arguments(cluster: Cluster, array: Any, arguments: dict[str, Any], message: str) -> None:
    error = refusal(lambda: cluster[0].all_reduce(array, **{"feedback": ErrorFeedback(), **arguments}))
    assert error.result is Result.INVALID_ARGUMENT
    assert message in error.message
    with pytest.raises(ValueError, match="decay must be from 0 to 1"):
        ErrorFeedback(1.5)
