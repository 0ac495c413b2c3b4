"""DiLoCo over NumPy arrays: peers in threads, held against a model of the algorithm that knows no network."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pccl import Communicator, MasterNode, PCCLError, QuantizationOptions, ReduceOp, Result
from pccl.training import AsyncDiLoCo, DiLoCo, DivergenceError, OuterNesterov, OuterOptimizer
from tests.api.test_error_feedback import Model as Average
from tests.api.test_quantization import FOUR_BITS, LEVELS
from tests.support.cluster import WAIT_S, Background, together, until
from tests.training.peers import (
    Model,
    Peer,
    Reference,
    assert_close,
    assert_parity,
    cluster_of,
    each_runs,
    new_model,
    train,
)


def close(peers: list[Peer]) -> None:
    together([peer.close for peer in peers])


def test_matches_the_paper(master: MasterNode) -> None:
    peers = cluster_of(master, 3)
    each_runs(peers, 5)
    assert_parity(peers)
    expected = Reference().run([0, 1, 2], 5)
    for peer in peers:
        assert peer.worlds == [3] * 5
        assert_close(peer.model, expected)
    close(peers)


def test_quantized_updates_are_the_same_bytes_on_all(master: MasterNode) -> None:
    peers = cluster_of(master, 3, quantization=QuantizationOptions())
    each_runs(peers, 4)
    assert_parity(peers)
    for name, array in Reference().run([0, 1, 2], 4).items():
        np.testing.assert_allclose(peers[0].model[name], array, atol=0.05)
    close(peers)


def flat(model: Model) -> Any:
    return np.concatenate([array.ravel() for array in model.values()])


@pytest.mark.parametrize(
    ("word", "decay", "options"), [("4bit", 1.0, FOUR_BITS), ("2bit", 0.4, LEVELS[0]), ("1bit", 0.4, LEVELS[1])]
)
def test_compression_is_quantization_with_error_feedback(
    master: MasterNode, word: str, decay: float, options: QuantizationOptions
) -> None:
    peers = cluster_of(master, 3, compression=word)
    each_runs(peers, 5)
    assert_parity(peers)
    average = Average(3, decay, options, is_ring=False)
    by_rank = sorted(peers, key=lambda peer: peer.communicator.rank)
    parameters = flat(new_model())
    momentum = np.zeros_like(parameters)
    for _ in range(5):
        moved = []
        for peer in by_rank:
            local = {"all": parameters.copy()}
            train(local, peer.number)
            moved.append(parameters - local["all"])
        OuterNesterov(1.0, 0.8).step(parameters, momentum, average.reduce(moved, ReduceOp.AVG))
    for peer in peers:
        np.testing.assert_array_equal(flat(peer.model), parameters)
    close(peers)


def test_wrong_compression() -> None:
    made = partial(DiLoCo, Communicator("127.0.0.1:1"))
    with pytest.raises(ValueError, match="compression '3bit': must be one of '8bit', '4bit', '2bit', '1bit' or None"):
        made(new_model(), compression="3bit")
    with pytest.raises(ValueError, match="compression '2bit' sets quantization= itself"):
        made(new_model(), compression="2bit", quantization=QuantizationOptions())
    with pytest.raises(ValueError, match="compression with error feedback needs float32, not float64"):
        made({"x": np.ones(3)}, compression="2bit")
    made({"x": np.ones(3)}, compression="8bit")


compressed = pytest.mark.parametrize("compression", [None, "2bit"])


@compressed
def test_newcomers_get_outer_state(master: MasterNode, compression: str | None) -> None:
    peers = cluster_of(master, 2, compression=compression)
    each_runs(peers, 2)
    newcomer = Peer(master.address, 2, compression=compression)
    for array in newcomer.model.values():
        array[...] = np.nan

    def three_have_met_twice(peer: Peer) -> bool:
        return peer.worlds.count(3) == 2

    threads = [Background(partial(peer.run, three_have_met_twice)) for peer in peers]
    newcomer.enter(peers_min=5)  # is not waited for: the others train already
    newcomer.run(three_have_met_twice)
    for thread in threads:
        thread.result()
    joined_at = min(newcomer.digests)
    assert joined_at > 2
    assert set(newcomer.digests) == {joined_at, joined_at + 1, joined_at + 2}
    assert_parity([*peers, newcomer])
    assert [step.revision for step in peers[0].steps if step.admitted] == [joined_at]
    close([*peers, newcomer])


@compressed
def test_peer_lost_during_average_is_left_out(master: MasterNode, compression: str | None) -> None:
    peers = cluster_of(master, 3, compression=compression)
    leaver = peers.pop()
    threads = [Background(partial(peer.run, 5)) for peer in peers]
    leaver.run(2)
    until(lambda: all(peer.communicator.stats["ops_open"] for peer in peers), "the others are in the third average")
    leaver.close()
    for thread in threads:
        thread.result()
    assert_parity([*peers, leaver])
    for peer in peers:
        assert peer.worlds == [3, 3, 2, 2, 2]
        assert [step.aborted for step in peer.steps] == [0, 0, 1, 0, 0]
    close(peers)


def test_resumed_run_is_bit_identical(tmp_path: Path) -> None:
    with MasterNode("127.0.0.1:0") as master:
        whole = cluster_of(master, 2)
        each_runs(whole, 6)
        close(whole)
    with MasterNode("127.0.0.1:0") as master:
        first = cluster_of(master, 2)
        each_runs(first, 4)
        for peer in first:
            peer.diloco.save(tmp_path / f"{peer.number}.safetensors")
        close(first)
    with MasterNode("127.0.0.1:0") as master:
        second = [Peer(master.address, number) for number in range(2)]
        for peer in second:
            peer.diloco.load(tmp_path / f"{peer.number}.safetensors")
        together([partial(peer.enter, 2) for peer in second])
        each_runs(second, 6)
        close(second)
    assert_parity([*whole, *first, *second])
    assert sorted(second[0].digests) == [4, 5, 6]


def test_every_row_of_the_outer_state_is_compared(master: MasterNode) -> None:
    class Rows(OuterOptimizer):
        def __repr__(self) -> str:
            return "Rows()"

        def state(self, parameters: Any) -> Any:
            return np.zeros((4, parameters.size), parameters.dtype)

        def step(self, parameters: Any, state: Any, gradient: Any) -> None:
            parameters -= gradient

    peers = cluster_of(master, 2, outer=Rows(), check_every=1)
    peers[1].diloco._momentum[3, 0] = 1

    def run(peer: Peer) -> None:
        with pytest.raises(DivergenceError, match="outer state 3 of"):
            peer.run(3)

    together([partial(run, peer) for peer in peers])
    close(peers)


def test_reconnect_after_master_loss(master: MasterNode) -> None:
    peers = cluster_of(master, 2, rejoin=False)
    each_runs(peers, 2)
    master.interrupt()
    assert master.wait(WAIT_S)
    for peer in peers:
        with pytest.raises(PCCLError) as caught:
            peer.step()
        assert caught.value.result is Result.MASTER_CONNECTION_FAILED
    with MasterNode("127.0.0.1:0") as successor:

        def reconnect(peer: Peer) -> None:
            peer.close()
            peer.communicator = Communicator(successor.address)
            peer.communicator.connect()
            peer.diloco.reconnect(peer.communicator, 2)
            peer.run(5)

        together([partial(reconnect, peer) for peer in peers])
        assert_parity(peers)
        assert_close(peers[0].model, Reference().run([0, 1], 5))
        close(peers)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({}, "no parameters"),
        ({"a": np.zeros(3, np.int32)}, "'a' is int32; only float16"),
        ({"a": [1.0]}, "'a' must be a NumPy array, not list"),
        (np.zeros(3), "a mapping of names to NumPy arrays, not ndarray"),
    ],
)
def test_untrainable_models_are_refused(master: MasterNode, model: Any, reason: str) -> None:
    with pytest.raises((TypeError, ValueError), match=reason):
        DiLoCo(Communicator(master.address), model)


@pytest.mark.parametrize("loop", [DiLoCo, AsyncDiLoCo])
def test_step_before_join_is_refused(loop: type[DiLoCo | AsyncDiLoCo]) -> None:
    with pytest.raises(PCCLError, match="call join first") as caught:
        loop(Communicator("127.0.0.1:1"), new_model()).outer_step()
    assert caught.value.result is Result.INVALID_USAGE


def test_any_strides_and_precisions(master: MasterNode) -> None:
    model = {
        "transposed": np.arange(6, dtype=np.float64).reshape(2, 3).T,
        "half": np.ones(4, np.float16),
        "scalar": np.array(2.0),
        "empty": np.zeros((0, 3)),
    }
    communicator = Communicator(master.address)
    communicator.connect()
    diloco = DiLoCo(communicator, model, outer=OuterNesterov(1.0, 0.0))
    diloco.join()
    expected = {name: array - 0.5 for name, array in model.items()}
    for array in model.values():
        array -= 0.5
    diloco.outer_step()
    for name, array in model.items():
        np.testing.assert_array_equal(array, expected[name])
    communicator.close()


@pytest.mark.parametrize(("rate", "momentum"), [(0.0, 0.9), (-1, 0.9), (0.7, 1.0), (0.7, -0.1), (float("nan"), 0)])
def test_invalid_outer_options(rate: float, momentum: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        OuterNesterov(rate, momentum)
