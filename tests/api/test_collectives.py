"""The collectives besides all_reduce, against NumPy: any dtype, shape, world and segment size, both algorithms; and
what they share with all_reduce: one outcome for all, inputs kept, timeouts, handles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
    Membership,
    ReduceAlgorithm,
    ReduceOp,
    Result,
)
from tests.support.cluster import Background, Cluster, outcomes, refusal, results, run_of, together, until

Array = npt.NDArray[Any]
ClusterOf = Callable[[int, int], Cluster]

worlds = st.integers(2, 5)
segments = st.sampled_from([8, 40, 1000, 0])
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.sampled_from([(300,), (4099,), (17, 61)])
seeds = st.integers(0, 2**32 - 1)
algorithms = st.sampled_from([None, *ReduceAlgorithm])
# All that can be reduced, and what travels as bytes.
dtypes = st.sampled_from(
    [d.to_numpy_dtype() for d in DataType if d is not DataType.BFLOAT16]
    + [np.dtype(d) for d in ("bool", "complex64", "S5", "M8[s]", ">f4", "i4,f8")]
)
loops = pytest.mark.parametrize("algorithm", list(ReduceAlgorithm))


@pytest.fixture(scope="module")
def cluster_of() -> Iterator[ClusterOf]:
    """Runs that are kept, by world and segment size: making one takes longer than an op."""
    clusters: dict[tuple[int, int], Cluster] = {}
    with ExitStack() as stack:

        def get(world: int, segment_bytes: int) -> Cluster:
            key = world, segment_bytes
            if key not in clusters:
                connections = 1 + segment_bytes % 3
                options = {"segment_bytes": segment_bytes, "p2p_connection_pool_size": connections}
                clusters[key] = stack.enter_context(run_of(world, **options))
            return clusters[key]

        yield get


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


@settings(max_examples=150)
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


@settings(max_examples=100)
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


@settings(max_examples=100)
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
def test_reduce_scatter_gives_parts_of_what_all_reduce_does(
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
def test_nobody_passes_a_barrier_before_all_have_come(cluster_of: ClusterOf, world: int) -> None:
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
def test_large_arrays_go_over_several_engine_threads(algorithm: ReduceAlgorithm) -> None:
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


@loops
def test_encrypted(algorithm: ReduceAlgorithm) -> None:
    with MasterNode("127.0.0.1:0", token="a token") as master:
        cluster = Cluster(master.address, token="a token", encrypt=True)
        cluster.join(3)
        arrays = [np.random.default_rng(i).integers(0, 99, 300_001) for i in range(3)]
        total = np.sum(arrays, axis=0)
        rows = cluster.each(lambda peer, i: peer.all_gather(arrays[i], algorithm=algorithm).array)
        assert all(np.array_equal(row, arrays) for row in rows)
        infos = cluster.each(lambda peer, i: peer.reduce_scatter(arrays[i], op=ReduceOp.SUM, algorithm=algorithm))
        assert np.array_equal(np.concatenate([info.array for info in infos]), total)
        received = np.zeros_like(arrays[0])
        together([lambda: cluster[0].send(arrays[0], dst=2), lambda: cluster[2].recv(received, src=0)])
        assert np.array_equal(received, arrays[0])
        cluster.each(lambda peer, i: peer.broadcast(arrays[i], root=1, algorithm=algorithm))
        assert np.array_equal(arrays[0], arrays[1])
        assert np.array_equal(arrays[2], arrays[1])
        cluster.close_all()


def test_bytes_are_gathered(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(3, 0)
    sends = [b"\x01", bytearray(b"\x02"), memoryview(b"\x03")]
    for info in cluster.each(lambda peer, i: peer.all_gather(sends[i])):
        assert info.array.tolist() == [[1], [2], [3]]
        assert info.array.dtype == np.uint8


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


def test_many_in_flight_with_all_reduce_among_them(cluster_of: ClusterOf) -> None:
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


def test_one_tag_serves_all_kinds_in_turn(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(2, 0)

    def call(peer: Communicator, i: int) -> list[Any]:
        x = np.array([i, 5])
        return [
            peer.all_gather(x).array.tolist(),
            peer.all_reduce(x, op=ReduceOp.SUM).world_size,
            peer.barrier().world_size,
            peer.broadcast(x, root=0).array.tolist(),
        ]

    assert cluster.each(call) == [[[[0, 5], [1, 5]], 2, 2, [1, 10]]] * 2


def test_coroutines() -> None:
    with run_of(1) as cluster:

        async def main() -> list[Any]:
            async with AsyncCommunicator(cluster.address) as peer:
                assert peer.membership == Membership(1, (1, 2))
                gathered = await peer.all_gather(np.array([7]))
                x = np.array([3])
                handle = peer.launch.broadcast(x, root=0, tag=4)
                await handle
                await peer.barrier()
                return [gathered.array.tolist(), x.tolist(), handle.result().rank]

        def other() -> None:
            while cluster[0].world_size < 2:
                cluster[0].update_topology()
            cluster[0].all_gather(np.array([6]))
            cluster[0].broadcast(np.array([8]), root=0, tag=4)
            cluster[0].barrier()

        threads = [Background(lambda: trio.run(main)), Background(other)]
        assert threads[0].result() == [[[6], [7]], [8], 1]
        threads[1].result()


def test_alone_there_is_nobody_to_meet() -> None:
    with run_of(1) as cluster:
        x = np.array([1])
        calls = [
            lambda: cluster[0].all_gather(x),
            lambda: cluster[0].broadcast(x, root=0),
            lambda: cluster[0].barrier(),
        ]
        calls.append(lambda: cluster[0].reduce_scatter(x, op=ReduceOp.SUM))
        assert [refusal(call).result for call in calls] == [Result.TOO_FEW_PEERS] * 4
        assert cluster[0].membership == Membership(0, (1,))


def launches(peer: Communicator | AsyncCommunicator, x: Any) -> list[Callable[[], Any]]:
    """Return calls of every kind that others could join, if there were any."""
    return [
        lambda: peer.all_reduce_async(x, op=ReduceOp.SUM),
        lambda: peer.launch.all_gather(x),
        lambda: peer.launch.reduce_scatter(x, op=ReduceOp.SUM),
        lambda: peer.launch.broadcast(x, root=0),
        lambda: peer.launch.barrier(),
    ]


def test_alone_a_launch_is_refused_at_the_call() -> None:
    with run_of(1) as cluster:
        for _ in range(2):  # nothing is left in flight
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
    cluster.each(lambda peer, _: peer.barrier())  # and nothing else has happened


@loops
def test_what_differs_is_shown_to_all(cluster_of: ClusterOf, algorithm: ReduceAlgorithm) -> None:
    cluster = cluster_of(3, 0)
    x = [np.arange(6.0) for _ in range(3)]
    fails_for_all(
        cluster,
        lambda peer, i: peer.all_gather(x[i][: 3 + i % 2], algorithm=algorithm),
        *(Result.INVALID_ARGUMENT, "all_gather of 9 x DOUBLE", "all_gather of 12 x DOUBLE"),
    )
    fails_for_all(
        cluster,
        lambda peer, i: peer.broadcast(x[i], root=i // 2, algorithm=algorithm),
        *(Result.INVALID_ARGUMENT, "broadcast of 6 x DOUBLE from rank 0", "broadcast of 6 x DOUBLE from rank 1"),
    )
    fails_for_all(
        cluster,
        lambda peer, i: peer.all_gather(x[i], algorithm=algorithm) if i else peer.all_reduce(x[i], op=ReduceOp.MAX),
        *(Result.INVALID_USAGE, "different ops with the same tag", "all_gather of 18 x DOUBLE", "MAX of 6 x DOUBLE"),
    )
    fails_for_all(
        cluster,
        lambda peer, i: peer.barrier(tag=3) if i else peer.broadcast(x[i], root=0, tag=3, algorithm=algorithm),
        *(Result.INVALID_USAGE, "barrier of 0", "broadcast of 6 x DOUBLE"),
    )
    assert all(np.array_equal(array, np.arange(6.0)) for array in x)


def test_arguments_that_do_not_fit_the_world_fail_for_all(cluster_of: ClusterOf) -> None:
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


def test_what_is_wrong_by_itself_is_told_at_once(cluster_of: ClusterOf) -> None:
    peer = cluster_of(2, 0)[0]
    x = np.arange(4)
    read_only = x.copy()
    read_only.flags.writeable = False
    for says, call in {
        "send holds Python objects": lambda: peer.all_gather(np.array([None])),
        "send must be a NumPy array, a torch tensor or a jax.Array, not list": lambda: peer.all_gather([1]),
        "send is not contiguous": lambda: peer.all_gather(x[::2]),
        "recv is read-only": lambda: peer.all_gather(x, read_only),
        "send is INT64 but recv is FLOAT": lambda: peer.all_gather(x, np.empty(8, np.float32)),
        "dtype bool cannot be reduced": lambda: peer.reduce_scatter(x > 1, op=ReduceOp.SUM),
        "op must be a ReduceOp": lambda: peer.reduce_scatter(x, op="sum"),  # type: ignore[arg-type]
        "tag -1 is not": lambda: peer.barrier(tag=-1),
        "algorithm must be": lambda: peer.all_gather(x, algorithm="ring"),  # type: ignore[arg-type]
        "root '1' is not an integer but of type str": lambda: peer.broadcast(x, root="1"),  # type: ignore[arg-type]
        "array is read-only": lambda: peer.broadcast(b"abc", root=1 - peer.membership.rank),
    }.items():
        error = refusal(call)
        assert error.result is Result.INVALID_ARGUMENT
        assert says in str(error)
    unconnected = Communicator("127.0.0.1:1")
    assert refusal(unconnected.barrier).result is Result.NOT_INITIALIZED
    assert refusal(lambda: unconnected.membership).result is Result.NOT_INITIALIZED


def test_a_timeout_aborts_for_all(cluster_of: ClusterOf) -> None:
    cluster = cluster_of(3, 0)
    arrays = [np.full(300_000, i) for i in range(3)]
    calls = {
        "all_gather": lambda peer, i: peer.all_gather(arrays[i], timeout=0.2 if i else None),
        "broadcast": lambda peer, i: peer.broadcast(arrays[i], root=0, timeout=0.2 if i else None),
        "reduce_scatter": lambda peer, i: peer.reduce_scatter(arrays[i], op=ReduceOp.SUM, timeout=0.2 if i else None),
        "barrier": lambda peer, i: peer.barrier(timeout=0.2 if i else None),
    }
    for name, call in calls.items():
        found = outcomes([lambda i=i, call=call: call(cluster[i], i) for i in range(2)])  # type: ignore[misc]
        assert results(found) == [Result.TIMEOUT] * 2, name
        assert "gave up after 0.2 s" in str(found[0])
        error = refusal(lambda call=call: call(cluster[2], 2))  # type: ignore[misc]
        assert error.result is Result.TIMEOUT
        assert all(np.all(array == i) for i, array in enumerate(arrays))


@pytest.mark.parametrize("kind", ["all_gather", "broadcast", "reduce_scatter", "barrier"])
def test_a_loss_gives_all_survivors_one_outcome_and_the_next_call_succeeds(kind: str) -> None:
    with run_of(4) as cluster:
        arrays = [np.full(2_000_000, i, np.float32) for i in range(4)]
        leaver = cluster.peers[3]

        def call(peer: Communicator, i: int) -> CollectiveInfo:
            if kind == "barrier":
                return peer.barrier()
            if kind == "reduce_scatter":
                return peer.reduce_scatter(arrays[i], op=ReduceOp.MIN)
            if kind == "broadcast":
                return peer.broadcast(arrays[i], root=0)
            return peer.all_gather(arrays[i])

        threads = [Background(lambda i=i: call(cluster[i], i)) for i in range(3)]  # type: ignore[misc]
        until(lambda: all(peer.stats["ops_open"] for peer in cluster.peers[:3]), "three have called")
        cluster.peers.remove(leaver)
        leaver.close()
        found = [thread.outcome() for thread in threads]
        assert results(found) == [Result.RANK_CONNECTION_LOST] * 3
        assert all(np.all(array == i) for i, array in enumerate(arrays))
        infos = cluster.each(call)
        check_members(cluster, infos)
        assert infos[0].world_size == 3
        if kind == "all_gather":
            assert all(np.array_equal(info.array[:, 0], [0, 1, 2]) for info in infos)


def test_a_root_that_has_left_is_lost_for_all() -> None:
    """One has named it before the loss was known; what it named as a rank is another peer by then."""
    with run_of(3) as cluster:
        old = cluster[1].membership
        assert old == Membership(1, (1, 2, 3))
        cluster.close(cluster[0])
        from pccl import _collectives
        from pccl.protocol.peer import View

        seen = View(0, 0, 2, 0, old.peers, {0: 3})
        arrays = [np.array([i]) for i in range(2)]

        def late(peer: Communicator) -> CollectiveInfo:
            call = _collectives.broadcast(arrays[0], 0, 0, None, None)
            return peer._collective(lambda _, name: call(seen, name), None, "broadcast")

        found = outcomes([lambda: late(cluster[0]), lambda: cluster[1].broadcast(arrays[1], root=0)])
        assert results(found) == [Result.RANK_CONNECTION_LOST] * 2
        assert "peer 1, the root, has left" in str(found[1])
        assert [x.tolist() for x in arrays] == [[0], [1]]
        together([lambda i=i: cluster[i].broadcast(arrays[i], root=1) for i in range(2)])  # type: ignore[misc]
        assert [x.tolist() for x in arrays] == [[1], [1]]


def test_after_the_end_calls_fail(cluster_of: ClusterOf) -> None:
    with run_of(2) as cluster:
        handle = cluster[0].launch.all_gather(np.arange(3))
        cluster[0].close()
        assert handle.wait() is True
        assert refusal(handle.result).result is Result.NOT_INITIALIZED
        assert refusal(cluster[0].barrier).result is Result.NOT_INITIALIZED
        cluster.peers.pop(0)
