"""Groups of Ray's collective library over pccl, as Ray makes and calls them; Ray's store and actors are stand-ins."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from pccl import PCCLError, Result
from tests.support.cluster import Background, outcomes, together, until

pytest.importorskip("ray", reason="Ray is not installed")
from ray.util.collective import is_backend_available, types

import pccl.ray
from pccl.ray import group as ray_group
from pccl.ray.group import PCCLGroup

names = (f"group {number}" for number in itertools.count())


@pytest.fixture(autouse=True, scope="module")
def store() -> Iterator[dict[str, str]]:
    """Ray's store, and this machine as a node."""
    found: dict[str, str] = {}
    with pytest.MonkeyPatch.context() as patch:
        kv = "ray.experimental.internal_kv._internal_kv_"
        patch.setattr(f"{kv}get", lambda key: found[key].encode() if key in found else None)
        patch.setattr(f"{kv}put", found.__setitem__)
        patch.setattr(f"{kv}del", lambda key: found.pop(key, None))
        patch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
        yield found


Groups = Callable[[int], list[PCCLGroup]]


@pytest.fixture
def made() -> Iterator[Groups]:
    """Make groups of that many actors, which leave in the end."""
    actors: list[PCCLGroup] = []

    def make(world_size: int) -> list[PCCLGroup]:
        name = next(names)
        found = together([partial(PCCLGroup, world_size, rank, name) for rank in range(world_size)])
        actors.extend(found)
        return found

    yield make
    together([actor.destroy_group for actor in actors])


@pytest.fixture(scope="module")
def three() -> Iterator[list[PCCLGroup]]:
    found = together([partial(PCCLGroup, 3, rank, "three") for rank in range(3)])
    yield found
    together([actor.destroy_group for actor in found])


def each(actors: list[PCCLGroup], call: Callable[[PCCLGroup], Any]) -> list[Any]:
    return together([partial(call, actor) for actor in actors])


def options(kind: Any, **values: Any) -> Any:
    made = kind()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def _array(kind: str, values: Any) -> Any:
    array = np.array(values, np.float32)
    return array if kind == "numpy" else pytest.importorskip("torch").from_numpy(array)


kinds = pytest.mark.parametrize("kind", ["numpy", "torch"])


def test_the_backend_is_registered() -> None:
    pccl.ray.register()
    assert is_backend_available("pccl")
    assert types.Backend("pccl") == PCCLGroup.backend() == "PCCL"


def test_ranks_are_those_of_ray(three: list[PCCLGroup]) -> None:
    assert [(actor.rank, actor.world_size) for actor in three] == [(0, 3), (1, 3), (2, 3)]


@kinds
@pytest.mark.parametrize(("op", "wanted"), [("SUM", 9), ("PRODUCT", 24), ("MIN", 2), ("MAX", 4)])
def test_allreduce(three: list[PCCLGroup], kind: str, op: str, wanted: float) -> None:
    def call(actor: PCCLGroup) -> None:
        array = _array(kind, [actor.rank + 2.0] * 5)
        actor.allreduce([array], options(types.AllReduceOptions, reduceOp=types.ReduceOp[op]))
        assert array.tolist() == [wanted] * 5

    each(three, call)


@kinds
def test_arrays_that_are_not_contiguous(three: list[PCCLGroup], kind: str) -> None:
    def call(actor: PCCLGroup) -> None:
        whole = _array(kind, [[1, 2], [3, 4]])
        actor.allreduce([whole[:, 0]])
        actor.broadcast([whole[:, 1]], options(types.BroadcastOptions, root_rank=1))
        assert whole.tolist() == [[3, 2], [9, 4]]

    each(three, call)


@kinds
def test_reduce_gives_the_result_to_the_root_alone(three: list[PCCLGroup], kind: str) -> None:
    def call(actor: PCCLGroup) -> None:
        array = _array(kind, [actor.rank, 1])
        actor.reduce([array], options(types.ReduceOptions, root_rank=1))
        assert array.tolist() == ([3, 3] if actor.rank == 1 else [actor.rank, 1])

    each(three, call)


@kinds
def test_allgather_is_in_the_order_of_ranks(three: list[PCCLGroup], kind: str) -> None:
    def call(actor: PCCLGroup) -> None:
        targets = [_array(kind, [[0, 0]]) for _ in range(3)]
        actor.allgather([targets], [_array(kind, [[actor.rank, 7]])])
        assert [target.tolist() for target in targets] == [[[rank, 7]] for rank in range(3)]

    each(three, call)


@kinds
@pytest.mark.parametrize("root", [0, 1, 2])
def test_broadcast(three: list[PCCLGroup], kind: str, root: int) -> None:
    def call(actor: PCCLGroup) -> None:
        array = _array(kind, [actor.rank] * 4)
        actor.broadcast([array], options(types.BroadcastOptions, root_rank=root))
        assert array.tolist() == [root] * 4

    each(three, call)


@kinds
def test_reducescatter_gives_each_rank_its_own_array(three: list[PCCLGroup], kind: str) -> None:
    def call(actor: PCCLGroup) -> None:
        target = _array(kind, [[0, 0]])
        sources = [_array(kind, [[10 * rank, actor.rank]]) for rank in range(3)]
        actor.reducescatter([target], [sources])
        assert target.tolist() == [[30 * actor.rank, 3]]

    each(three, call)


