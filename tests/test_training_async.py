"""Asynchronous DiLoCo over NumPy arrays, with joins and losses while an average is in flight."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from pccl import MasterNode, PCCLError, QuantizationOptions, Result
from pccl.training import AsyncDiLoCo
from tests.crew import Background, together
from tests.training_peers import (
    SHAPES,
    Model,
    Peer,
    Reference,
    assert_close,
    assert_parity,
    each_runs,
    train,
)


class AsyncPeer(Peer):
    def finish(self) -> None:
        assert isinstance(self.diloco, AsyncDiLoCo)
        self.diloco.finish()
        self.digests[self.diloco.revision] = self.diloco.digest()


def async_crew(master: MasterNode, count: int, **options: object) -> list[AsyncPeer]:
    peers = [AsyncPeer(master.address, number, AsyncDiLoCo, **options) for number in range(count)]
    together([partial(peer.enter, count) for peer in peers])
    return peers


def finish(peers: list[AsyncPeer]) -> None:
    together([peer.finish for peer in peers])
    together([peer.close for peer in peers])


def late_reference(numbers: list[int], steps: int, drains: frozenset[int] = frozenset()) -> Model:
    """The algorithm in float64: updates come a step late, peers start from a guess of their own; `drains` are the outer
    steps at whose end nothing is left in flight."""
    reference = Reference()
    outer = reference.outer
    starts = {number: dict(reference.parameters) for number in numbers}
    flight: list[Model] = []
    for step in range(1, steps + 1):
        fresh = []
        for number in numbers:
            local = {name: array.copy() for name, array in starts[number].items()}
            train(local, number)
            fresh.append({name: starts[number][name] - local[name] for name in SHAPES})
        if flight:
            reference.update(flight)
        if step in drains or step == steps:
            reference.update(fresh)
            flight = []
            starts = {number: dict(reference.parameters) for number in numbers}
        else:
            flight = fresh
            for number, own in zip(numbers, fresh, strict=True):
                for name in SHAPES:
                    drift = outer.learning_rate * outer.momentum**2 * reference.momentum[name]
                    starts[number][name] = reference.parameters[name] - drift - own[name]
    return reference.parameters


def test_three_peers_do_what_the_module_says(master: MasterNode) -> None:
    peers = async_crew(master, 3)
    each_runs(peers, 5)
    assert peers[0].worlds == [0, 3, 3, 3, 3, 3]
    assert {peer.diloco.outer_steps for peer in peers} == {6}
    finish(peers)
    assert_parity(peers)
    for peer in peers:
        assert_close(peer.model, late_reference([0, 1, 2], 6))


def test_one_peer_alone_does_the_same(master: MasterNode) -> None:
    (peer,) = async_crew(master, 1)
    peer.run(4)
    assert peer.worlds == [0, 1, 1, 1, 1]
    peer.finish()
    assert_close(peer.model, late_reference([0], 5))
    peer.close()


def test_quantized_updates_are_the_same_bytes_on_all(master: MasterNode) -> None:
    peers = async_crew(master, 3, quantization=QuantizationOptions())
    each_runs(peers, 4)
    finish(peers)
    assert_parity(peers)


def test_a_newcomer_gets_the_results_it_has_no_part_in(master: MasterNode) -> None:
    peers = async_crew(master, 2)
    each_runs(peers, 2)
    assert peers[0].diloco.outer_steps == 3  # one is in flight
    newcomer = AsyncPeer(master.address, 2, AsyncDiLoCo)

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
    # The outer step after the admission updates nothing: its average has just been launched.
    assert peers[0].steps[peers[0].steps.index(drained) + 1].world_size == 0
    assert newcomer.worlds[:2] == [0, 3]


def test_draining_loses_no_pseudo_gradient(master: MasterNode) -> None:
    """A newcomer that is refused at once makes the others drain and changes nothing else."""
    peers = async_crew(master, 2)
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
    each_runs(peers, drained + 1)
    finish(peers)
    assert_parity(peers)
    assert_close(peers[0].model, late_reference([0, 1], drained + 2, frozenset({drained})))


def test_who_is_lost_with_an_average_in_flight_is_left_out(master: MasterNode) -> None:
    peers = async_crew(master, 3)
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


def test_who_is_left_alone_goes_on(master: MasterNode) -> None:
    one, other = async_crew(master, 2)
    thread = Background(partial(one.run, 5))
    other.run(2)
    other.close()
    thread.result()
    finish([one])
    assert one.worlds[-1] == 1
    assert_parity([one, other])


def test_a_run_resumes_from_its_checkpoints(tmp_path: Path) -> None:
    with MasterNode("127.0.0.1:0") as master:
        peers = async_crew(master, 2)
        each_runs(peers, 3)
        for peer in peers:
            peer.diloco.save(tmp_path / f"{peer.number}.npz")
        together([peer.close for peer in peers])
    with MasterNode("127.0.0.1:0") as master:
        resumed = [AsyncPeer(master.address, number, AsyncDiLoCo) for number in range(2)]
        for peer in resumed:
            peer.diloco.load(tmp_path / f"{peer.number}.npz")
        together([partial(peer.enter, 2) for peer in resumed])
        assert resumed[0].diloco.outer_steps == 3
        assert resumed[0].digests[3] == peers[0].digests[3]
        each_runs(resumed, 5)
        finish(resumed)
        assert_parity(resumed)


def test_who_lost_the_master_goes_on_with_a_new_one(master: MasterNode) -> None:
    peers = async_crew(master, 2)
    each_runs(peers, 2)
    master.interrupt()
    assert master.wait(10)
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
