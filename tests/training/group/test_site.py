"""Sites of several ranks: threads of this process that meet at every inner step, as ranks that share a model do."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from pccl import Communicator, MasterNode, Result
from pccl.training import AsyncDiLoCo, DiLoCo, OuterStep, Site
from tests.support.cluster import WAIT_S, Background, outcomes, results, together, until

RANKS = 2
Kind = type[DiLoCo] | type[AsyncDiLoCo]


class Inner:
    """The network of a site: gathered texts, and inner steps that need all ranks."""

    def __init__(self, ranks: int) -> None:
        self._texts: dict[int, str] = {}
        self.barrier = threading.Barrier(ranks)

    def of_rank(self, rank: int) -> Callable[[str], list[str]]:
        def gather(text: str) -> list[str]:
            self._texts[rank] = text
            self.barrier.wait(WAIT_S)
            texts = [self._texts[rank] for rank in sorted(self._texts)]
            self.barrier.wait(WAIT_S)
            return texts

        return gather


class Rank:
    """One shard of a model whose elements go towards the site's number."""

    def __init__(self, master: MasterNode, number: int, rank: int, inner: Inner, name: str, ranks: int) -> None:
        self.number = number
        self.inner = inner
        self.site = Site(name, rank, ranks, inner.of_rank(rank))
        self.model = {"shard": np.full(3 + rank, float(rank))}
        self.communicator = self.site.communicator(master.address)
        self.diloco: Any = None
        self.digests: dict[int, str] = {}
        self.steps: list[OuterStep] = []

    def enter(self, sites_min: int, kind: Kind = DiLoCo) -> None:
        self.communicator.connect()
        self.diloco = kind(self.communicator, self.model, site=self.site)
        self.diloco.join(sites_min)

    def run(self, until: int) -> None:
        while self.diloco.outer_steps < until:
            self.inner.barrier.wait(WAIT_S)
            for array in self.model.values():
                array += 0.1 * (self.number - array)
            self.steps.append(self.diloco.outer_step())
            self.digests[self.diloco.revision] = self.diloco.digest()


class SiteOfRanks:
    _names = itertools.count()

    def __init__(self, master: MasterNode, number: int, ranks: int = RANKS) -> None:
        inner = Inner(ranks)
        name = f"site {next(self._names)}"
        self.ranks = [Rank(master, number, rank, inner, name, ranks) for rank in range(ranks)]

    def each(self, method: str, *args: Any) -> list[Any]:
        return [partial(getattr(rank, method), *args) for rank in self.ranks]

    def kill(self, rank: int = 0) -> None:
        """End as a killed process does: its connections break, and its mates' barrier does too."""
        self.ranks[0].inner.barrier.abort()
        session = self.ranks[rank].communicator._inner._session
        assert session is not None

        def die() -> None:
            session._lifetime.is_broken = True  # or the ops under way would be awaited, and Leave be said
            session._lifetime.fail(Result.NOT_INITIALIZED, "killed")

        session.ops._token.run_sync_soon(die)
        until(session.over.is_set, "it has died")


def all_of(sites: list[SiteOfRanks], method: str, *args: Any) -> list[Any]:
    return together([call for site in sites for call in site.each(method, *args)])


def close(sites: list[SiteOfRanks]) -> None:
    together([rank.communicator.close for site in sites for rank in site.ranks])


def assert_parity(sites: list[SiteOfRanks]) -> None:
    """Every shard is the same at all sites after every outer step."""
    for rank in range(RANKS):
        seen = [site.ranks[rank].digests for site in sites]
        for revision in set().union(*seen):
            assert len({digests[revision] for digests in seen if revision in digests}) == 1, (rank, revision)


