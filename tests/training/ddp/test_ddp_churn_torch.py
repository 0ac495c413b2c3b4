"""`DDP` with all that a training has, while peers die at points of a step and others come: equal after each step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pccl import Communicator, MasterNode
from pccl.training import DDP
from tests.support.cluster import Background, together
from tests.training.peers import assert_parity

torch = pytest.importorskip("torch")

OVERFLOWS = (3, 9, 15)
"""Revisions with an infinite loss on one peer."""
DEATHS = ("after backward", "after synchronize", "after clipping")


class DeathError(Exception):
    pass


class FullPeer:
    """Batch normalization, autocast, clipping, a scheduler and a GradScaler."""

    def __init__(self, address: str, number: int, compression: Any = None) -> None:
        self.number = number
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.module = torch.nn.Sequential(
                torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
            )
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        self.communicator = Communicator(address)
        self.ddp = DDP(
            self.communicator,
            self.module,
            self.optimizer,
            bucket_bytes=100,
            admit_every=1,
            check_every=1,
            shared={"scheduler": self.scheduler, "scaler": self.scaler},
            compression=compression,
        )
        self.digests: dict[int, str] = {}
        self.worlds: list[int] = []
        self.admitted: list[bool] = []
        self.skipped: dict[int, bool] = {}

    def enter(self, peers: int = 1) -> FullPeer:
        self.communicator.connect()
        self.ddp.join(peers)
        return self

    def step(self, death: str = "") -> None:
        def reached(point: str) -> None:
            if point == death:
                self.communicator.close()
                raise DeathError

        revision = self.ddp.revision
        inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(100 * self.number + revision))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (self.ddp(inputs) - inputs[:, :2]).pow(2).mean()
        if revision in OVERFLOWS and self.number % 2 == 0:
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()
        reached("after backward")
        self.ddp.synchronize()
        reached("after synchronize")
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.ddp.parameters(), 0.1)
        reached("after clipping")
        step = self.ddp.step(self.scaler)
        self.scheduler.step()
        self.worlds.append(step.world_size)
        self.admitted.append(step.admitted)
        self.skipped[revision] = step.is_skipped
        self.digests[step.revision] = self.ddp.digest()

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self.step()


@pytest.mark.parametrize("compression", [None, "2bit"])
def test_replicas_identical_through_kills_and_joins(master: MasterNode, compression: str | None) -> None:
    peers = [FullPeer(master.address, number, compression) for number in range(3)]
    everybody = list(peers)
    together([partial(peer.enter, 3) for peer in peers])
    together([partial(peer.run, lambda peer=peer: peer.ddp.revision == 2) for peer in peers])
    for death in DEATHS:
        victim = peers.pop(0)
        begins = {peer.number: len(peer.worlds) for peer in peers}

        def is_replaced(peer: FullPeer, begins: dict[int, int] = begins) -> bool:
            begin = begins[peer.number]
            return peer.admitted[begin:][-4:] == [True, False, False, False]

        threads = [Background(partial(peer.run, partial(is_replaced, peer))) for peer in peers]
        with pytest.raises(DeathError):
            victim.step(death)
        newcomer = FullPeer(master.address, len(everybody), compression).enter()
        newcomer.run(lambda newcomer=newcomer: len(newcomer.worlds) == 3)
        assert newcomer.worlds == [3, 3, 3]
        for thread in threads:
            thread.result()
        peers.append(newcomer)
        everybody.append(newcomer)
    assert_parity(everybody)
    assert len({peer.ddp.revision for peer in peers}) == 1
    assert len({float(peer.scaler.get_scale()) for peer in peers}) == 1
    assert len({peer.optimizer.param_groups[0]["lr"] for peer in peers}) == 1
    skips: dict[int, set[bool]] = {}
    for each in everybody:
        for revision, skipped in each.skipped.items():
            skips.setdefault(revision, set()).add(skipped)
    assert all(len(found) == 1 for found in skips.values())
    assert {True} in skips.values()
    together([peer.communicator.close for peer in peers])