@kinds
def test_send_and_recv_by_ranks_of_ray(three: list[PCCLGroup], kind: str) -> None:
    def call(actor: PCCLGroup) -> Any:
        if actor.rank == 2:
            return actor.send([_array(kind, [5, 6])], options(types.SendOptions, dst_rank=0))
        array = _array(kind, [0, 0])
        actor.recv([array], options(types.RecvOptions, src_rank=2))
        return array.tolist()

    assert each([three[0], three[2]], call)[0] == [5, 6]


def test_barrier(three: list[PCCLGroup]) -> None:
    early = Background(three[0].barrier)
    late = [Background(actor.barrier) for actor in three[1:]]
    for call in (early, *late):
        call.result()


def test_a_group_of_one_needs_nobody(made: Groups) -> None:
    (actor,) = made(1)
    array, target = np.ones(3), np.zeros(3)
    actor.allreduce([array])
    actor.reduce([array], options(types.ReduceOptions, root_rank=0))
    actor.broadcast([array])
    actor.barrier()
    actor.allgather([[target]], [array])
    assert target.tolist() == [1, 1, 1]
    actor.reducescatter([target], [[2 * array]])
    assert target.tolist() == [2, 2, 2]
    assert (actor.rank, actor.world_size, actor.admit()) == (0, 1, 1)


def _leave(actor: PCCLGroup) -> None:
    assert actor._rendezvous is not None
    actor._rendezvous.communicator.close()


def test_after_a_loss_the_others_go_on_with_ranks_from_zero(made: Groups) -> None:
    actors = made(3)
    _leave(actors[1])
    left = [actors[0], actors[2]]
    for actor in left:
        until(lambda actor=actor: actor.world_size == 2, "the loss is seen")
    assert [actor.rank for actor in left] == [0, 1]

    def call(actor: PCCLGroup) -> None:
        array = np.array([actor.rank + 1.0])
        actor.allreduce([array])
        assert array.tolist() == [3]
        targets = [np.zeros(1), np.zeros(1)]
        actor.allgather([targets], [np.array([actor.rank + 5.0])])
        assert [target.item() for target in targets] == [5, 6]

    each(left, call)


def test_a_loss_in_a_collective_is_told_to_all_others(made: Groups) -> None:
    actors = made(3)
    arrays = [np.ones(4) for _ in actors]
    waiting = [Background(partial(actors[index].allreduce, [arrays[index]])) for index in (0, 2)]
    _leave(actors[1])
    for call in waiting:
        assert call.outcome().result is Result.RANK_CONNECTION_LOST
    assert [array.tolist() for array in arrays] == [[1] * 4] * 3


def test_an_actor_that_is_started_again_is_admitted_with_its_rank(made: Groups, store: dict[str, str]) -> None:
    actors = made(3)
    _leave(actors[2])
    left = actors[:2]
    for actor in left:
        until(lambda actor=actor: actor.world_size == 2, "the loss is seen")
    again = Background(partial(PCCLGroup, 3, 2, actors[0].group_name))
    until(lambda: max(each(left, PCCLGroup.admit)) == 3, "it is admitted")
    newcomer = again.result()
    members = [*left, newcomer]
    assert [(actor.rank, actor.world_size) for actor in members] == [(0, 3), (1, 3), (2, 3)]

    def call(actor: PCCLGroup) -> None:
        array = np.array([float(actor.rank)])
        actor.broadcast([array], options(types.BroadcastOptions, root_rank=2))
        assert array.tolist() == [2]

    each(members, call)
    newcomer.destroy_group()


def test_the_group_outlives_the_actor_that_has_its_master(made: Groups) -> None:
    actors = made(3)
    first = actors[0]._rendezvous
    assert first is not None
    first._stop_master()
    first.communicator.close()
    for actor in actors[1:]:
        until(lambda actor=actor: actor.world_size == 2, "the loss is decided")
    array = np.ones(1)
    assert outcomes([partial(actors[1].allreduce, [array]), partial(actors[2].allreduce, [np.ones(1)])]) == [None, None]
    assert array.tolist() == [2]


def test_what_an_earlier_group_of_the_name_has_left_behind_is_not_taken(store: dict[str, str]) -> None:
    name = next(names)
    old = together([partial(PCCLGroup, 2, rank, name) for rank in range(2)])
    left_behind = store[f"pccl/collective/{name}"]
    together([actor.destroy_group for actor in old])
    assert f"pccl/collective/{name}" not in store
    store[f"pccl/collective/{name}"] = left_behind
    # The others look before rank 0 does.
    others = Background(partial(PCCLGroup, 2, 1, name))
    new = [PCCLGroup(2, 0, name), others.result()]
    assert json.loads(store[f"pccl/collective/{name}"])["token"] != json.loads(left_behind)["token"]
    assert [actor.world_size for actor in new] == [2, 2]
    together([actor.destroy_group for actor in new])


def test_who_has_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_group, "TIMEOUT_S", 0.2)
    for rank, missing in ((1, 0), (0, 1)):
        with pytest.raises(PCCLError, match=rf"rank {rank} of group '.*' has waited .*: rank {missing} is missing"):
            PCCLGroup(2, rank, next(names))


def test_several_devices_of_one_actor_are_refused(three: list[PCCLGroup]) -> None:
    with pytest.raises(PCCLError, match="only one per actor"):
        three[0].allreduce([np.ones(1), np.ones(1)])


def test_errors_go_through_pickle_as_ray_sends_them() -> None:
    error = pickle.loads(pickle.dumps(PCCLError(Result.TIMEOUT, "allreduce", "who")))
    assert (error.result, error.func_name, error.message) == (Result.TIMEOUT, "allreduce", "who")
