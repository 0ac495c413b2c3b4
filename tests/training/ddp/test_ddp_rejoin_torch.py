"""DDP peers that are evicted at points of a step and come back by themselves, and steps that wait for enough peers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from pccl import Communicator, MasterNode, Result
from pccl.training import DDP, ElasticSampler
from tests.support.cluster import Background, evict, refusal, together
from tests.training.test_ddp_torch import DDPPeer, assert_parity, close, cluster_of, loss, new_module, new_optimizer

torch = pytest.importorskip("torch")


def has_admitted_three_steps_ago(peer: Any) -> bool:
    return any(step.admitted for step in peer.steps[:-3])


@pytest.mark.parametrize("point", ["before backward", "after backward", "after synchronize"])
def test_evicted_peer_rejoins(master: MasterNode, point: str) -> None:
    peers = cluster_of(master, 2)
    stays, evicted = peers
    together([partial(peer.run, 3) for peer in peers])
    thread = Background(partial(stays.run, has_admitted_three_steps_ago))

    def reached(here: str) -> None:
        if here == point:
            evict(master, evicted.communicator)

    reached("before backward")
    loss(evicted.module, evicted.number, evicted.ddp.revision).backward()
    reached("after backward")
    evicted.ddp.synchronize()
    torch.nn.utils.clip_grad_norm_(evicted.ddp.parameters(), 0.1)
    reached("after synchronize")
    step = evicted.ddp.step()
    assert (step.rejoined, step.admitted, step.world_size, step.is_skipped) == (True, False, 0, False)
    assert step.revision == evicted.ddp.revision
    evicted.steps.append(step)
    count = len(evicted.steps)
    evicted.run(lambda peer: len(peer.steps) == count + 3)
    thread.result()
    assert [step.rejoined for step in evicted.steps[count:]] == [False] * 3
    assert_parity(peers)
    close(peers)


@pytest.mark.parametrize("global_batch", [None, 8])
def test_step_alone_rejoins_with_weights_and_a_sampler(master: MasterNode, global_batch: int | None) -> None:
    class Peer:
        def __init__(self, number: int) -> None:
            self.number = number
            self.sampler = ElasticSampler(64, seed=0, batch_size=4)
            self.module = new_module()
            self.communicator = Communicator(master.address)
            shared = {"sampler": self.sampler}
            optimizer = new_optimizer(self.module)
            options: Any = {"admit_every": 1, "shared": shared, "global_batch": global_batch}
            self.ddp = DDP(self.communicator, self.module, optimizer, **options)
            self.steps: list[Any] = []
            self.digests: dict[int, str] = {}

        def enter(self) -> None:
            self.communicator.connect()
            self.ddp.join(2)
            self.batches = self.sampler.batches()  # follows sampler.batch_size

        def run(self, until: Any) -> None:
            while not until(self):
                if global_batch is not None:
                    self.sampler.batch_size = self.ddp.batch_size
                next(self.batches)
                loss(self.module, self.number, self.ddp.revision).backward()
                self.steps.append(self.ddp.step(weight=1.0 + self.number))
                self.digests[self.ddp.revision] = self.ddp.digest()

    peers = [Peer(number) for number in range(2)]
    stays, evicted = peers
    together([peer.enter for peer in peers])
    together([partial(peer.run, lambda peer: len(peer.steps) == 3) for peer in peers])
    evict(master, evicted.communicator)
    thread = Background(partial(stays.run, has_admitted_three_steps_ago))
    evicted.run(lambda peer: len(peer.steps) == 3 + 1 + 3)
    thread.result()
    assert [step.rejoined for step in evicted.steps] == [False] * 3 + [True] + [False] * 3
    found: Any = peers
    assert_parity(found)
    close(found)


def test_rejoin_can_be_disabled(master: MasterNode) -> None:
    (peer,) = cluster_of(master, 1, rejoin=False)
    evict(master, peer.communicator)
    assert refusal(partial(peer.run, 1)).result is Result.MASTER_CONNECTION_FAILED


def test_steps_given_up_after_an_eviction(master: MasterNode) -> None:
    (peer,) = cluster_of(master, 1)
    for give_up in (peer.ddp.abandon, peer.ddp.synchronize):
        loss(peer.module, 0, 0).backward()
        evict(master, peer.communicator)
        give_up()
        peer.ddp.zero_grad()
        peer.run(peer.ddp.revision + 2)
        assert not any(step.rejoined for step in peer.steps)
    close([peer])


def test_steps_wait_for_enough_peers(master: MasterNode) -> None:
    peers = cluster_of(master, 2, hold_below=2, admit_every=3)
    together([partial(peer.run, 4) for peer in peers])
    peers.pop().communicator.close()
    (stays,) = peers
    thread = Background(partial(stays.run, has_admitted_three_steps_ago))
    newcomer = DDPPeer(master.address, 1, hold_below=2, admit_every=3).enter(1)
    newcomer.run(lambda peer: len(peer.steps) == 3)
    thread.result()
    assert stays.worlds == [2, 2, 2, 2, 1, 2, 2, 2]
    assert_parity([stays, newcomer])
    close([stays, newcomer])
