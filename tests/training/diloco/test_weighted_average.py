"""Weighted averages: the same bytes on all peers, through losses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pccl import DataType, MasterNode, MismatchError, QuantizationAlgorithm, QuantizationOptions, Result
from pccl.training import OuterNesterov
from pccl.training.diloco.weighted_average import NotedAverage
from tests.support.cluster import outcomes, results, together
from tests.training.peers import SHAPES, Peer, Reference, assert_close, assert_parity, cluster_of, train

WEIGHTS = [1000.0, 3.5, 123456.0]


def steps(peer: Peer, count: int, weight: float | None) -> None:
    for _ in range(count):
        train(peer.model, peer.number)
        peer.steps.append(peer.diloco.outer_step(weight=weight))
        peer.digests[peer.diloco.revision] = peer.diloco.digest()


def close(peers: Sequence[Peer]) -> None:
    together([peer.close for peer in peers])


@pytest.mark.parametrize("scale", [1.0, 2.0**40, 1e-6])
def test_weighted_mean(master: MasterNode, scale: float) -> None:
    peers = cluster_of(master, 3)
    together([partial(steps, peer, 4, weight * scale) for peer, weight in zip(peers, WEIGHTS, strict=True)])
    assert_parity(peers)
    reference = Reference()
    for _ in range(4):
        gradients = [reference.pseudo_gradients(number) for number in range(3)]
        # Three equal contributions that make the weighted mean.
        mean = {
            name: sum(w * g[name] for w, g in zip(WEIGHTS, gradients, strict=True)) / sum(WEIGHTS) for name in SHAPES
        }
        reference.update([mean])
    for peer in peers:
        assert_close(peer.model, reference.parameters)
    close(peers)


def test_weight_zero_leaves_a_peer_out(master: MasterNode) -> None:
    peers = cluster_of(master, 2)
    for array in peers[1].model.values():
        array[...] = np.nan
    together([partial(peer.diloco.outer_step, weight=weight) for peer, weight in zip(peers, [8.0, 0.0], strict=True)])
    assert peers[0].diloco.digest() == peers[1].diloco.digest()
    assert all(np.isfinite(array).all() for array in peers[1].model.values())
    before = {name: array.copy() for name, array in peers[0].model.items()}
    together([partial(steps, peer, 1, 0.0) for peer in peers])  # all weights are 0
    assert_close(peers[0].model, before)
    close(peers)


@pytest.mark.parametrize("compression", [None, "2bit"])
def test_weights_on_some_peers_are_refused(master: MasterNode, compression: Any) -> None:
    peers = cluster_of(master, 2, compression=compression)
    found = outcomes([partial(peers[0].diloco.outer_step, weight=2.0), peers[1].diloco.outer_step])
    assert results(found) == [Result.INVALID_ARGUMENT] * 2
    assert all(isinstance(error, MismatchError) for error in found)
    assert all("give outer_step(weight=...) on all peers or on none" in str(error) for error in found)
    close(peers)


def test_weighted_overflow_is_an_error_on_all_peers(master: MasterNode) -> None:
    cast = QuantizationOptions(DataType.FLOAT16, algorithm=QuantizationAlgorithm.CAST)
    peers = cluster_of(master, 2, quantization=cast)
    for peer in peers:
        train(peer.model, peer.number)
    digest = peers[0].diloco.digest()
    found = outcomes([partial(peer.diloco.outer_step, weight=1e6) for peer in peers])
    assert results(found) == [Result.INVALID_ARGUMENT] * 2
    assert all("give smaller weights" in str(error) for error in found)
    assert [peer.diloco.digest() for peer in peers] == [digest] * 2
    together([partial(steps, peer, 1, 1.0) for peer in peers])
    assert_parity(peers)
    close(peers)


@pytest.mark.parametrize("compression", ["4bit", "2bit", "1bit"])
def test_feedback_follows_weights_that_change(master: MasterNode, compression: str) -> None:
    """The errors of the step with the large weights are not those of the next one."""
    peers = cluster_of(master, 2, compression=compression, outer=OuterNesterov(1.0, 0.0))
    random = np.random.default_rng(0)
    for weights in [(1e9, 1e9), (1.0, 1.0), (1e9, 0.0), (0.0, 1.0)]:
        before = flat(peers[0])
        movements = random.standard_normal((2, before.size))
        for peer, movement in zip(peers, movements, strict=True):
            parts = np.split(movement, np.cumsum([array.size for array in peer.model.values()])[:-1])
            for array, part in zip(peer.model.values(), parts, strict=True):
                array += part.reshape(array.shape).astype(np.float32)
        together([partial(peer.diloco.outer_step, weight=w) for peer, w in zip(peers, weights, strict=True)])
        mean = np.average(movements, axis=0, weights=weights)
        assert np.linalg.norm(flat(peers[0]) - before - mean) < 1.5 * np.linalg.norm(mean)
        assert peers[0].diloco.digest() == peers[1].diloco.digest()
    close(peers)


def flat(peer: Peer) -> Any:
    return np.concatenate([array.ravel() for array in peer.model.values()]).astype(np.float64)


class Scripted:
    """A communicator whose ops commit in the worlds that are said: of (weight, value) by peer, this one first."""

    world_size = 2

    def __init__(self, sums: list[list[tuple[float, float]]], notes: list[list[tuple[float, float]]]) -> None:
        self.sums, self.notes = sums, notes
        self.launch = SimpleNamespace(all_reduce=self._all_reduce, all_gather=self._all_gather)

    def _all_reduce(self, send: Any, recv: Any, **_: Any) -> Any:
        world = self.sums.pop(0)
        assert send[0] == world[0][0] * world[0][1]
        recv[:] = sum(weight * value for weight, value in world)
        info = SimpleNamespace(world_size=len(world), tx_bytes=1, rx_bytes=1, membership=MEMBERS)
        return SimpleNamespace(result=lambda: info, ignore_failure=lambda: None)

    def _all_gather(self, send: Any, **_: Any) -> Any:
        world = self.notes.pop(0)
        array = np.array([[weight, 1.0] for weight, _ in world])
        info = SimpleNamespace(world_size=len(world), tx_bytes=1, rx_bytes=1, array=array, membership=MEMBERS)
        return SimpleNamespace(result=lambda: info, ignore_failure=lambda: None)


MEMBERS = SimpleNamespace(peers=())
PEERS = [(3.0, 1.0), (5.0, 2.0), (100.0, 7.0)]


@pytest.mark.parametrize(
    ("sums", "notes", "left"),
    [([3], [3], 3), ([3, 2], [2], 2), ([2], [3, 2], 2), ([3, 1], [2, 1], 1)],
    ids=["no loss", "lost after the sum", "lost after the notes", "two lost, one after the other"],
)
def test_loss_between_sum_and_notes(sums: list[int], notes: list[int], left: int) -> None:
    communicator: Any = Scripted([PEERS[:size] for size in sums], [PEERS[:size] for size in notes])
    vector = np.full(4, PEERS[0][1], np.float32)
    averaged = NotedAverage(communicator, vector, 0, 2, 0, None, PEERS[0][0], 1.0).wait()
    assert averaged.world_size == left
    assert averaged.aborted == len(sums) + len(notes) - 2
    mean = sum(weight * value for weight, value in PEERS[:left]) / sum(weight for weight, _ in PEERS[:left])
    np.testing.assert_array_equal(vector, np.full(4, mean, np.float32))
    assert not communicator.sums
    assert not communicator.notes


def test_weighted_mean_alone(master: MasterNode) -> None:
    outer = OuterNesterov(1.0, 0.0)
    peer = Peer(master.address, 2, outer=outer).enter()
    steps(peer, 2, 7.0)
    assert_close(peer.model, Reference(outer).run([2], 2))
    peer.close()
