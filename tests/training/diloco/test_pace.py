"""Peers of unequal speed make as many inner steps as fit a common time, told by clocks that the tests move."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from pccl import MasterNode, Result
from pccl.training import AsyncDiLoCo, DiLoCo
from pccl.training.diloco.diloco import InnerSteps
from tests.support.cluster import together
from tests.training.peers import Kind, Peer, assert_parity, cluster_of, new_model, refused_while_others_train, train

BASE = 50


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Timed:
    """A peer whose inner steps take a time of its own."""

    def __init__(self, peer: Peer, seconds: float) -> None:
        self.peer, self.seconds, self.clock = peer, seconds, Clock()
        peer.diloco._inner_steps.clock = self.clock
        peer.diloco._inner_steps.forget()
        self.made: list[int] = []
        self.took_s: list[float] = []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            made = self.peer.diloco.inner_steps
            train(self.peer.model, self.peer.number)
            self.clock.now_s += made * self.seconds
            self.made.append(made)
            self.took_s.append(made * self.seconds)
            self.peer.steps.append(self.peer.diloco.outer_step(weight=made))
            self.peer.digests[self.peer.diloco.revision] = self.peer.diloco.digest()


def timed_cluster(master: MasterNode, seconds: Sequence[float], kind: Kind = DiLoCo) -> list[Timed]:
    peers = cluster_of(master, len(seconds), kind, inner_steps=BASE, steps="by speed")
    return [Timed(peer, each) for peer, each in zip(peers, seconds, strict=True)]


def close(cluster: Sequence[Timed]) -> None:
    together([each.peer.close for each in cluster])


@pytest.mark.parametrize(("kind", "late"), [(DiLoCo, 1), (AsyncDiLoCo, 2)])
def test_slow_peer_makes_fewer_inner_steps(master: MasterNode, kind: Kind, late: int) -> None:
    cluster = timed_cluster(master, [0.1, 0.5, 0.13], kind)
    together([partial(each.run, 5) for each in cluster])
    assert_parity([each.peer for each in cluster])
    for each, expected in zip(cluster, [50, 10, 38], strict=True):
        assert each.made == [BASE] * late + [expected] * (5 - late)
        assert each.took_s[-1] == pytest.approx(5.0, rel=0.02)
    close(cluster)


def test_speed_changes_are_followed(master: MasterNode) -> None:
    cluster = timed_cluster(master, [0.1, 0.1])
    together([partial(each.run, 2) for each in cluster])
    cluster[0].seconds = 0.4
    together([partial(each.run, 8) for each in cluster])
    assert cluster[0].made[:3] == [BASE] * 3
    assert cluster[0].made[-1] == pytest.approx(BASE / 4, abs=1)
    assert cluster[1].made == [BASE] * 10
    close(cluster)


def test_inner_steps_rule(master: MasterNode) -> None:
    error = refused_while_others_train(
        master,
        cluster_of(master, 2, inner_steps=BASE, steps="by speed"),
        lambda communicator: DiLoCo(communicator, new_model(), inner_steps=BASE + 1, steps="by speed"),
    )
    assert error.result is Result.INVALID_ARGUMENT


def test_site_ranks_make_the_least_number() -> None:
    wanted = [37, 12, 50]
    barrier, texts = threading.Barrier(3), [""] * 3

    class Ranks:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def gather(self, text: str) -> list[str]:
            texts[self.rank] = text
            barrier.wait(10)
            return list(texts)

    def adapt(rank: int) -> int:
        site: Any = Ranks(rank)
        pace = InnerSteps(BASE, site)
        pace.adapt([1.0], BASE / (wanted[rank] + 0.5))
        return pace.count

    assert together([partial(adapt, rank) for rank in range(3)]) == [12] * 3


@pytest.mark.parametrize(("option", "value"), [("inner_steps", 0), ("steps", "by size")])
def test_invalid_options(master: MasterNode, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option):
        Peer(master.address, 0, **{option: value})
