"""Integers of any kind, wherever an argument is to be one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from pccl import Communicator, ReduceDescriptor, ReduceOpDescriptor, Result, SharedState
from pccl._integers import as_int
from pccl.training import DiLoCo
from tests.support.cluster import SUM, Cluster, ones, outcomes, refusal, results, run_of

INT64 = np.int64


class Seven(IntEnum):
    SEVEN = 7


class Indexed:
    def __index__(self) -> int:
        return 7


class Broken:
    def __index__(self) -> int:
        raise ValueError("no value")


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with run_of(2) as cluster:
        yield cluster


SEVENS = [7, INT64(7), np.uint8(7), np.array(7), Seven.SEVEN, Indexed()]
NO_INTEGERS = [7.0, np.float64(7), "7", b"7", None, True, np.True_, np.array(True), np.array([7]), [7], Broken(), 7j]


@pytest.mark.parametrize("seven", SEVENS, ids=lambda each: type(each).__name__)
def test_what_has_an_index_is_an_int(seven: Any) -> None:
    found = as_int("tag", seven, 0, 7)
    assert (found, type(found)) == (7, int)


@pytest.mark.parametrize("given", NO_INTEGERS, ids=lambda each: type(each).__name__)
def test_other_things_are_named_with_their_types(given: Any) -> None:
    with pytest.raises(ValueError, match="tag") as caught:
        as_int("tag", given, 0, 2**63 - 1)
    assert str(caught.value) == f"tag {given!r} is not an integer in [0, 2**63) but of type {type(given).__name__}"


@pytest.mark.parametrize(
    ("bounds", "text"),
    [((0, 5), "in [0, 5]"), ((8, None), "of at least 8"), ((0, 6), "in [0, 6]"), ((2**40, 2**63 - 1), "2**63)")],
)
def test_bounds_are_told(bounds: tuple[int, int | None], text: str) -> None:
    with pytest.raises(ValueError, match="tag 7 is not an integer") as caught:
        as_int("tag", 7, *bounds)
    assert text in str(caught.value)


def retry(peer: Communicator, tag: Any, step: Any) -> Any:
    x = ones()
    descriptor = ReduceOpDescriptor.from_numpy(x, x, ReduceDescriptor(INT64(8), SUM, tag=tag, step=step))  # type: ignore[arg-type]
    return peer.all_reduce_multiple_with_retry([descriptor], max_in_flight=INT64(1))  # type: ignore[arg-type]


CALLS: dict[str, Callable[[Communicator, Any, Any], Any]] = {
    "all_reduce": lambda peer, tag, step: peer.all_reduce(ones(), op=SUM, tag=tag, step=step),
    "all_reduce_async": lambda peer, tag, step: peer.all_reduce_async(ones(), op=SUM, tag=tag, step=step).result(),
    "retry": retry,
    "all_gather": lambda peer, tag, step: peer.all_gather(ones(), tag=tag, step=step),
    "reduce_scatter": lambda peer, tag, step: peer.reduce_scatter(ones(), op=SUM, tag=tag, step=step),
    "broadcast": lambda peer, tag, step: peer.broadcast(ones(), root=INT64(0), tag=tag, step=step),
    "barrier": lambda peer, tag, step: peer.barrier(tag=tag, step=step),
}


@pytest.mark.parametrize("name", CALLS)
def test_integers_of_any_kind_meet(pair: Cluster, name: str) -> None:
    kinds: list[Any] = [INT64(7), 7]
    for _ in range(3):
        pair.each(lambda peer, i: CALLS[name](peer, kinds[i], kinds[i]))
    assert (
        results(pair.outcomes(lambda peer, i: CALLS[name](peer, 7, [INT64(7), 8][i]))) == [Result.INVALID_ARGUMENT] * 2
    )


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("given", [7.0, "7", True], ids=repr)
def test_no_integers_are_refused_at_once(pair: Cluster, name: str, given: Any) -> None:
    for argument, arguments in (("tag", (given, 1)), ("step", (1, given))):
        error = refusal(lambda arguments=arguments: CALLS[name](pair[0], *arguments))  # type: ignore[misc]
        assert error.result is Result.INVALID_ARGUMENT
        text = f"{argument} {given!r} is not an integer in [0, 2**63) but of type {type(given).__name__}"
        assert text in str(error)


def test_sends_and_recvs(pair: Cluster) -> None:
    got = np.zeros(8, np.float32)
    ranks: Any = [INT64(peer.membership.rank) for peer in pair.peers]
    outcomes(
        [
            lambda: pair[0].send(ones(), dst=ranks[1], tag=np.uint16(3)),  # type: ignore[arg-type]
            lambda: pair[1].recv(got, src=ranks[0], tag=3),
        ]
    )
    assert np.all(got == 1)
    for call in (lambda: pair[0].send(ones(), dst=1.0), lambda: pair[0].recv(got, src=1.0)):  # type: ignore[arg-type]
        assert " 1.0 is not an integer but of type float" in str(refusal(call))


def test_communicators() -> None:
    numbers: dict[str, Any] = {"peer_group": np.uint32(3), "p2p_connection_pool_size": INT64(2)}
    numbers |= {"segment_bytes": INT64(64), "site_size": np.int8(1)}
    with run_of(1, site="here", **numbers) as cluster:
        assert cluster[0].world_size == 1
    for name in numbers:
        text = f"{name} 'x' is not an integer in [0, "
        site: Any = {"site": "here", "site_size": 1, name: "x"}
        assert text in str(refusal(lambda site=site: Communicator("127.0.0.1:1", **site)))  # type: ignore[misc]
    error = refusal(lambda: Communicator("127.0.0.1:1").connect("x"))  # type: ignore[arg-type]
    assert "n_attempts 'x' is not an integer but of type str" in str(error)
    error = refusal(lambda: Communicator("127.0.0.1:1").connect(np.int8(1)))  # type: ignore[arg-type]
    assert error.result is Result.MASTER_CONNECTION_FAILED


def test_revisions() -> None:
    state = SharedState.from_numpy({"x": ones()})
    state.revision = INT64(5)  # type: ignore[assignment]
    assert (state.revision, type(state.revision)) == (5, int)
    error = refusal(lambda: setattr(state, "revision", 5.0))
    assert "revision 5.0 is not an integer in [0, 2**63) but of type float" in str(error)


def test_training_takes_integers_of_any_kind(pair: Cluster) -> None:
    """One peer gives NumPy's: the peers agree all the same."""
    loops = [
        DiLoCo(peer, {"w": ones()}, tag=kind(40), inner_steps=kind(3), check_every=kind(1))  # type: ignore[arg-type]
        for peer, kind in zip(pair.peers, (np.uint8, operator.index), strict=True)
    ]
    pair.each(lambda _, i: loops[i].join(peers_min=2))
    pair.each(lambda _, i: loops[i].outer_step())
    assert loops[0].digest() == loops[1].digest()
