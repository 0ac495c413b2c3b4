"""Arrays of JAX in all collectives and in shared state: read where they are, with results in new arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from pccl import (
    Communicator,
    PCCLError,
    ReduceOp,
    Result,
    SharedState,
)
from tests.support.cluster import Cluster, refusal

jax = pytest.importorskip("jax", reason="JAX is not installed")
import jax.numpy as jnp  # noqa: E402

SUM = ReduceOp.SUM


def _of_rank(peer: Communicator, dtype: Any = jnp.float32, shape: tuple[int, ...] = (3, 5)) -> Any:
    size = int(np.prod(shape))
    return (jnp.arange(size).reshape(shape) % 7 + peer.membership.rank).astype(dtype)


def _sum_of_three(dtype: Any = jnp.float32, shape: tuple[int, ...] = (3, 5)) -> np.ndarray[Any, Any]:
    size = int(np.prod(shape))
    return (3 * (np.arange(size).reshape(shape) % 7) + 3).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "int8"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (100_000,)])
def test_all_reduce_returns_a_new_array(three_peers: Cluster, dtype: str, shape: tuple[int, ...]) -> None:
    def reduce(peer: Communicator, _: int) -> None:
        given = _of_rank(peer, jnp.dtype(dtype), shape)
        before = np.array(given)
        made = peer.all_reduce(given, op=SUM).array
        assert isinstance(made, jax.Array)
        assert (made.dtype, made.shape, made.sharding) == (given.dtype, given.shape, given.sharding)
        assert np.array_equal(np.asarray(made), _sum_of_three(jnp.dtype(dtype), shape))
        assert np.array_equal(np.asarray(given), before)

    three_peers.each(reduce)


def test_results_do_not_change_later(three_peers: Cluster) -> None:
    made = three_peers.each(lambda peer, _: peer.all_reduce(_of_rank(peer), op=SUM).array)
    for _ in range(20):
        three_peers.each(lambda peer, _: peer.all_reduce(10 * _of_rank(peer), op=SUM).array)
    for each in made:
        assert np.array_equal(np.asarray(each), _sum_of_three())


def test_numpy_and_jax_peers_reduce_together(three_peers: Cluster) -> None:
    def reduce(peer: Communicator, index: int) -> Any:
        given = _of_rank(peer)
        if index == 0:
            return peer.all_reduce(given, op=SUM).array
        recv = np.empty((3, 5), np.float32)
        info = peer.all_reduce(given if index == 1 else np.array(given), recv, op=SUM)
        assert info.array is None
        return recv

    for found in three_peers.each(reduce):
        assert np.array_equal(np.asarray(found), _sum_of_three())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64", "float8_e4m3fn", "int4"])
def test_all_gather(three_peers: Cluster, dtype: str) -> None:
    def gather(peer: Communicator, _: int) -> None:
        made = peer.all_gather(_of_rank(peer, jnp.dtype(dtype))).array
        assert isinstance(made, jax.Array)
        assert (made.dtype, made.shape) == (jnp.dtype(dtype), (3, 3, 5))
        for rank in range(3):
            wanted = (jnp.arange(15).reshape(3, 5) % 7 + rank).astype(jnp.dtype(dtype))
            assert np.array_equal(np.asarray(made[rank]), np.asarray(wanted))

    three_peers.each(gather)


def test_reduce_scatter(three_peers: Cluster) -> None:
    def scatter(peer: Communicator, _: int) -> None:
        info = peer.reduce_scatter(_of_rank(peer, shape=(16,)), op=SUM)
        assert isinstance(info.array, jax.Array)
        wanted = np.array_split(_sum_of_three(shape=(16,)), 3)[info.rank]
        assert np.array_equal(np.asarray(info.array), wanted)

    three_peers.each(scatter)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "float8_e4m3fn"])
def test_exchanges(three_peers: Cluster, dtype: str) -> None:
    kind = jnp.dtype(dtype)

    def part(source: int, target: int) -> np.ndarray[Any, Any]:
        return np.asarray((jnp.arange(4).reshape(2, 2) + 4 * source + target).astype(kind))

    def exchange(peer: Communicator, _: int) -> None:
        rank = peer.membership.rank
        given = jnp.concatenate([jnp.asarray(part(rank, target)) for target in range(3)])
        found = peer.all_to_all(given).array
        assert isinstance(found, jax.Array)
        assert np.array_equal(np.asarray(found), np.concatenate([part(source, rank) for source in range(3)]))
        gathered = peer.gather(jnp.asarray(part(rank, 0)), root=1).array
        if rank == 1:
            assert isinstance(gathered, jax.Array)
            assert np.array_equal(np.asarray(gathered), np.stack([part(source, 0) for source in range(3)]))
        else:
            assert gathered is None
        rows = jnp.stack([jnp.asarray(part(0, target)) for target in range(3)]) if rank == 0 else None
        own = peer.scatter(rows, jnp.zeros((2, 2), kind), root=0).array
        assert isinstance(own, jax.Array)
        assert np.array_equal(np.asarray(own), part(0, rank))

    three_peers.each(exchange)


@pytest.mark.parametrize("dtype", ["float32", "bool", "bfloat16"])
def test_broadcast(three_peers: Cluster, dtype: str) -> None:
    def broadcast(peer: Communicator, _: int) -> None:
        given = _of_rank(peer, jnp.dtype(dtype))
        made = peer.broadcast(given, root=1).array
        assert isinstance(made, jax.Array)
        assert made.sharding == given.sharding
        wanted = (jnp.arange(15).reshape(3, 5) % 7 + 1).astype(jnp.dtype(dtype))
        assert np.array_equal(np.asarray(made), np.asarray(wanted))

    three_peers.each(broadcast)


def test_recv_of_jax_is_refused(three_peers: Cluster) -> None:
    peer, x = three_peers[0], jnp.ones(4)
    for call in (
        partial(peer.all_reduce, x, x, op=SUM),
        partial(peer.all_reduce, x, jnp.ones(4), op=SUM),
        partial(peer.all_reduce, np.ones(4, np.float32), x, op=SUM),
        partial(peer.all_gather, x, jnp.ones(12)),
        partial(peer.reduce_scatter, x, jnp.ones(2), op=SUM),
    ):
        error = refusal(call)
        assert error.result is Result.INVALID_ARGUMENT
        assert "recv is a jax.Array, which cannot be written to; leave it out" in str(error)


def test_traced_array_is_named(three_peers: Cluster) -> None:
    with pytest.raises(PCCLError, match=r"send is traced by JAX .* outside jit and grad"):
        jax.jit(lambda x: three_peers[0].all_reduce(x, op=SUM).array)(jnp.ones(4))


def _parameters(value: float) -> dict[str, Any]:
    layer = {"w": jnp.full((4, 3), value, jnp.bfloat16), "b": jnp.full((3,), value)}
    return {"layers": [layer], "step": np.array(int(value), np.int64), "scale": jnp.asarray(value)}


def test_shared_state_of_a_tree(three_peers: Cluster) -> None:
    def sync(peer: Communicator, index: int) -> None:
        state = SharedState.from_pytree(_parameters(float(index)))
        assert [tensor.name for tensor in state.tensors] == [
            "['layers'][0]['b']",
            "['layers'][0]['w']",
            "['scale']",
            "['step']",
        ]
        state.revision = 7 if index == 2 else 3
        info = peer.sync_shared_state(state)
        assert info.revision == state.revision == 7
        found, wanted = state.tree, _parameters(2.0)
        assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(wanted)
        for got, want in zip(jax.tree_util.tree_leaves(found), jax.tree_util.tree_leaves(wanted), strict=True):
            assert type(got) is type(want)
            assert got.dtype == want.dtype
            assert np.array_equal(np.asarray(got), np.asarray(want))

    three_peers.each(sync)


def test_set_tree_is_atomic() -> None:
    state = SharedState.from_pytree({"a": jnp.zeros(3), "b": jnp.zeros(2)})
    state.tree = {"a": jnp.ones(3), "b": jnp.ones(2)}
    assert np.all(np.asarray(state.tree["a"]) == 1)
    wrong: list[tuple[Any, str]] = [
        (
            {"a": jnp.full(3, 2.0), "b": jnp.ones(4)},
            r"leaf \['b'\] is float32\[4\], but in the state it is float32\[2\]",
        ),
        ({"a": jnp.full(3, 2.0), "b": jnp.ones(2, jnp.int32)}, r"leaf \['b'\] is int32\[2\], but in the state"),
        ({"a": jnp.full(3, 2.0)}, "tree structure mismatch: expected PyTreeDef"),
    ]
    for tree, said in wrong:
        with pytest.raises(PCCLError, match=said):
            state.tree = tree
        assert np.all(np.asarray(state.tree["a"]) == 1)