@pytest.mark.parametrize("kind", [DiLoCo, AsyncDiLoCo])
def test_shards_are_averaged_by_rank(master: MasterNode, kind: Kind) -> None:
    sites = [SiteOfRanks(master, number) for number in range(2)]
    all_of(sites, "enter", 2, kind)
    all_of(sites, "run", 3)
    assert_parity(sites)
    assert [rank.diloco.revision for site in sites for rank in site.ranks] == [3 if kind is DiLoCo else 2] * 4
    shards = [rank.model["shard"] for rank in sites[0].ranks]
    assert [shard.size for shard in shards] == [3, 4]
    if kind is DiLoCo:
        assert shards[1][0] != shards[0][0]
        np.testing.assert_array_equal(shards[1], sites[1].ranks[1].model["shard"])
    close(sites)


def test_a_site_joins_and_another_is_killed(master: MasterNode) -> None:
    sites = [SiteOfRanks(master, number) for number in range(2)]
    all_of(sites, "enter", 2)
    all_of(sites, "run", 2)
    newcomer = SiteOfRanks(master, 2)
    entering = [Background(call) for call in newcomer.each("enter", 1)]
    step = 2
    while sites[0].ranks[0].communicator.world_size == 2:  # a step lets newcomers in at its end
        step += 1
        all_of(sites, "run", step)
    for each in entering:
        each.result()
    assert {rank.diloco.revision for rank in newcomer.ranks} == {step}
    everybody = [*sites, newcomer]
    all_of(everybody, "run", step + 2)
    assert_parity(everybody)
    assert newcomer.ranks[0].steps[-1].world_size == 3

    running = [Background(call) for site in (sites[0], newcomer) for call in site.each("run", step + 6)]
    until(lambda: newcomer.ranks[0].diloco.revision >= step + 2, "they run")
    sites[1].kill()
    for each in running:
        each.result()
    for rank in sites[1].ranks:
        error = outcomes([rank.diloco.outer_step])[0]
        assert error.result in (Result.MASTER_CONNECTION_FAILED, Result.NOT_INITIALIZED)
    assert_parity([sites[0], newcomer])
    assert {rank.steps[-1].world_size for rank in newcomer.ranks} == {2}
    close(everybody)


def test_site_with_other_size_is_refused(master: MasterNode) -> None:
    first, other = SiteOfRanks(master, 0), SiteOfRanks(master, 1, ranks=3)
    all_of([first], "enter", 1)
    entering = [Background(call) for call in other.each("enter", 1)]
    step = 0
    while not all(each.is_over for each in entering):
        step += 1
        all_of([first], "run", step)
    failed = [each.outcome() for each in entering]
    assert results(failed) == [Result.INVALID_USAGE] * 3
    assert "this site has 3 ranks, but the run has 5 peers in 3 peer groups" in str(failed[0])
    all_of([first], "run", step + 2)
    close([first, other])


def test_peer_without_site_is_refused(master: MasterNode) -> None:
    alone = Communicator(master.address)
    alone.connect()
    site = SiteOfRanks(master, 0)
    entering = [Background(call) for call in site.each("enter", 1)]
    until(alone.are_peers_pending, "both ranks wait")
    alone.update_topology()
    assert results([each.outcome() for each in entering]) == [Result.INVALID_USAGE] * RANKS
    alone.close()


def test_ranks_start_together(master: MasterNode) -> None:
    asked: list[bool] = []

    def gather(text: str) -> list[str]:
        asked.append(bool(text))
        return [text, "" if len(asked) == 2 else "1"]  # the grid is right for all; then one finds too few

    def trained(site: Site) -> Communicator:
        communicator = site.communicator(master.address)
        communicator.connect()
        DiLoCo(communicator, {"x": np.zeros(2)}, site=site).join(1)
        return communicator

    waiting = Background(lambda: trained(Site("a", 0, 1, gather)))
    until(lambda: len(asked) == 2, "it finds one enough, and its mates do not")
    other = Background(lambda: trained(Site("b", 0, 1, lambda text: [text])))
    together([waiting.result().close, other.result().close])
    assert asked == [True, True, True]
