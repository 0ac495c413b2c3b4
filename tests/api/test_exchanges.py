"""all_to_all, gather, scatter and reduce, against NumPy: any dtype, shape, world and segment size; and what they share
with the other collectives: one outcome for all, inputs kept, timeouts, handles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl import Communicator, DataType, ReduceAlgorithm, ReduceOp, Result
from pccl.protocol import topology
from tests.api.conftest import ClusterOf, clusters
from tests.support.cluster import Cluster, outcomes, refusal, results, run_of, together

Array = npt.NDArray[Any]

worlds = st.sampled_from([2, 4])
segments = st.sampled_from([40, 0])
tails = st.lists(st.integers(0, 4), max_size=2).map(tuple) | st.sampled_from([(300,), (17, 61)])
seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(
    [d.to_numpy_dtype() for d in DataType if d is not DataType.BFLOAT16]
    + [np.dtype(d) for d in ("bool", "complex64", "S5", "M8[s]", ">f4", "i4,f8")]
)


@pytest.fixture(scope="module", params=["mesh", "ring"])
def cluster_of(request: pytest.FixtureRequest) -> Iterator[ClusterOf]:
    """Runs that are kept, by world and segment size: making one takes longer than an op. In a mesh, and in a ring, as
    if there were more peers."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "ring":
            patch.setattr(topology, "MESH_PEERS_MAX", 2)
        yield from clusters()


