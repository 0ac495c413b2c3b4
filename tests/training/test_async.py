"""Asynchronous DiLoCo over NumPy arrays, with joins and losses while an average is in flight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from pccl import Communicator, MasterNode, PCCLError, Result
from pccl.training import AsyncDiLoCo, OuterNesterov
from tests.support.cluster import WAIT_S, Background, together
from tests.training.peers import (
    Model,
    Peer,
    assert_close,
    assert_parity,
    each_runs,
    new_model,
    train,
)


class AsyncPeer(Peer):
    def finish(self) -> None:
        assert isinstance(self.diloco, AsyncDiLoCo)
        self.diloco.finish()
        self.digests[self.diloco.revision] = self.diloco.digest()


def async_cluster(master: MasterNode, count: int, **options: object) -> list[AsyncPeer]:
    peers = [AsyncPeer(master.address, number, AsyncDiLoCo, **options) for number in range(count)]
    together([partial(peer.enter, count) for peer in peers])
    return peers


def finish(peers: list[AsyncPeer]) -> None:
    together([peer.finish for peer in peers])
    together([peer.close for peer in peers])


WHOLE = slice(0, 40)
THIRDS = [slice(0, 10), slice(10, 25), slice(25, 40)]
"""The thirds of 40 elements, cut between rows of five."""
compressed = pytest.mark.parametrize("compression", [None, "2bit"])
fragmented = pytest.mark.parametrize("fragments", [[WHOLE], THIRDS], ids=["whole", "fragments"])


def model_of(vector: np.ndarray[Any, Any]) -> Model:
    """Views of its elements."""
    return {"weights": vector[:35].reshape(7, 5), "bias": vector[35:]}


def late_reference(
    numbers: list[int],
    steps: int,
    drains: frozenset[int] = frozenset(),
    fragments: Sequence[slice] = (WHOLE,),
    *,
    overlaps: bool = False,
    mixing: float | None = None,
    ahead: str = "own",
) -> Model:
    """The algorithm in float64: updates come a step late, peers go on from a guess of their own; `drains` are the outer
    steps that end with no average in flight. If it `overlaps`, each update is made between two outer steps. With
    `mixing`, peers go on from where they are (Streaming DiLoCo)."""
    rate, mu = OuterNesterov().learning_rate, OuterNesterov().momentum
    outer = np.concatenate([array.ravel() for array in new_model().values()]).astype(np.float64)
    momentum = np.zeros_like(outer)
    locals_ = [outer.copy() for _ in numbers]
    starts = [outer.copy() for _ in numbers]  # from where they have moved
    flight: tuple[slice, Any] | None = None

    def update(place: slice, gradients: list[Any]) -> None:
        gradient = np.mean(gradients, axis=0)
        momentum[place] = mu * momentum[place] + gradient
        outer[place] -= rate * (gradient + mu * momentum[place])

    def train_all() -> None:
        for number, local in zip(numbers, locals_, strict=True):
            train(model_of(local), number)

    def land() -> None:
        if flight is None:
            return
        place, gradients = flight
        update(place, gradients)
        for start, local in zip(starts, locals_, strict=True):
            if mixing is None:
                local[place] += outer[place] - start[place]
            else:
                local[place] = mixing * local[place] + (1 - mixing) * outer[place]
            start[place] = outer[place]

    for step in range(1, steps + 1):
        train_all()
        place = fragments[(step - 1) % len(fragments)]
        fresh = [start[place] - local[place] for start, local in zip(starts, locals_, strict=True)]
        land()
        flight = (place, fresh)
        if step in drains or (step == steps and not overlaps):
            update(place, fresh)
            flight = None
        for start, local, own in zip(starts, locals_, fresh, strict=True):
            if flight is None or mixing is None:
                start[place] = outer[place]
            if flight is not None and mixing is None:
                guess = own if ahead == "own" else rate * (1 + mu) * own / len(numbers)
                start[place] -= rate * mu**2 * momentum[place] + guess
            if flight is None or mixing is None:
                local[place] = start[place]
        if overlaps:
            train_all()
            land()
            flight = None
    return model_of(outer)


@fragmented
def test_matches_reference_implementation(master: MasterNode, fragments: list[slice]) -> None:
    peers = async_cluster(master, 3, fragments=len(fragments))
    each_runs(peers, 7)
    assert peers[0].worlds == [0, 3, 3, 3, 3, 3, 3, 3]
    assert {peer.diloco.outer_steps for peer in peers} == {8}
    finish(peers)
    assert_parity(peers)
    for peer in peers:
        assert_close(peer.model, late_reference([0, 1, 2], 8, fragments=fragments))


@fragmented
@pytest.mark.parametrize("settings", [{}, {"mixing": 0.5}, {"mixing": 0.0}, {"ahead": "share"}], ids=str)
def test_overlap_mixing_and_share_match_their_definitions(
    master: MasterNode, fragments: list[slice], settings: dict[str, Any]
) -> None:
    peers = async_cluster(master, 3, fragments=len(fragments), overlap=20, inner_steps=50, **settings)
    assert peers[0].diloco.inner_steps == 30
    each_runs(peers, 1)
    assert [peers[0].steps[i].world_size for i in range(2)] == [0, 3]
    together([peer.step for peer in peers])
    assert (peers[0].diloco.inner_steps, peers[0].diloco.outer_steps, peers[0].diloco.revision) == (20, 2, 1)
    each_runs(peers, 7)
    finish(peers)
    assert_parity(peers)
    expected = late_reference([0, 1, 2], 7, fragments=fragments, overlaps=True, **settings)
    for peer in peers:
        assert_close(peer.model, expected)


@pytest.mark.parametrize("settings", [{"mixing": 0.5}, {"ahead": "share"}], ids=str)
def test_mixing_and_share_without_overlap(master: MasterNode, settings: dict[str, Any]) -> None:
    peers = async_cluster(master, 3, fragments=3, **settings)
    each_runs(peers, 7)
    finish(peers)
    assert_parity(peers)
    for peer in peers:
        assert_close(peer.model, late_reference([0, 1, 2], 8, fragments=THIRDS, **settings))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"overlap": 50}, "overlap 50 is not an integer"),
        ({"overlap": 5, "steps": "by speed"}, "steps"),
        ({"mixing": 0.5}, "needs overlap= or several fragments"),
        ({"mixing": 1.0, "overlap": 5}, "below 1"),
        ({"mixing": 0.5, "overlap": 5, "ahead": "share"}, "without ahead="),
        ({"ahead": "others"}, '"own" or "share"'),
    ],
)
def test_invalid_settings(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        AsyncDiLoCo(Communicator("127.0.0.1:1"), new_model(), **settings)


@fragmented
def test_compression(master: MasterNode, fragments: list[slice]) -> None:
    peers = async_cluster(master, 3, fragments=len(fragments), compression="4bit")
    each_runs(peers, 7)
    finish(peers)
    assert_parity(peers)
    for name, array in late_reference([0, 1, 2], 8, fragments=fragments).items():
        np.testing.assert_allclose(peers[0].model[name], array, atol=0.2)


def test_step_without_an_average_says_so(master: MasterNode) -> None:
    (peer,) = async_cluster(master, 1)
    assert str(peer.step()).startswith("step 0: no average yet, ")
    assert str(peer.step()).startswith("step 1: 1 peer, ")
    peer.close()


@fragmented
@compressed
def test_newcomer_starts_after_drain(master: MasterNode, fragments: list[slice], compression: str | None) -> None:
    peers = async_cluster(master, 2, fragments=len(fragments), compression=compression)
    each_runs(peers, 2)
    assert peers[0].diloco.outer_steps == 3  # one is in flight
    newcomer = AsyncPeer(master.address, 2, AsyncDiLoCo, fragments=len(fragments), compression=compression)

    def three_have_met_twice(peer: Peer) -> bool:
        return peer.worlds.count(3) == 2

    threads = [Background(partial(peer.run, three_have_met_twice)) for peer in peers]
    newcomer.enter(5).run(three_have_met_twice)
    for thread in threads:
        thread.result()
    finish([*peers, newcomer])
    assert_parity([*peers, newcomer])
    joined_at = min(newcomer.digests)
    (drained,) = [step for step in peers[0].steps if step.admitted]
    assert (drained.revision, drained.world_size) == (joined_at, 2)
    # The outer step after the admission makes no update: its average has just been launched.
    assert peers[0].steps[peers[0].steps.index(drained) + 1].world_size == 0
    assert newcomer.worlds[:2] == [0, 3]


@fragmented
def test_drain_keeps_all_pseudo_gradients(master: MasterNode, fragments: list[slice]) -> None:
    """A newcomer that is refused at once makes the others drain and has no other effect."""
    peers = async_cluster(master, 2, fragments=len(fragments))
    each_runs(peers, 2)

    def has_admitted(peer: Peer) -> bool:
        return any(step.admitted for step in peer.steps)

    threads = [Background(partial(peer.run, has_admitted)) for peer in peers]
    newcomer = AsyncPeer(master.address, 2, AsyncDiLoCo)
    newcomer.communicator.connect()
    newcomer.close()
    for thread in threads:
        thread.result()
    drained = peers[0].diloco.outer_steps
    assert drained == peers[0].diloco.revision
    each_runs(peers, drained + 3)
    finish(peers)
    assert_parity(peers)
    assert_close(peers[0].model, late_reference([0, 1], drained + 4, frozenset({drained}), fragments))


@fragmented
@compressed
def test_peer_lost_in_flight_is_left_out(master: MasterNode, fragments: list[slice], compression: str | None) -> None:
    peers = async_cluster(master, 3, fragments=len(fragments), compression=compression)
    leaver = peers.pop()
    threads = [Background(partial(peer.run, 5)) for peer in peers]
    leaver.run(2)
    leaver.close()  # with its third average in flight; the others cannot begin their fourth
    for thread in threads:
        thread.result()
    finish(peers)
    assert_parity([*peers, leaver])
    assert peers[0].worlds[:3] == [0, 3, 3]
    assert peers[0].worlds[3] in (2, 3)
    assert peers[0].worlds[4:] == [2, 2]


@pytest.mark.parametrize("settings", [{}, {"mixing": 0.5}], ids=str)
@fragmented
def test_joins_and_losses_with_overlap(master: MasterNode, fragments: list[slice], settings: dict[str, Any]) -> None:
    options = {"fragments": len(fragments), "overlap": 20, "inner_steps": 50, "check_every": 1, **settings}
    peers = async_cluster(master, 2, **options)
    together([peer.step for peer in peers])
    assert peers[0].diloco.inner_steps == 20  # one is in flight
    newcomer = AsyncPeer(master.address, 2, AsyncDiLoCo, **options)

    def three_have_met_twice(peer: Peer) -> bool:
        return peer.worlds.count(3) >= 2 and peer.diloco.inner_steps == 30

    threads = [Background(partial(peer.run, three_have_met_twice)) for peer in peers]
    newcomer.enter(3).run(three_have_met_twice)
    for thread in threads:
        thread.result()
    assert_parity([*peers, newcomer])
    together([peer.step for peer in [*peers, newcomer]])
    newcomer.close()  # with an average in flight
    together([peer.step for peer in peers])
    assert {peer.worlds[-1] for peer in peers} <= {2, 3}
    each_runs(peers, peers[0].diloco.revision + 3)
    assert peers[0].worlds[-1] == 2
    finish(peers)
    assert_parity([*peers, newcomer])


def test_weights_since_the_last_launch_are_added(master: MasterNode) -> None:
    """Peer 0 has a weight only in the calls that apply an average, and peer 1 none at all."""
    peers = async_cluster(master, 2, overlap=20, inner_steps=50)
    for calls in range(8):
        for peer in peers:
            train(peer.model, peer.number)
        weights = [float(calls == 0 or calls % 2), 0.0]
        steps = [partial(peer.diloco.outer_step, weight=each) for peer, each in zip(peers, weights, strict=True)]
        together(steps)
    finish(peers)
    assert_close(peers[1].model, late_reference([0], 4, overlaps=True))


def test_reconnect_after_master_loss(master: MasterNode) -> None:
    peers = async_cluster(master, 2, rejoin=False)
    each_runs(peers, 2)
    master.interrupt()
    assert master.wait(WAIT_S)
    for peer in peers:
        with pytest.raises(PCCLError) as caught:
            peer.step()
        assert caught.value.result is Result.MASTER_CONNECTION_FAILED
        peer.close()
    with MasterNode("127.0.0.1:0") as successor:

        def reconnect(peer: AsyncPeer) -> None:
            peer.communicator = type(peer.communicator)(successor.address)
            peer.communicator.connect()
            peer.diloco.reconnect(peer.communicator, 2)
            peer.run(5)

        together([partial(reconnect, peer) for peer in peers])
        finish(peers)
        assert_parity(peers)
