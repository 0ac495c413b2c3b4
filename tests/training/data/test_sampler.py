"""Samples that peers train on in outer steps, with losses and newcomers: audited from their logs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pccl import MasterNode
from pccl.training import AsyncDiLoCo, DiLoCo, ElasticSampler
from tests.support.cluster import Background, together
from tests.training.data.sampler_peers import SIZE, SamplerPeer, audited
from tests.training.peers import Kind, assert_parity
from tests.training.spsa.spsa_peers import SPSAPeer

KINDS = [DiLoCo, AsyncDiLoCo]


def cluster_of(master: MasterNode, count: int, kind: Kind, logs: Path, is_fixed: bool) -> list[SamplerPeer]:
    peers = [SamplerPeer(master.address, number, kind, logs, is_fixed=is_fixed) for number in range(count)]
    together([partial(peer.enter, count) for peer in peers])
    return peers


def epochs(count: int) -> Callable[[object], bool]:
    def are_over(peer: object) -> bool:
        assert isinstance(peer, SamplerPeer)
        return peer.sampler.epoch >= count

    return are_over


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_fixed", [False, True])
def test_samples_are_used_once_through_losses_and_joins(
    master: MasterNode, kind: Kind, is_fixed: bool, tmp_path: Path
) -> None:
    peers = cluster_of(master, 3, kind, tmp_path, is_fixed)
    leaver = peers.pop()
    threads = [Background(partial(peer.run, epochs(3))) for peer in peers]
    leaver.run(2)
    leaver.train()  # for a step that it is not in
    leaver.close()
    newcomer = SamplerPeer(master.address, 3, kind, tmp_path, is_fixed=is_fixed)
    newcomer.enter().run(epochs(3))
    for thread in threads:
        thread.result()
    peers.append(newcomer)
    if kind is AsyncDiLoCo:
        together([peer.diloco.finish for peer in peers])  # type: ignore[union-attr]
    together([peer.close for peer in peers])
    assert_parity([*peers, leaver])
    found = audited(tmp_path)
    assert found.epochs >= 3
    assert found.peers == 4
    assert found.given_up >= 2 * leaver.batches
    assert found.again > 0


def test_spsa_directions_get_own_samples(master: MasterNode, tmp_path: Path) -> None:
    def peer_of(number: int) -> tuple[SPSAPeer, ElasticSampler]:
        log = tmp_path / f"{number}.jsonl"
        sampler = ElasticSampler(SIZE, batch_size=3, log=log)
        return SPSAPeer(master.address, number, admit_every=1, shared={"sampler": sampler}), sampler

    def step(peer: SPSAPeer, sampler: ElasticSampler) -> bool:
        batch = next(sampler.batches())
        peer.spsa.step(lambda _: float(batch.mean()))
        return sampler.epoch < 2

    def run(peer: SPSAPeer, sampler: ElasticSampler) -> None:
        while step(peer, sampler):
            pass

    cluster = [peer_of(number) for number in range(3)]
    together([partial(peer.enter, 3) for peer, _ in cluster])
    threads = [Background(partial(run, *each)) for each in cluster[:2]]
    leaver, its = cluster[2]
    step(leaver, its)
    next(its.batches())
    leaver.communicator.close()
    for thread in threads:
        thread.result()
    together([peer.communicator.close for peer, _ in cluster[:2]])
    for _, sampler in cluster:
        sampler.close_log()
    found = audited(tmp_path)
    assert (found.epochs, found.peers, found.given_up, found.again) == (2, 3, 3, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_holds_the_position(master: MasterNode, kind: Kind, tmp_path: Path) -> None:
    (peer,) = cluster_of(master, 1, kind, tmp_path, True)
    peer.run(20)
    peer.diloco.save(tmp_path / "checkpoint")
    state = peer.sampler.state_dict()
    peer.run(30)
    peer.close()
    again = SamplerPeer(master.address, 0, kind, tmp_path, is_fixed=True)
    again.diloco.load(tmp_path / "checkpoint")
    assert again.sampler.state_dict() == state
    again.enter().run(50)
    again.close()
    found = audited(tmp_path)
    assert (found.steps, found.used) == (50, 100)
    assert found.given_up >= 20  # of the steps that were made twice
    assert found.epochs == 50 * 2 // SIZE


def test_newcomer_with_other_dataset_leaves(master: MasterNode, tmp_path: Path) -> None:
    peers = cluster_of(master, 2, DiLoCo, tmp_path, False)
    threads = [Background(partial(peer.run, epochs(3))) for peer in peers]
    stranger = SamplerPeer(master.address, 9, DiLoCo, tmp_path / "..", size=SIZE + 1)
    with pytest.raises(ValueError, match="the run's ElasticSampler has dataset_size 83, not 84 as here: use the same"):
        stranger.enter()
    for thread in threads:
        thread.result()
    together([peer.close for peer in peers])
    assert audited(tmp_path).epochs >= 3