def random_array(random: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    if dtype == np.bool_:
        return random.integers(0, 2, shape).astype(bool)
    return np.frombuffer(random.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape).copy()


def by_rank(cluster: Cluster) -> list[Communicator]:
    return sorted(cluster.peers, key=lambda peer: peer.membership.rank)


def each_rank(cluster: Cluster, call: Callable[[Communicator, int], Any]) -> list[Any]:
    """Return what all ranks get of a call, in their order."""
    return together([partial(call, peer, rank) for rank, peer in enumerate(by_rank(cluster))])


@settings(max_examples=10)
@given(worlds, segments, st.integers(0, 9), tails, dtypes, seeds, st.booleans())
def test_all_to_all_of_equal_parts(
    cluster_of: ClusterOf,
    world: int,
    segment: int,
    rows: int,
    tail: tuple[int, ...],
    dtype: np.dtype[Any],
    seed: int,
    is_given: bool,
) -> None:
    random = np.random.default_rng(seed)
    sends = [random_array(random, (world * rows, *tail), dtype) for _ in range(world)]
    inputs = [send.tobytes() for send in sends]
    recvs = [np.zeros_like(send) if is_given else None for send in sends]
    infos = each_rank(cluster_of(world, segment), lambda peer, rank: peer.all_to_all(sends[rank], recvs[rank]))
    for rank, info in enumerate(infos):
        expected = np.concatenate([send[rank * rows : (rank + 1) * rows] for send in sends], dtype=dtype)
        assert info.array.tobytes() == expected.tobytes()
        assert (info.array.shape, info.array.dtype) == (expected.shape, dtype)
        assert recvs[rank] is None or info.array is recvs[rank]
        assert sends[rank].tobytes() == inputs[rank]
        assert info.tx_bytes == (world - 1) * expected.nbytes // world
        assert info.rx_bytes >= info.tx_bytes  # in a ring also what passes through


@settings(max_examples=10)
@given(worlds, segments, tails, dtypes, seeds, st.booleans())
def test_all_to_all_of_unequal_parts(
    cluster_of: ClusterOf,
    world: int,
    segment: int,
    tail: tuple[int, ...],
    dtype: np.dtype[Any],
    seed: int,
    is_given: bool,
) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(0, 12, (world, world)) * random.integers(0, 2, (world, world))
    parts = [[random_array(random, (counts[a, b], *tail), dtype) for b in range(world)] for a in range(world)]
    sends = [np.concatenate(row, dtype=dtype) for row in parts]
    inputs = [send.tobytes() for send in sends]
    expected = [np.concatenate([parts[a][b] for a in range(world)], dtype=dtype) for b in range(world)]
    recvs = [np.zeros(x.shape, dtype) if is_given else None for x in expected]

    def call(peer: Communicator, rank: int) -> Any:
        return peer.all_to_all(
            sends[rank], recvs[rank], send_counts=counts[rank].tolist(), recv_counts=counts[:, rank].tolist()
        )

    for rank, info in enumerate(each_rank(cluster_of(world, segment), call)):
        assert info.array.tobytes() == expected[rank].tobytes()
        assert info.array.shape == expected[rank].shape
        assert sends[rank].tobytes() == inputs[rank]


@settings(max_examples=10)
@given(worlds, segments, tails, dtypes, seeds, st.sampled_from(["made", "given", "in place"]))
def test_gather_and_scatter(
    cluster_of: ClusterOf,
    world: int,
    segment: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    seed: int,
    recv: str,
) -> None:
    cluster = cluster_of(world, segment)
    random = np.random.default_rng(seed)
    root = seed % world
    whole = random_array(random, (world, *shape), dtype)
    rows = [whole[rank : rank + 1].reshape(shape) for rank in range(world)]
    target = None if recv == "made" else np.zeros_like(whole)

    def gather(peer: Communicator, rank: int) -> Any:
        if rank != root:
            return peer.gather(rows[rank].copy(), root=root)
        if recv != "in place":
            return peer.gather(rows[rank].copy(), target, root=root)
        assert target is not None
        target[rank] = whole[rank]
        return peer.gather(target[rank : rank + 1].reshape(shape), target, root=root)

    for rank, info in enumerate(each_rank(cluster, gather)):
        if rank != root:
            assert info.array is None
            continue
        assert info.array.tobytes() == whole.tobytes()
        assert info.array.shape == whole.shape
        assert target is None or info.array is target

    given_whole = whole.copy()

    def scatter(peer: Communicator, rank: int) -> Any:
        if rank != root:
            return peer.scatter(None, np.zeros(shape, dtype), root=root)
        part = given_whole[rank : rank + 1].reshape(shape) if recv == "in place" else np.zeros(shape, dtype)
        return peer.scatter(given_whole, part, root=root)

    for rank, info in enumerate(each_rank(cluster, scatter)):
        assert info.array.tobytes() == rows[rank].tobytes()
    assert given_whole.tobytes() == whole.tobytes()


@settings(max_examples=10)
@given(
    worlds,
    segments,
    st.integers(0, 5000),
    st.sampled_from([d for d in DataType if d is not DataType.BFLOAT16]),
    seeds,
    st.sampled_from(ReduceOp),
    st.sampled_from(ReduceAlgorithm),
    st.sampled_from(["made", "given", "in place"]),
)
def test_reduce_equals_all_reduce(
    cluster_of: ClusterOf,
    world: int,
    segment: int,
    count: int,
    dtype: DataType,
    seed: int,
    op: ReduceOp,
    algorithm: ReduceAlgorithm,
    recv: str,
) -> None:
    cluster = cluster_of(world, segment)
    random = np.random.default_rng(seed)
    inputs = [random.integers(1, 100, count).astype(dtype.to_numpy_dtype()) for _ in range(world)]
    root = seed % world
    sends = [x.copy() for x in inputs]
    target = {"made": None, "given": np.zeros_like(inputs[root]), "in place": sends[root]}[recv]

    def reduce(peer: Communicator, rank: int) -> Any:
        return peer.reduce(sends[rank], target if rank == root else None, op=op, root=root, algorithm=algorithm)

    if world > topology.MESH_PEERS_MAX:
        algorithm = ReduceAlgorithm.RING
    infos = each_rank(cluster, reduce)
    wholes = [x.copy() for x in inputs]
    each_rank(cluster, lambda peer, rank: peer.all_reduce(wholes[rank], op=op, algorithm=algorithm))
    for rank, info in enumerate(infos):
        if rank == root:
            assert info.array.tobytes() == wholes[rank].tobytes()
        else:
            assert info.array is None
        if rank != root or recv != "in place":
            assert sends[rank].tobytes() == inputs[rank].tobytes()


def fails_for_all(cluster: Cluster, call: Callable[[Communicator, int], Any], result: Result, *says: str) -> None:
    peers = by_rank(cluster)
    found = outcomes([partial(call, peer, rank) for rank, peer in enumerate(peers)])
    assert results(found) == [result] * len(peers)
    for error in found:
        assert all(text in str(error) for text in says), str(error)
    cluster.each(lambda peer, _: peer.barrier())  # the run is intact


def test_mismatch_is_reported_to_all(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(3, 0)
    x = np.arange(6.0)
    fails_for_all(
        cluster,
        lambda peer, rank: peer.all_to_all(
            np.zeros(4 if rank == 1 else 3), send_counts=[1, 1, 2] if rank == 1 else [1, 1, 1], recv_counts=[1, 1, 1]
        ),
        *(Result.INVALID_ARGUMENT, " has all_to_all that takes 1 x float64", " has all_to_all that gives "),
        *("peer 2 (", "peer 3 ("),
    )
    fails_for_all(
        cluster,
        lambda peer, rank: peer.all_to_all(x.reshape((3, 2) if rank else (6, 1))),
        *(Result.INVALID_ARGUMENT, "rows of shape (2,)", "rows of shape (1,)"),
    )
    fails_for_all(
        cluster,
        lambda peer, rank: peer.gather(x, root=rank // 2),
        *(Result.INVALID_ARGUMENT, "gather of 18 x float64 to rank 0", "gather of 18 x float64 to rank 1"),
    )
    fails_for_all(
        cluster,
        lambda peer, rank: peer.scatter(x, x[:2].copy(), root=0) if rank else peer.gather(x[:2], root=0),
        *(Result.INVALID_USAGE, "gather of 6 x float64 to rank 0", "scatter of 6 x float64 from rank 0"),
    )
    fails_for_all(
        cluster,
        lambda peer, rank: peer.reduce(x, op=ReduceOp.SUM if rank else ReduceOp.MAX, root=2),
        *(Result.INVALID_ARGUMENT, "reduce SUM of 6 x float64 to rank 2", "reduce MAX of 6 x float64 to rank 2"),
    )
    fails_for_all(
        cluster,
        lambda peer, rank: peer.reduce(x, op=ReduceOp.SUM, root=2, step=rank // 2),
        *(Result.INVALID_ARGUMENT, "reduces step 0", "reduces step 1"),
    )


def test_wrong_size_fails_on_all(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(3, 0)
    x = np.arange(6)
    small = np.empty(5, x.dtype)
    both = {"send_counts": [3, 3], "recv_counts": [2, 4]}
    cases: list[tuple[Callable[[Communicator, int], Any], str]] = [
        (lambda peer, _: peer.all_to_all(x[:4]), "send has 4 rows, which cannot be divided evenly among 3 peers"),
        (lambda peer, r: peer.all_to_all(x, small if r == 1 else None), "recv has 5 elements, but the result"),
        (lambda peer, _: peer.all_to_all(x, x), "recv overlaps send"),
        (lambda peer, _: peer.reduce(x[:3], x[1:4], op=ReduceOp.SUM, root=0), "recv overlaps send"),
        (lambda peer, _: peer.reduce(x[:3], x[:2].copy(), op=ReduceOp.SUM, root=0), "recv has 2 elements"),
        (lambda peer, _: peer.all_to_all(x, **both), "send_counts has 2 numbers, but there are 3 peers"),
        (
            lambda peer, r: peer.all_to_all(x, send_counts=[2, 2, 2], recv_counts=[2, 2 - r % 2, 2 + r % 2]),
            "rank 1 sends itself 2 rows and receives 1",
        ),
        (lambda peer, _: peer.gather(x, small, root=0), "recv has 5 elements, but the result of rank 0 of 3 has 18"),
        (lambda peer, _: peer.scatter(x, small, root=0), "send has 6 elements, but 3 peers receive 5 each, 15 in all"),
        (lambda peer, _: peer.scatter(x, x[:2], root=1), "recv overlaps send, outside the part of rank 1"),
    ]
    for call, says in cases:
        fails_for_all(cluster, call, Result.INVALID_ARGUMENT, "cannot take part", says)
    for root in (3, -1):
        rootless: list[Callable[[Communicator, int], Any]] = [
            lambda peer, _, root=root: peer.gather(x, root=root),  # type: ignore[misc]
            lambda peer, _, root=root: peer.scatter(None, x.copy(), root=root),  # type: ignore[misc]
            lambda peer, _, root=root: peer.reduce(x, op=ReduceOp.SUM, root=root),  # type: ignore[misc]
        ]
        for call in rootless:
            fails_for_all(cluster, call, Result.INVALID_ARGUMENT, f"rank {root} does not exist in a group of 3 peers")


def test_wrong_argument_is_refused_at_once(cluster_of: ClusterOf) -> None:
    peer = cluster_of(2, 0)[0]
    me = peer.membership.rank
    x = np.arange(4)
    read_only = x.copy()
    read_only.flags.writeable = False
    for says, call in {
        "send has no dimension": lambda: peer.all_to_all(np.array(1)),
        "recv_counts is missing": lambda: peer.all_to_all(x, send_counts=[2, 2]),
        "send_counts is missing": lambda: peer.all_to_all(x, recv_counts=[2, 2]),
        "send_counts add up to 5, but send has 4 rows": lambda: peer.all_to_all(
            x, send_counts=[2, 3], recv_counts=[1, 1]
        ),
        "recv_counts[0] -1 is not an integer": lambda: peer.all_to_all(x, send_counts=[2, 2], recv_counts=[-1, 1]),
        "send_counts[1] 2.5 is not an integer": lambda: peer.all_to_all(
            x,
            send_counts=[2, 2.5],  # type: ignore[list-item]
            recv_counts=[1, 1],
        ),
        "send_counts must be a sequence": lambda: peer.all_to_all(x, send_counts=4, recv_counts=[1]),  # type: ignore[arg-type]
        "recv is read-only": lambda: peer.gather(x, read_only, root=me),
        "send is INT64 but recv is FLOAT": lambda: peer.gather(x, np.empty(8, np.float32), root=me),
        "send is None, but this peer is the root": lambda: peer.scatter(None, x, root=me),
        "dtype bool cannot be reduced": lambda: peer.reduce(x > 1, op=ReduceOp.SUM, root=me),
        "op must be a ReduceOp": lambda: peer.reduce(x, op="sum", root=me),  # type: ignore[arg-type]
        "root '1' is not an integer": lambda: peer.gather(x, root="1"),  # type: ignore[arg-type]
    }.items():
        error = refusal(call)
        assert error.result is Result.INVALID_ARGUMENT, error
        assert says in str(error)


def test_lost_root_aborts_on_all() -> None:
    with run_of(3) as cluster:
        peers = by_rank(cluster)
        x = np.arange(6)
        seen = [peer.membership.peers for peer in peers]
        assert len(set(seen)) == 1
        # All name rank 2, the leaver, before they know that it has left: the ops start in the next view.
        held = [peer.all_reduce_async(np.zeros(4), op=ReduceOp.SUM, tag=9) for peer in peers[:2]]
        launched = [
            [
                peer.launch.gather(x, root=2, tag=1),
                peer.launch.scatter(None, x[:2].copy(), root=2, tag=2),
                peer.launch.reduce(x, op=ReduceOp.SUM, root=2, tag=3),
            ]
            for peer in peers[:2]
        ]
        cluster.peers.remove(peers[2])
        peers[2].close()
        for handles in launched:
            assert [refusal(handle.result).result for handle in handles] == [Result.RANK_CONNECTION_LOST] * 3
        assert [handle.wait()[1] for handle in held] == [Result.RANK_CONNECTION_LOST] * 2
