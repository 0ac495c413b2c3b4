"""The collectives other than all_reduce, against NumPy: any dtype, shape, world and segment size, both algorithms; and
what they share with all_reduce: one outcome for all, inputs kept, timeouts, handles."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl import (
    AsyncCommunicator,
    CollectiveInfo,
    Communicator,
    DataType,
    MasterNode,
    ReduceAlgorithm,
    ReduceOp,
    Result,
)
from tests.api.conftest import ClusterOf
from tests.support.cluster import Background, Cluster, refusal, results, run_of, together, until

Array = npt.NDArray[Any]

worlds = st.sampled_from([2, 3, 5])
segments = st.sampled_from([8, 1000, 0])
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.sampled_from([(300,), (4099,), (17, 61)])
seeds = st.integers(0, 2**32 - 1)
algorithms = st.sampled_from([None, *ReduceAlgorithm])
# All that can be reduced, and what travels as bytes.
dtypes = st.sampled_from(
    [d.to_numpy_dtype() for d in DataType if d is not DataType.BFLOAT16]
    + [np.dtype(d) for d in ("bool", "complex64", "S5", "M8[s]", ">f4", "i4,f8")]
)
loops = pytest.mark.parametrize("algorithm", list(ReduceAlgorithm))


def inputs_of(world: int, shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> list[Array]:
    """Any bits, but that a bool has but one."""
    random = np.random.default_rng(seed)
    count = int(np.prod(shape))
    if dtype == np.bool_:
        return [random.integers(0, 2, shape).astype(bool) for _ in range(world)]
    return [np.frombuffer(random.bytes(count * dtype.itemsize), dtype).reshape(shape) for _ in range(world)]


def check_members(cluster: Cluster, infos: list[CollectiveInfo]) -> None:
    assert [info.membership for info in infos] == [peer.membership for peer in cluster.peers]
    assert {info.membership.peers for info in infos} == {infos[0].membership.peers}
    assert sorted(info.rank for info in infos) == list(range(len(infos)))
    assert {info.world_size for info in infos} == {len(infos)}


@settings(max_examples=40)
@given(worlds, segments, shapes, dtypes, seeds, algorithms, st.sampled_from(["made", "given", "in place"]))
def test_all_gather(
    cluster_of: ClusterOf,
    world: int,
    segment: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    seed: int,
    algorithm: ReduceAlgorithm | None,
    recv: str,
) -> None:
    cluster = cluster_of(world, segment)
    inputs = inputs_of(world, shape, dtype, seed)
    sends = [x.copy() for x in inputs]
    recvs: list[Any] = [None] * world
    if recv != "made":
        recvs = [np.zeros((world, *shape), dtype) for _ in range(world)]
    if recv == "in place":
        for i, peer in enumerate(cluster.peers):
            recvs[i][peer.membership.rank] = inputs[i]
            sends[i] = recvs[i][peer.membership.rank : peer.membership.rank + 1]
    infos = cluster.each(lambda peer, i: peer.all_gather(sends[i], recvs[i], algorithm=algorithm))
    check_members(cluster, infos)
    expected = b"".join(inputs[i].tobytes() for i in np.argsort([info.rank for info in infos]))
    for i, info in enumerate(infos):
        assert info.array.dtype == dtype
        assert info.array.shape == (world, *shape)
        assert info.array.tobytes() == expected
        assert sends[i].tobytes() == inputs[i].tobytes()
        assert recvs[i] is None or info.array is recvs[i]
        assert info.tx_bytes == info.rx_bytes == (world - 1) * inputs[i].nbytes


@settings(max_examples=30)
@given(worlds, segments, shapes, dtypes, seeds, algorithms)
def test_broadcast(
    cluster_of: ClusterOf,
    world: int,
    segment: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    seed: int,
    algorithm: ReduceAlgorithm | None,
) -> None:
    cluster = cluster_of(world, segment)
    inputs = inputs_of(world, shape, dtype, seed)
    arrays = [x.copy() for x in inputs]
    root = seed % world
    infos = cluster.each(lambda peer, i: peer.broadcast(arrays[i], root=root, algorithm=algorithm))
    check_members(cluster, infos)
    (source,) = [x for x, info in zip(inputs, infos, strict=True) if info.rank == root]
    for array, info in zip(arrays, infos, strict=True):
        assert info.array is array
        assert array.tobytes() == source.tobytes()
        assert info.rx_bytes == (0 if info.rank == root else source.nbytes)
    copies = world - 1
    assert sum(info.tx_bytes for info in infos) == copies * source.nbytes


@settings(max_examples=30)
@given(
    worlds,
    segments,
    shapes,
    st.sampled_from([d for d in DataType if d is not DataType.BFLOAT16]),
    seeds,
    st.sampled_from(ReduceOp),
    st.sampled_from(ReduceAlgorithm),
    st.booleans(),
)
def test_reduce_scatter(
    cluster_of: ClusterOf,
    world: int,
    segment: int,
    shape: tuple[int, ...],
    dtype: DataType,
    seed: int,
    op: ReduceOp,
    algorithm: ReduceAlgorithm,
    is_made: bool,
) -> None:
    cluster = cluster_of(world, segment)
    random = np.random.default_rng(seed)
    inputs = [(random.normal(0, 50, shape)).astype(dtype.to_numpy_dtype()) for _ in range(world)]
    whole = [np.array(x) for x in inputs]
    cluster.each(lambda peer, i: peer.all_reduce(whole[i], op=op, algorithm=algorithm))
    parts = np.array_split(whole[0].ravel(), world)
    sends = [np.array(x) for x in inputs]

    def call(peer: Communicator, i: int) -> CollectiveInfo:
        recv = None if is_made else np.empty_like(parts[peer.membership.rank])
        info = peer.reduce_scatter(sends[i], recv, op=op, algorithm=algorithm)
        assert recv is None or info.array is recv
        return info

    infos = cluster.each(call)
    check_members(cluster, infos)
    for i, info in enumerate(infos):
        assert info.array.dtype == inputs[0].dtype
        assert info.array.tobytes() == parts[info.rank].tobytes()
        assert sends[i].tobytes() == inputs[i].tobytes()


@pytest.mark.parametrize("world", [2, 3, 5])
def test_barrier_waits_for_all(cluster_of: ClusterOf, world: int) -> None:
    cluster = cluster_of(world, 0)
    come: list[int] = []
    seen: list[int] = []
    gate = threading.Event()

    def call(peer: Communicator, i: int) -> None:
        if i == world - 1:
            gate.wait()
        come.append(i)
        peer.barrier()
        seen.append(len(come))

    first = [Background(lambda i=i: call(cluster[i], i)) for i in range(world)]  # type: ignore[misc]
    until(lambda: len(come) == world - 1, "all but one have come")
    assert not seen
    gate.set()
    for thread in first:
        thread.result()
    assert seen == [world] * world


@loops
def test_large_arrays_with_two_engine_threads(algorithm: ReduceAlgorithm) -> None:
    with MasterNode("127.0.0.1:0", engine_threads=2) as master:
        cluster = Cluster(master.address)
        cluster.join(3)
        sends = [np.full(700_001, i, np.int16) for i in range(3)]
        for info in cluster.each(lambda peer, i: peer.all_gather(sends[i], algorithm=algorithm)):
            assert np.array_equal(info.array, np.arange(3)[:, None] + np.zeros(700_001, np.int16))
        arrays = [np.full(1_500_000, i, np.int32) for i in range(3)]
        cluster.each(lambda peer, i: peer.broadcast(arrays[i], root=2, algorithm=algorithm))
        assert all(np.all(x == 2) for x in arrays)
        for part in cluster.each(lambda peer, i: peer.reduce_scatter(arrays[i], op=ReduceOp.PROD, algorithm=algorithm)):
            assert np.array_equal(part.array, np.full(500_000, 8))
        cluster.close_all()


def test_torch_tensors(cluster_of: ClusterOf) -> None:
    torch = pytest.importorskip("torch")
    cluster = cluster_of(2, 0)
    for dtype in [torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]:
        sends = [torch.tensor([[i, 0, 1]]).to(dtype) for i in range(2)]
        for info in cluster.each(lambda peer, i, sends=sends: peer.all_gather(sends[i])):
            assert info.array.dtype == dtype
            assert torch.equal(info.array.to(torch.complex64), torch.stack(sends).to(torch.complex64))
        cluster.each(lambda peer, i, sends=sends: peer.broadcast(sends[i], root=1))
        assert sends[0].to(torch.complex64).tolist() == [[1, 0, 1]]
    halves = [torch.tensor([i, 1.5, 2]) for i in range(2)]
    infos = cluster.each(lambda peer, i: peer.reduce_scatter(halves[i], op=ReduceOp.SUM))
    assert [info.array.tolist() for info in infos] == [[1, 3], [4]]


def test_many_ops_in_flight(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(3, 0)

    def call(peer: Communicator, i: int) -> None:
        tags = np.random.default_rng(i).permutation(40)
        sums = {tag: np.full(10, i, np.int64) for tag in tags}
        handles: dict[int, Any] = {}
        for tag in map(int, tags):
            if tag % 4 == 0:
                handles[tag] = peer.all_reduce_async(sums[tag], op=ReduceOp.SUM, tag=tag)
            elif tag % 4 == 1:
                handles[tag] = peer.launch.all_gather(np.array([i, tag]), tag=tag)
            elif tag % 4 == 2:
                handles[tag] = peer.launch.broadcast(sums[tag], root=1, tag=tag)
            else:
                handles[tag] = peer.launch.reduce_scatter(sums[tag], op=ReduceOp.MAX, tag=tag)
        for tag, handle in handles.items():
            assert handle.wait()
            info = handle.result()
            assert handle.tag == tag
            assert handle.done()
            if tag % 4 == 1:
                assert info.array.tolist() == [[0, tag], [1, tag], [2, tag]]
            elif tag % 4 == 3:
                assert info.array.tolist() == [2] * (4 if i == 0 else 3)
            else:
                assert np.all(sums[tag] == (3 if tag % 4 == 0 else 1))

    cluster.each(call)


def launches(peer: Communicator | AsyncCommunicator, x: Any) -> list[Callable[[], Any]]:
    """Return calls of every kind that others could join, if there were any."""
    return [
        lambda: peer.all_reduce_async(x, op=ReduceOp.SUM),
        lambda: peer.launch.all_gather(x),
        lambda: peer.launch.reduce_scatter(x, op=ReduceOp.SUM),
        lambda: peer.launch.broadcast(x, root=0),
        lambda: peer.launch.barrier(),
    ]


def test_launch_alone_is_refused() -> None:
    with run_of(1) as cluster:
        for _ in range(2):  # the first round leaves no op in flight
            for launch in launches(cluster[0], np.array([1])):
                error = refusal(launch)
                assert error.result is Result.TOO_FEW_PEERS
                assert "alone in peer group 0; wait_for_peers(2) returns when another one has joined" in str(error)
        assert cluster[0].stats["ops_open"] == 0

        async def main() -> None:
            async with AsyncCommunicator(cluster.address, peer_group=3) as peer:
                for launch in launches(peer, np.array([1])):
                    error = refusal(launch)
                    assert (error.result, "alone in peer group 3" in str(error)) == (Result.TOO_FEW_PEERS, True)

        thread = Background(lambda: trio.run(main))
        while not thread.is_over:
            if cluster[0].are_peers_pending():
                cluster[0].update_topology()
        thread.result()


def fails_for_all(cluster: Cluster, call: Callable[[Communicator, int], Any], result: Result, *says: str) -> None:
    found = cluster.outcomes(call)
    assert results(found) == [result] * len(cluster.peers)
    for error in found:
        assert all(text in str(error) for text in says), str(error)
    cluster.each(lambda peer, _: peer.barrier())  # the run is intact


@loops
def test_mismatch_is_reported_to_all(cluster_of: ClusterOf, algorithm: ReduceAlgorithm) -> None:
    cluster = cluster_of(3, 0)
    x = [np.arange(6.0) for _ in range(3)]
    fails_for_all(
        cluster,
        lambda peer, i: peer.all_gather(x[i][: 3 + i % 2], algorithm=algorithm),
        *(Result.INVALID_ARGUMENT, "all_gather of 9 x float64", "all_gather of 12 x float64"),
    )
    fails_for_all(
        cluster,
        lambda peer, i: peer.broadcast(x[i], root=i // 2, algorithm=algorithm),
        *(Result.INVALID_ARGUMENT, "broadcast of 6 x float64 from rank 0", "broadcast of 6 x float64 from rank 1"),
    )
    fails_for_all(
        cluster,
        lambda peer, i: peer.all_gather(x[i], algorithm=algorithm) if i else peer.all_reduce(x[i], op=ReduceOp.MAX),
        *(Result.INVALID_USAGE, "different ops with the same tag", "all_gather of 18 x float64", "MAX of 6 x float64"),
    )
    fails_for_all(
        cluster,
        lambda peer, i: peer.barrier(tag=3) if i else peer.broadcast(x[i], root=0, tag=3, algorithm=algorithm),
        *(Result.INVALID_USAGE, "barrier of 0", "broadcast of 6 x float64"),
    )
    assert all(np.array_equal(array, np.arange(6.0)) for array in x)


def test_wrong_size_fails_on_all(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(3, 0)
    x = np.arange(4)
    fails_for_all(
        cluster,
        lambda peer, i: peer.all_gather(x, np.empty((2 if i == 1 else 3, 4), x.dtype)),
        *(
            Result.INVALID_ARGUMENT,
            "peer 2 cannot take part",
            "recv has 8 elements",
            "the result of rank 1 of 3 has 12",
        ),
    )
    fails_for_all(
        cluster,
        lambda peer, i: peer.reduce_scatter(x, np.empty(2 if i < 2 else 1, x.dtype), op=ReduceOp.SUM),
        *(Result.INVALID_ARGUMENT, "peer 2 cannot take part", "the result of rank 1 of 3 has 1"),
    )
    whole = [np.zeros(12, np.int64) for _ in range(3)]
    fails_for_all(
        cluster,
        lambda peer, i: peer.reduce_scatter(whole[i], whole[i][4:8], op=ReduceOp.SUM),
        *(Result.INVALID_ARGUMENT, "recv overlaps send"),
    )
    fails_for_all(
        cluster,
        lambda peer, i: peer.all_gather(whole[i][4:8], whole[i]),
        *(Result.INVALID_ARGUMENT, "recv overlaps send, outside the part of rank"),
    )
    for root in (3, -1):
        fails_for_all(
            cluster,
            lambda peer, _, root=root: peer.broadcast(x.copy(), root=root),  # type: ignore[misc]
            *(Result.INVALID_ARGUMENT, f"rank {root} does not exist in a group of 3 peers"),
        )


def calls(x: Array) -> dict[str, Callable[..., Any]]:
    """Return a call of each kind that gives this array, or a part of it to each peer; `size` is that of the parts."""
    return {
        "all_gather": lambda peer, **options: peer.all_gather(x, **options),
        "broadcast": lambda peer, **options: peer.broadcast(x, root=0, **options),
        "reduce_scatter": lambda peer, **options: peer.reduce_scatter(x, **options),
        "barrier": lambda peer, **options: peer.barrier(**options),
        "all_to_all": lambda peer, **options: peer.all_to_all(x, **options),
        "gather": lambda peer, **options: peer.gather(x, root=0, **options),
        "scatter": lambda peer, **options: peer.scatter(
            *((x if peer.membership.rank == 0 else None), np.empty(len(x) // peer.world_size, x.dtype)),
            root=0,
            **options,
        ),
        "reduce": lambda peer, **options: peer.reduce(x, root=0, **options),
    }


KINDS = list(calls(np.zeros(0)))


@pytest.mark.parametrize("kind", KINDS)
def test_timeout_aborts_op_on_all_peers(cluster_of: ClusterOf, kind: str) -> None:
    cluster = cluster_of(3, 0)
    arrays = [np.full(300_000, i) for i in range(3)]
    ops = [calls(x)[kind] for x in arrays]
    early = Background(partial(ops[0], cluster[0]))
    error = refusal(partial(ops[1], cluster[1], timeout=0.1))
    assert "gave up after 0.1 s" in str(error)
    assert results([error, early.outcome(), refusal(partial(ops[2], cluster[2]))]) == [Result.TIMEOUT] * 3
    assert all(np.all(array == i) for i, array in enumerate(arrays))


@pytest.mark.parametrize("kind", KINDS)
def test_loss_aborts_op_and_the_next_succeeds(kind: str) -> None:
    with run_of(4) as cluster:
        arrays = [np.full(1_200_000, i, np.float32) for i in range(4)]
        *_, leaver = sorted(cluster.peers, key=lambda peer: peer.membership.rank)
        cluster.peers.remove(leaver)
        ops = [partial(calls(x)[kind], peer) for x, peer in zip(arrays, cluster.peers, strict=False)]
        started = [Background(op) for op in ops]
        until(lambda: all(peer.stats["ops_open"] for peer in cluster.peers), "three have called")
        leaver.close()
        assert results([thread.outcome() for thread in started]) == [Result.RANK_CONNECTION_LOST] * 3
        assert all(np.all(array == i) for i, array in enumerate(arrays))
        check_members(cluster, together(ops))


def test_calls_after_close_fail(cluster_of: ClusterOf) -> None:
    with run_of(2) as cluster:
        handle = cluster[0].launch.all_gather(np.arange(3))
        cluster[0].close()
        assert handle.wait() is True
        assert refusal(handle.result).result is Result.NOT_INITIALIZED
        assert refusal(cluster[0].barrier).result is Result.NOT_INITIALIZED
        cluster.peers.pop(0)
